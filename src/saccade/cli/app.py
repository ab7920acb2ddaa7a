"""The command line: options become configs, configs become a running thing.

Commands that need torch are named in `_LATE` and imported when they run: `saccade serve` must not load torch
in the front process.
"""

import asyncio
import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from saccade import SamplingParams, __version__
from saccade.async_llm import AsyncEngine
from saccade.cli.chat import converse
from saccade.cli.look import look
from saccade.cli.options import (
    ENGINE_OPTIONS,
    MEDIA_OPTIONS,
    SERVER_OPTIONS,
    engine_config,
    media_limits,
    option,
    size_in_bytes,
    width_and_height,
    with_options,
)
from saccade.cli.plan import plan_command
from saccade.config import ServeConfig
from saccade.errors import SaccadeError
from saccade.lod.types import LodParams
from saccade.server.launch import run_server
from saccade.tools.bench.options import WORKLOADS, BenchOptions
from saccade.tools.evaluation.options import EvalOptions, LodEvalOptions
from saccade.tools.profiler.options import ProfileOptions

_LATE = {
    "bench": "saccade.tools.bench.command",
    "eval": "saccade.tools.evaluation.command",
    "eval-lod": "saccade.tools.evaluation.lod",
    "profile": "saccade.tools.profiler.command",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="saccade")
def app() -> None:
    """Saccade serves vision-language models."""


@app.command()
@click.argument("model", default="embedded")
@with_options(SERVER_OPTIONS)
@with_options(ENGINE_OPTIONS)
@with_options(MEDIA_OPTIONS)
def serve(model: str, **given: Any) -> None:
    """Serve MODEL over the OpenAI API.

    MODEL is a checkpoint folder, a hub id, or `embedded`, the small model inside the package.

    \b
    Examples:
      saccade serve
      saccade serve Qwen/Qwen3-VL-8B-Instruct --port 8080 --max-model-len 32768
      saccade serve ./my-checkpoint --api-key secret --allowed-media-domains images.example.com
    """
    engine = engine_config(model, given)
    media = media_limits(given)
    config = ServeConfig(
        host=given["host"],
        port=given["port"],
        api_keys=given["api_key"],
        served_model_names=given["served_model_name"],
        max_body_bytes=given["max_body_bytes"],
        request_timeout=given["request_timeout"],
        read_timeout=given["read_timeout"],
        shutdown_timeout=given["shutdown_timeout"],
        slow_request_seconds=given["slow_request_seconds"],
        media=media,
    )
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=given["log_level"].upper(), format=form)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it tells at INFO, we tell ourselves
    sys.exit(run_server(engine, config))


@app.command()
@click.argument("pictures", nargs=-1, metavar="[PICTURE]... [QUESTION]")
@option("--model", default="embedded", help="A checkpoint folder, a hub id, or `embedded`.")
@option("--max-tokens", type=int, default=256, help="Longest answer.")
@option("--temperature", type=float, default=0.0, help="0 is greedy.")
@with_options(ENGINE_OPTIONS)
@with_options(MEDIA_OPTIONS)
def chat(pictures: tuple[str, ...], model: str, max_tokens: int, temperature: float, **given: Any) -> None:
    """Ask about pictures in the terminal. Without a QUESTION, a conversation begins.

    Arguments that are files are pictures; the last one that is not is the question.

    \b
    Examples:
      saccade chat receipt.png "What is the total?"
      saccade chat left.jpg right.jpg
    """
    config = engine_config(model, given)
    files, question = _split_question(pictures)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    engine = AsyncEngine(config.model, media=media_limits(given), **config.options())
    asyncio.run(converse(engine, files, question, params))


