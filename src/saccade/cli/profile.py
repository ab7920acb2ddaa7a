"""`saccade profile`"""

from pathlib import Path
from typing import Any

import click

from saccade.cli.options import (
    ENGINE_OPTIONS,
    engine_config,
    option,
    run_tool,
    width_and_height,
    with_options,
)
from saccade.tools.profiler.options import ProfileOptions

_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    option("--batch", type=int, default=8, help="Sequences in a decode step."),
    option("--context", type=int, default=512, help="Tokens of each sequence, and of the prompt."),
    option(
        "--image-size", type=width_and_height, default="1024x1024", metavar="WxH", help="Size of the image."
    ),
    option("--steps", type=int, default=8, help="Decode steps in the trace."),
    option("--repeat", type=int, default=3, help="Timed runs; the median is reported."),
    option("--top", type=int, default=12, help="Kernels shown per section."),
    option("--trace", type=_FILE, help="Write a trace for Perfetto; compressed if the name ends in .gz."),
    option("--json", type=_FILE, help="Write all results as JSON."),
)


@click.command("profile")
@click.argument("model", default="embedded")
@with_options(_OPTIONS, ENGINE_OPTIONS)
def command(model: str, **given: Any) -> None:
    """Measure where the time goes: a new image, a prompt, a decode step, by stage and by kernel.

    Every time is shown next to the least it could be at the device's peak rates.

    \b
    Examples:
      saccade profile
      saccade profile ./my-checkpoint --batch 32 --trace trace.json.gz
    """
    engine = engine_config(model, given)
    run_tool("profile", engine, ProfileOptions(**given))
