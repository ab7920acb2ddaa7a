"""Option tables that commands share, their parsers, and the configs made of them."""

import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from saccade.config import EngineConfig, MediaLimits, VisionCache, parse_size
from saccade.errors import ConfigError

CommandFunction = Callable[..., Any]
Decorator = Callable[[CommandFunction], CommandFunction]

# Tools that load torch: imported when they run, so that help texts appear without it.
TOOLS = {
    "bench": "saccade.tools.bench.command",
    "eval": "saccade.tools.evaluation.command",
    "eval-lod": "saccade.tools.evaluation.lod",
    "profile": "saccade.tools.profiler.command",
}


def run_tool(name: str, engine: EngineConfig, options: object) -> NoReturn:
    sys.exit(import_module(TOOLS[name]).run(engine, options))


def size_in_bytes(value: str) -> int:
    """'2GiB', '512MiB' or a plain number of bytes."""
    try:
        return parse_size(value)
    except ConfigError as error:
        raise click.BadParameter(error.message) from None


def vision_cache(value: str) -> VisionCache:
    """'gpu=8GiB,host=32GiB'."""
    try:
        return VisionCache.parse(value)
    except ConfigError as error:
        raise click.BadParameter(error.message) from None


def text_of_file(value: str) -> str:
    """The text of the file `value`."""
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value!r} cannot be read as text: {error}") from None


def media_counts(value: str) -> dict[str, int]:
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


def option(*names: str, **settings: Any) -> Decorator:
    return click.option(*names, show_default=settings.get("default") is not None, **settings)


MODEL_OPTION = option("--model", default="embedded", help="A checkpoint folder, a hub id, or `embedded`.")
PROGRESS_OPTION = option("--progress/--no-progress", default=True, help="Show a progress bar on stderr.")


ENGINE_OPTIONS = (
    option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Device."),
    option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        help="Type of weights and KV cache. auto: the checkpoint's on a GPU, float32 on a CPU.",
    ),
    option(
        "--load-format",
        type=click.Choice(["auto", "dummy"]),
        default="auto",
        help="dummy: random weights of the model's shapes, to measure speed without its weights.",
    ),
    option(
        "--max-model-len",
        type=int,
        help="Context length, prompt and answer. [default: the checkpoint's]",
    ),
    option("--max-num-seqs", type=int, default=256, help="Most sequences in one step."),
    option(
        "--max-num-batched-tokens",
        type=int,
        help="Most tokens in one step. [default: 8192 on a GPU, 2048 on a CPU]",
    ),
    option("--max-queue", type=int, default=4096, help="Most waiting requests; further ones are refused."),
    option(
        "--max-queue-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        default="8GiB",
        help="Most bytes of pixels of unfinished requests; further ones are refused.",
    ),
    option("--block-size", type=int, default=16, help="Tokens per KV block."),
    option("--num-blocks", type=int, help="KV blocks. [default: from the available memory]"),
    option(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="Share of the GPU's memory for weights, KV cache and encoder cache.",
    ),
    option(
        "--kv-cache-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="Size of the KV cache. [default: what is left; 1GiB on a CPU]",
    ),
    option(
        "--kv-cache-dtype",
        type=click.Choice(["auto", "fp8", "int8"]),
        default="auto",
        help="Type of the KV cache. fp8 and int8 take half the memory and change answers slightly. "
        "auto: as --dtype.",
    ),
    option(
        "--kv-vision-dtype",
        type=click.Choice(["auto", "fp8", "int8"]),
        default="auto",
        help="The same for the KV blocks of images only, which get their own pool.",
    ),
    option(
        "--kv-vision-share",
        type=float,
        metavar="SHARE",
        help="Share of the KV cache for a separate pool of image blocks. [default: no separate pool; 0.5 if "
        "another --kv-vision option asks for one]",
    ),
    option(
        "--kv-vision-views",
        type=click.Choice(["all", "global"]),
        help="Images whose blocks go to that pool: all, or only those below full detail. [default: all]",
    ),
    option(
        "--vision-cache",
        type=vision_cache,
        metavar="TIERS",
        callback=lambda context, parameter, value: value or VisionCache(),
        help="Encoder cache sizes: any of gpu=8GiB,host=32GiB,disk=100GiB,dir=PATH,ttl=SECONDS; a size of 0 "
        "is off. On a CPU, gpu means its memory. [default: gpu=2GiB; gpu=256MiB on a CPU]",
    ),
    option(
        "--prefix-caching/--no-prefix-caching", default=True, help="Reuse the KV cache of equal prefixes."
    ),
    option(
        "--pin-prefix",
        type=text_of_file,
        multiple=True,
        metavar="FILE",
        help="A text file with a system prompt whose KV blocks are never evicted, for any tenant (repeat the "
        "option).",
    ),
    option(
        "--pinned-prefix-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        default="256MiB",
        help="Most KV cache that pinned system prompts may take per tenant.",
    ),
    option(
        "--swap-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="Host memory for the KV blocks of preempted sequences; 0: they are recomputed. "
        "[default: 4GiB on a GPU, 0 on a CPU]",
    ),
    option(
        "--overlap/--no-overlap",
        default=None,
        help="Plan the next step while one runs. [default: on a GPU]",
    ),
    option(
        "--itl-target",
        type=float,
        metavar="MS",
        help="Inter-token latency target: prefill and encoding of other requests are sliced so that a step "
        "keeps it; three times as long while prompts wait; 0: no target. [default: 11 on a GPU, 0 on a CPU]",
    ),
    option(
        "--kernels",
        type=click.Choice(["auto", "torch", "triton"]),
        default="auto",
        help="auto: Triton kernels where they measured faster, else torch.",
    ),
    option(
        "--graphs",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="CUDA graphs for decode steps and short prompts. auto: on a GPU with Triton attention.",
    ),
    option(
        "--early-launch",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="Programmatic dependent launch of kernels. auto: with CUDA graphs on a Hopper GPU or newer.",
    ),
    option(
        "--deterministic/--no-deterministic",
        default=False,
        help="Make a request's tokens independent of the batch; slower.",
    ),
    option("--seed", type=int, default=0, help="Base seed for requests that set none."),
    option(
        "--step-log",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write a line of JSON per step: its contents, its predicted and its measured time.",
    ),
)

