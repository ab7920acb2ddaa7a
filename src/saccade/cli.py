"""The command line: options become configs, configs become a running thing.

Options are tables, so that every command that starts an engine takes the same ones. Commands that need torch
are named in `_LATE` and imported when they run: `saccade serve` must not load torch in the front process.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from saccade import SamplingParams, __version__
from saccade.api.server import run_server
from saccade.async_engine import AsyncEngine
from saccade.bench.options import WORKLOADS, BenchOptions
from saccade.chat import converse
from saccade.config import EngineConfig, MediaLimits, ServeConfig
from saccade.errors import SaccadeError
from saccade.evaluate.options import EvalOptions

_LATE = {"bench": "saccade.bench.command", "eval": "saccade.evaluate.command"}

Command = Callable[..., Any]


_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def size_in_bytes(value: str) -> int:
    """'2GiB', '512MiB' or a plain number of bytes."""
    text = value.strip().lower()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        return int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value!r} is not a size; write for example 2GiB or 512MiB") from None


def counts(value: str) -> dict[str, int]:
    """'image=4,video=1'."""
    found: dict[str, int] = {}
    for part in value.split(","):
        kind, _, number = (piece.strip() for piece in part.partition("="))
        if kind not in ("image", "video") or not number.isdecimal():
            raise click.BadParameter(f"{part!r} is not a limit; write for example image=4,video=1")
        found[kind] = int(number)
    return found


def width_and_height(value: str) -> tuple[int, int]:
    """'1024x768'."""
    width, _, height = value.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise click.BadParameter(f"{value!r} is not a size; write for example 1024x768")
    return int(width), int(height)


def _option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    return click.option(*names, show_default=settings.get("default") is not None, **settings)


_ENGINE_OPTIONS = (
    _option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to compute."),
    _option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        help="Of weights and KV cache. auto: the checkpoint's on a GPU, float32 on a CPU.",
    ),
    _option(
        "--load-format",
        type=click.Choice(["auto", "dummy"]),
        default="auto",
        help="dummy: random weights of the right shapes, for measuring speed without a checkpoint's weights.",
    ),
    _option(
        "--max-model-len", type=int, help="Longest prompt + answer in tokens. [default: the checkpoint's]"
    ),
    _option("--max-num-seqs", type=int, default=256, help="Most sequences computed together."),
    _option(
        "--max-num-batched-tokens",
        type=int,
        help="Most tokens in one step. [default: 8192 on a GPU, 1024 on a CPU]",
    ),
    _option("--max-queue", type=int, default=4096, help="Most requests waiting; further ones are refused."),
    _option("--block-size", type=int, default=16, help="Tokens per KV block."),
    _option("--num-blocks", type=int, help="KV blocks. [default: from the memory there is]"),
    _option(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="Share of the GPU's memory for weights, KV cache and features.",
    ),
    _option(
        "--kv-cache-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="Size of the KV cache. [default: what is left; 1GiB on a CPU]",
    ),
    _option(
        "--vision-cache-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="Image features kept for reuse. [default: 2GiB; CPU 256MiB]",
    ),
    _option(
        "--prefix-caching/--no-prefix-caching", default=True, help="Reuse the KV of equal prompt beginnings."
    ),
    _option(
        "--overlap/--no-overlap", default=None, help="Plan the next step while one runs. [default: on a GPU]"
    ),
    _option("--seed", type=int, default=0, help="Root of the seeds of requests that name none."),
)

_MEDIA_OPTIONS = (
    _option(
        "--limit-mm-per-prompt",
        type=counts,
        metavar="COUNTS",
        help="For example image=16,video=4, which is the default.",
    ),
    _option(
        "--max-image-pixels", type=int, default=64_000_000, help="Larger pictures are refused undecoded."
    ),
    _option(
        "--allowed-media-domains",
        multiple=True,
        metavar="HOST",
        help="Fetch pictures only from these hosts (repeat the option). [default: any public host]",
    ),
    _option(
        "--allowed-local-media-path",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Allow file: URLs below this folder. [default: none]",
    ),
    _option("--media-fetch-timeout", type=float, default=10.0, help="Seconds for one remote picture."),
)

_SERVER_OPTIONS = (
    _option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all."),
    _option("--port", type=int, default=8000, help="0 picks a free one."),
    _option("--api-key", multiple=True, metavar="KEY", help="Require one of these keys (repeat the option)."),
    _option(
        "--served-model-name", multiple=True, metavar="NAME", help="Names clients may use for the model."
    ),
    _option(
        "--max-body-bytes", type=size_in_bytes, metavar="SIZE", default="64MiB", help="Largest request body."
    ),
    _option("--request-timeout", type=float, default=600.0, help="Seconds from a request to its last token."),
    _option("--read-timeout", type=float, default=60.0, help="Seconds a request may take to arrive."),
    _option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="What the server writes to stderr.",
    ),
    _option(
        "--shutdown-timeout", type=float, default=30.0, help="Seconds running requests get after SIGTERM."
    ),
)


def _with(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def engine_config(model: str, given: dict[str, Any]) -> EngineConfig:
    """Takes the engine's options out of `given`."""
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    return EngineConfig(model=model, **{name: given.pop(name) for name in names})


