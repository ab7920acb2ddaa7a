"""`saccade eval` and `saccade eval-lod`"""

from pathlib import Path
from typing import Any

import click

from saccade.cli.options import (
    ENGINE_OPTIONS,
    PROGRESS_OPTION,
    engine_config,
    option,
    run_tool,
    with_options,
)
from saccade.tools.evaluation.options import EvalOptions, LodEvalOptions

_FOLDER = click.Path(file_okay=False, path_type=Path)
_SHARED_OPTIONS = (
    option("--task", "tasks", multiple=True, metavar="NAME", help="Only this task (repeat the option)."),
    option("--count", type=int, default=200, help="Questions per task of the set."),
    option("--limit", type=int, help="Ask only this many of them, spread evenly. [default: all]"),
    option("--json", metavar="FILE", help="Write every answer to FILE; - is stdout."),
    option("--max-tokens", type=int, default=64, help="Longest answer in tokens."),
    option("--workers", type=int, help="Processes that draw images. [default: half the cores]"),
    PROGRESS_OPTION,
)
_EVAL_OPTIONS = (
    option("--visual-tokens", type=int, help="Resize every image to at most this many tokens."),
    option(
        "--curve/--no-curve", default=False, help="Full detail and 64 to 1024 visual tokens: table and plot."
    ),
    option("--out", type=_FOLDER, help="The curve's folder. [default: docs/quality]"),
    option(
        "--peer",
        type=click.Choice(["transformers"]),
        help="Ask the peer the same questions and compare the tokens.",
    ),
    option("--batch", type=int, default=32, help="Questions in the engine at once."),
    option("--instruction", help="A line added to every question, for models with long answers."),
)
_LOD_OPTIONS = (
    option(
        "--share",
        "shares",
        type=float,
        multiple=True,
        default=(0.125, 0.25, 0.5),
        help="A budget, as a share of the tokens at full detail (repeat the option).",
    ),
    option("--ablate/--no-ablate", default=False, help="Leave out one stage of LOD at a time instead."),
    option("--scenes", type=int, metavar="SEED", help="Fresh scenes instead of the fixed set, for tuning."),
    option("--out", type=_FOLDER, help="Write a page, a plot and every answer into this folder."),
    option("--batch", type=int, default=8, help="Examples at once; each is asked with every method."),
)


@click.command("eval")
@click.argument("model", default="embedded")
@with_options(_EVAL_OPTIONS, _SHARED_OPTIONS, ENGINE_OPTIONS)
def command(model: str, **given: Any) -> None:
    """Accuracy of MODEL, task by task, on the fixed question set of drawn images.

    \b
    Examples:
      saccade eval --limit 20
      saccade eval --task needle --task small_print --visual-tokens 256 --json out.json
      saccade eval --curve --limit 20
    """
    engine = engine_config(model, given)
    run_tool("eval", engine, EvalOptions(**given))


@click.command("eval-lod")
@click.argument("model", default="embedded")
@with_options(_LOD_OPTIONS, _SHARED_OPTIONS, ENGINE_OPTIONS)
def lod_command(model: str, **given: Any) -> None:
    """Accuracy against visual tokens: level of detail beside resizing, random regions and the true region.

    \b
    Examples:
      saccade eval-lod --limit 10 --out docs/quality
      saccade eval-lod --limit 10 --ablate --share 0.25
    """
    engine = engine_config(model, given)
    run_tool("eval-lod", engine, LodEvalOptions(**given))