MEDIA_OPTIONS = (
    option(
        "--limit-mm-per-prompt",
        type=media_counts,
        metavar="COUNTS",
        help="Most media per prompt. [default: image=16,video=4]",
    ),
    option("--max-image-pixels", type=int, default=64_000_000, help="Larger images are refused undecoded."),
    option(
        "--allowed-media-domains",
        multiple=True,
        metavar="HOST",
        help="Fetch images only from these hosts (repeat the option). [default: any public host]",
    ),
    option(
        "--allowed-local-media-path",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Allow file: URLs below this folder. [default: none]",
    ),
    option("--media-fetch-timeout", type=float, default=10.0, help="Seconds to fetch one remote image."),
)

SERVER_OPTIONS = (
    option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all interfaces."),
    option("--port", type=int, default=8000, help="Port to listen on; 0 picks a free one."),
    option("--api-key", multiple=True, metavar="KEY", help="Require one of these keys (repeat the option)."),
    option("--served-model-name", multiple=True, metavar="NAME", help="Names clients may use for the model."),
    option(
        "--max-body-bytes", type=size_in_bytes, metavar="SIZE", default="64MiB", help="Largest request body."
    ),
    option(
        "--request-timeout",
        type=float,
        default=600.0,
        help="Seconds from arrival to the last token.",
    ),
    option("--read-timeout", type=float, default=60.0, help="Seconds for a request to arrive."),
    option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Log level on stderr.",
    ),
    option(
        "--slow-request-seconds",
        type=float,
        default=30.0,
        help="Log the time per stage of requests that take longer; 0: never.",
    ),
    option(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="Seconds to finish running requests after SIGTERM.",
    ),
)


def with_options(*tables: tuple[Decorator, ...]) -> Decorator:
    """Add the options of `tables`, in their order."""

    def add(function: CommandFunction) -> CommandFunction:
        for table in reversed(tables):
            for decorate in reversed(table):
                function = decorate(function)
        return function

    return add


def engine_config(model: str, given: dict[str, Any]) -> EngineConfig:
    """The engine's config; removes its options from `given`."""
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    return EngineConfig(model=model, **{name: given.pop(name) for name in names})


def media_limits(given: dict[str, Any]) -> MediaLimits:
    """The media limits; removes their options from `given`."""
    counts = given.pop("limit_mm_per_prompt") or {}
    return MediaLimits(
        images_per_prompt=counts.get("image", MediaLimits.images_per_prompt),
        videos_per_prompt=counts.get("video", MediaLimits.videos_per_prompt),
        max_pixels=given.pop("max_image_pixels"),
        allowed_domains=given.pop("allowed_media_domains") or None,
        allowed_local_path=given.pop("allowed_local_media_path"),
        fetch_timeout=given.pop("media_fetch_timeout"),
    )