def media_limits(given: dict[str, Any]) -> MediaLimits:
    most = given.pop("limit_mm_per_prompt") or {}
    return MediaLimits(
        images_per_prompt=most.get("image", MediaLimits.images_per_prompt),
        videos_per_prompt=most.get("video", MediaLimits.videos_per_prompt),
        max_pixels=given.pop("max_image_pixels"),
        allowed_domains=given.pop("allowed_media_domains") or None,
        allowed_local_path=given.pop("allowed_local_media_path"),
        fetch_timeout=given.pop("media_fetch_timeout"),
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="saccade")
def app() -> None:
    """Saccade serves vision-language models."""


@app.command()
@click.argument("model", default="embedded")
@_with(_SERVER_OPTIONS)
@_with(_ENGINE_OPTIONS)
@_with(_MEDIA_OPTIONS)
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
        media=media,
    )
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=given["log_level"].upper(), format=form)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it tells at INFO, we tell ourselves
    sys.exit(run_server(engine, config))


@app.command()
@click.argument("pictures", nargs=-1, metavar="[PICTURE]... [QUESTION]")
@_option("--model", default="embedded", help="A checkpoint folder, a hub id, or `embedded`.")
@_option("--max-tokens", type=int, default=256, help="Longest answer.")
@_option("--temperature", type=float, default=0.0, help="0 is greedy.")
@_with(_ENGINE_OPTIONS)
@_with(_MEDIA_OPTIONS)
def chat(pictures: tuple[str, ...], model: str, max_tokens: int, temperature: float, **given: Any) -> None:
    """Ask about pictures in the terminal. Without a QUESTION, a conversation begins.

    Arguments that are files are pictures; the last one that is not is the question.

    \b
    Examples:
      saccade chat receipt.png "What is the total?"
      saccade chat left.jpg right.jpg
    """
    config = asdict(engine_config(model, given))
    files, question = _split_question(pictures)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    engine = AsyncEngine(config.pop("model"), media=media_limits(given), **config)
    asyncio.run(converse(engine, files, question, params))


_BENCH_OPTIONS = (
    _option("--workload", "workloads", multiple=True, metavar="NAME", help="See below; repeat the option."),
    _option("--json", metavar="FILE", help="Write every sample there too; - is stdout."),
    _option(
        "--peer",
        type=click.Choice(["transformers", "none"]),
        help="Run a peer in the same run and print the ratio. [default: transformers on a CPU]",
    ),
    _option("--requests", type=int, help="Of the workloads that ask many at once."),
    _option("--input-tokens", type=int, help="Text tokens of a prompt."),
    _option("--output-tokens", type=int, help="Length of every answer."),
    _option(
        "--image-size",
        type=width_and_height,
        metavar="WxH",
        help="Where the workload's name does not say it.",
    ),
    _option("--repeat", type=int, help="Timed runs; the median is reported."),
    _option("--warmup", type=int, default=1, help="Runs before those."),
    _option("--phase-seconds", type=float, default=20.0, help="Of each phase of mixed_load."),
    _option("--text-rate", type=float, default=16.0, help="Text requests per second of mixed_load."),
    _option(
        "--image-rate",
        "image_rates",
        type=float,
        multiple=True,
        default=(6.0, 15.0),
        help="Pictures per second of the later phases of mixed_load (repeat the option).",
    ),
    _option("--bench-seed", type=int, default=0, help="Of prompts, pictures and arrivals."),
    _option("--threads", type=int, help="CPU threads of torch, ours and the peer's."),
    _option("--progress/--no-progress", default=True, help="Show a bar on stderr."),
)
_WORKLOAD_LIST = "\n".join(f"  {name:20} {what}" for name, what in WORKLOADS.items())


@app.command(epilog=f"\b\nWorkloads:\n{_WORKLOAD_LIST}")
@click.argument("model", default="embedded")
@_with(_BENCH_OPTIONS)
@_with(_ENGINE_OPTIONS)
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


_EVAL_OPTIONS = (
    _option("--task", "tasks", multiple=True, metavar="NAME", help="Only this one (repeat the option)."),
    _option("--count", type=int, default=200, help="Questions per task of the set."),
    _option("--limit", type=int, help="Ask only so many of them, spread evenly. [default: all]"),
    _option("--visual-tokens", type=int, help="Shrink every picture to at most so many tokens."),
    _option(
        "--curve/--no-curve", default=False, help="Full detail and 64 to 1024 visual tokens: table and plot."
    ),
    _option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        help="The curve's folder. [default: docs/quality]",
    ),
    _option(
        "--peer",
        type=click.Choice(["transformers"]),
        help="Ask it the same questions too and compare the tokens.",
    ),
    _option("--json", metavar="FILE", help="Write every question's outcome there; - is stdout."),
    _option("--batch", type=int, default=32, help="Questions in the engine at once."),
    _option("--max-tokens", type=int, default=64, help="Longest answer."),
    _option("--instruction", help="A line after every question, for models that like to talk."),
    _option("--workers", type=int, help="Processes that draw pictures. [default: half the cores]"),
    _option("--progress/--no-progress", default=True, help="Show a bar on stderr."),
)


@app.command("eval")
@click.argument("model", default="embedded")
@_with(_EVAL_OPTIONS)
@_with(_ENGINE_OPTIONS)
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


def _split_question(arguments: tuple[str, ...]) -> tuple[list[Path], str | None]:
    question = None
    if arguments and not Path(arguments[-1]).is_file():
        *rest, question = arguments
        arguments = tuple(rest)
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