@app.command("look")
@click.argument("picture", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("question")
@option("--model", default="embedded", help="A checkpoint folder, a hub id, or `embedded`.")
@option("--visual-tokens", type=int, help="Budget of all views together. [default: half of full detail]")
@option("--out", type=click.Path(dir_okay=False, path_type=Path), help="[default: PICTURE.look.png]")
@option("--json/--no-json", "as_json", default=False, help="Print maps and plan as JSON.")
@with_options(ENGINE_OPTIONS)
@with_options(MEDIA_OPTIONS)
def look_command(
    picture: Path,
    question: str,
    model: str,
    visual_tokens: int | None,
    out: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Draw where QUESTION looks in PICTURE, and what would be zoomed.

    \b
    Examples:
      saccade look receipt.png "What is the total?"
      saccade look page.png "When was it signed?" --visual-tokens 256 --json
    """
    config = engine_config(model, given)
    engine = AsyncEngine(config.model, media=media_limits(given), **config.options())
    lod = LodParams(budget=visual_tokens)
    drawn = out or picture.with_name(picture.name + ".look.png")
    asyncio.run(look(engine, picture, question, lod, drawn, as_json=as_json))


_BENCH_OPTIONS = (
    option("--workload", "workloads", multiple=True, metavar="NAME", help="See below; repeat the option."),
    option("--json", metavar="FILE", help="Write every sample there too; - is stdout."),
    option(
        "--peer",
        type=click.Choice(["transformers", "none"]),
        help="Run a peer in the same run and print the ratio. [default: transformers on a CPU]",
    ),
    option("--requests", type=int, help="Of the workloads that ask many at once."),
    option("--input-tokens", type=int, help="Text tokens of a prompt."),
    option("--output-tokens", type=int, help="Length of every answer."),
    option(
        "--image-size",
        type=width_and_height,
        metavar="WxH",
        help="Where the workload's name does not say it.",
    ),
    option("--repeat", type=int, help="Timed runs; the median is reported."),
    option("--warmup", type=int, default=1, help="Runs before those."),
    option("--phase-seconds", type=float, default=20.0, help="Of each phase of mixed_load."),
    option("--text-rate", type=float, default=16.0, help="Text requests per second of mixed_load."),
    option(
        "--image-rate",
        "image_rates",
        type=float,
        multiple=True,
        default=(6.0, 15.0),
        help="Pictures per second of the later phases of mixed_load (repeat the option).",
    ),
    option("--bench-seed", type=int, default=0, help="Of prompts, pictures and arrivals."),
    option("--threads", type=int, help="CPU threads of torch, ours and the peer's."),
    option("--progress/--no-progress", default=True, help="Show a bar on stderr."),
)
_WORKLOAD_LIST = "\n".join(f"  {name:20} {what}" for name, what in WORKLOADS.items())


@app.command(epilog=f"\b\nWorkloads:\n{_WORKLOAD_LIST}")
@click.argument("model", default="embedded")
@with_options(_BENCH_OPTIONS)
@with_options(ENGINE_OPTIONS)
def bench(model: str, **given: Any) -> None:
    """Measure MODEL on this machine, by named workloads.

    \b
    Examples:
      saccade bench
      saccade bench ./my-checkpoint --workload text_bs8 --workload ttft_unique_1024x1024 --json out.json
    """
    engine = engine_config(model, given)
    options = BenchOptions(seed=given.pop("bench_seed"), **given)
    sys.exit(import_module(_LATE["bench"]).run(engine, options))


_PROFILE_OPTIONS = (
    option("--batch", type=int, default=8, help="Sequences that decode together."),
    option("--context", type=int, default=512, help="Tokens of each of them, and of the prompt."),
    option("--image-size", type=width_and_height, default="1024x1024", metavar="WxH", help="Of the picture."),
    option("--steps", type=int, default=8, help="Decode steps in the trace."),
    option("--repeat", type=int, default=3, help="Timed runs; the median is told."),
    option("--top", type=int, default=12, help="Kernels shown of each section."),
    option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Trace for Perfetto; .gz packs."),
    option("--json", type=click.Path(dir_okay=False, path_type=Path), help="Everything, for programs."),
)


@app.command()
@click.argument("model", default="embedded")
@with_options(_PROFILE_OPTIONS)
@with_options(ENGINE_OPTIONS)
def profile(model: str, **given: Any) -> None:
    """Where the time goes: a new picture, a prompt, a decode step, by stage and by kernel.

    Every time stands beside the least it could be at the device's ceilings.

    \b
    Examples:
      saccade profile
      saccade profile ./my-checkpoint --batch 32 --trace trace.json.gz
    """
    engine = engine_config(model, given)
    sys.exit(import_module(_LATE["profile"]).run(engine, ProfileOptions(**given)))


_EVAL_OPTIONS = (
    option("--task", "tasks", multiple=True, metavar="NAME", help="Only this one (repeat the option)."),
    option("--count", type=int, default=200, help="Questions per task of the set."),
    option("--limit", type=int, help="Ask only so many of them, spread evenly. [default: all]"),
    option("--visual-tokens", type=int, help="Shrink every picture to at most so many tokens."),
    option(
        "--curve/--no-curve", default=False, help="Full detail and 64 to 1024 visual tokens: table and plot."
    ),
    option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        help="The curve's folder. [default: docs/quality]",
    ),
    option(
        "--peer",
        type=click.Choice(["transformers"]),
        help="Ask it the same questions too and compare the tokens.",
    ),
    option("--json", metavar="FILE", help="Write every question's outcome there; - is stdout."),
    option("--batch", type=int, default=32, help="Questions in the engine at once."),
    option("--max-tokens", type=int, default=64, help="Longest answer."),
    option("--instruction", help="A line after every question, for models that like to talk."),
    option("--workers", type=int, help="Processes that draw pictures. [default: half the cores]"),
    option("--progress/--no-progress", default=True, help="Show a bar on stderr."),
)


@app.command("eval")
@click.argument("model", default="embedded")
@with_options(_EVAL_OPTIONS)
@with_options(ENGINE_OPTIONS)
def evaluate(model: str, **given: Any) -> None:
    """Accuracy of MODEL, task by task, on the fixed set of drawn pictures.

    \b
    Examples:
      saccade eval --limit 20
      saccade eval --task needle --task small_print --visual-tokens 256 --json out.json
      saccade eval --curve --limit 20
    """
    engine = engine_config(model, given)
    sys.exit(import_module(_LATE["eval"]).run(engine, EvalOptions(**given)))


_EVAL_LOD_OPTIONS = (
    option("--task", "tasks", multiple=True, metavar="NAME", help="Only this one (repeat the option)."),
    option("--count", type=int, default=200, help="Questions per task of the set."),
    option("--limit", type=int, help="Ask only so many of them, spread evenly. [default: all]"),
    option(
        "--share",
        "shares",
        type=float,
        multiple=True,
        default=(0.125, 0.25, 0.5),
        help="A budget, as a share of full detail's tokens (repeat the option).",
    ),
    option("--ablate/--no-ablate", default=False, help="The whole without each of its stages instead."),
    option("--scenes", type=int, metavar="SEED", help="Fresh scenes instead of the fixed set, for tuning."),
    option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        help="Write a page, a plot and every answer into this folder.",
    ),
    option("--json", metavar="FILE", help="Write every answer there; - is stdout."),
    option("--batch", type=int, default=8, help="Examples at once; each is asked in every way."),
    option("--max-tokens", type=int, default=64, help="Longest answer."),
    option("--workers", type=int, help="Processes that draw pictures. [default: half the cores]"),
    option("--progress/--no-progress", default=True, help="Show a bar on stderr."),
)


@app.command("eval-lod")
@click.argument("model", default="embedded")
@with_options(_EVAL_LOD_OPTIONS)
@with_options(ENGINE_OPTIONS)
def evaluate_lod(model: str, **given: Any) -> None:
    """Accuracy against visual tokens: level of detail beside resizing, random regions and the true one.

    \b
    Examples:
      saccade eval-lod --limit 10 --out docs/quality
      saccade eval-lod --limit 10 --ablate --share 0.25
    """
    engine = engine_config(model, given)
    sys.exit(import_module(_LATE["eval-lod"]).run(engine, LodEvalOptions(**given)))


app.add_command(plan_command(size_in_bytes))


_PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def _split_question(arguments: tuple[str, ...]) -> tuple[list[Path], str | None]:
    question = None
    if arguments and not Path(arguments[-1]).is_file():
        *rest, question = arguments
        arguments = tuple(rest)
    if question is not None and not arguments and Path(question).suffix.lower() in _PICTURE_SUFFIXES:
        raise click.UsageError(f"there is no file {question!r}")
    missing = [name for name in arguments if not Path(name).is_file()]
    if missing:
        raise click.UsageError(f"there is no file {missing[0]!r}; put the question last, in quotes")
    return [Path(name) for name in arguments], question


def main() -> None:
    try:
        app()
    except SaccadeError as error:
        click.secho(f"saccade: {error.message}", fg="red", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
