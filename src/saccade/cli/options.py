"""Options of the command line, as tables: every command that starts an engine takes the same ones.

takes   what a person typed
gives   `EngineConfig`, `MediaLimits`, and values parsed from their written form
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from saccade.config import EngineConfig, MediaLimits, VisionCache, parse_size
from saccade.errors import ConfigError

Command = Callable[..., Any]


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
    """The text in the file that is named."""
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value!r} cannot be read as text: {error}") from None


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


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    return click.option(*names, show_default=settings.get("default") is not None, **settings)


ENGINE_OPTIONS = (
    option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to compute."),
    option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        help="Of weights and KV cache. auto: the checkpoint's on a GPU, float32 on a CPU.",
    ),
    option(
        "--load-format",
        type=click.Choice(["auto", "dummy"]),
        default="auto",
        help="dummy: random weights of the right shapes, for measuring speed without a checkpoint's weights.",
    ),
    option(
        "--max-model-len", type=int, help="Longest prompt + answer in tokens. [default: the checkpoint's]"
    ),
    option("--max-num-seqs", type=int, default=256, help="Most sequences computed together."),
    option(
        "--max-num-batched-tokens",
        type=int,
        help="Most tokens in one step. [default: 8192 on a GPU, 2048 on a CPU]",
    ),
    option("--max-queue", type=int, default=4096, help="Most requests waiting; further ones are refused."),
    option(
        "--max-queue-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        default="8GiB",
        help="Most pixels of requests not answered yet; further ones are refused.",
    ),
    option("--block-size", type=int, default=16, help="Tokens per KV block."),
    option("--num-blocks", type=int, help="KV blocks. [default: from the memory there is]"),
    option(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="Share of the GPU's memory for weights, KV cache and features.",
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
        help="Of K and V. fp8 and int8 take half the memory of 16 bits and change answers a little; auto: as "
        "--dtype.",
    ),
    option(
        "--kv-vision-dtype",
        type=click.Choice(["auto", "fp8", "int8"]),
        default="auto",
        help="The same for the KV blocks of pictures alone, which get a pool of their own.",
    ),
    option(
        "--kv-vision-share",
        type=float,
        metavar="SHARE",
        help="Of the KV cache: a pool for the blocks of pictures, which text never takes, nor they its. "
        "[default: no such pool; 0.5 where another option asks for one]",
    ),
    option(
        "--kv-vision-views",
        type=click.Choice(["all", "global"]),
        help="Pictures whose blocks go to that pool: all whole ones, or only those seen at less than full "
        "detail. [default: all]",
    ),
    option(
        "--vision-cache",
        type=vision_cache,
        metavar="TIERS",
        callback=lambda context, parameter, value: value or VisionCache(),
        help="Image features kept for reuse: gpu=8GiB,host=32GiB,disk=100GiB,dir=PATH,ttl=SECONDS, any of "
        "them; a size of 0 is off. On a CPU, gpu is its memory. [default: gpu=2GiB; CPU gpu=256MiB]",
    ),
    option(
        "--prefix-caching/--no-prefix-caching", default=True, help="Reuse the KV of equal prompt beginnings."
    ),
    option(
        "--pin-prefix",
        type=text_of_file,
        multiple=True,
        metavar="FILE",
        help="A text file with a system prompt: the KV of conversations that begin with it is never given "
        "up, for any tenant. Repeat the option for several.",
    ),
    option(
        "--pinned-prefix-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        default="256MiB",
        help="Most KV that pinned system prompts may take of each tenant's.",
    ),
    option(
        "--swap-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="Host memory for the KV of requests that had to give way; 0: they compute again. "
        "[default: 4GiB on a GPU, 0 on a CPU]",
    ),
    option(
        "--overlap/--no-overlap", default=None, help="Plan the next step while one runs. [default: on a GPU]"
    ),
    option(
        "--itl-target",
        type=float,
        metavar="MS",
        help="Milliseconds between two tokens of an answer that others' prompts and pictures may lead to, "
        "three times as many while prompts have to wait; 0: any. [default: 11 on a GPU, any on a CPU]",
    ),
    option(
        "--kernels",
        type=click.Choice(["auto", "torch", "triton"]),
        default="auto",
        help="auto: Triton kernels where they were measured faster, else torch.",
    ),
    option(
        "--graphs",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="Captured decode steps and short prompts. auto: on a GPU whose attention is Triton's.",
    ),
    option(
        "--early-launch",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="A kernel starts while the one before it ends. auto: with graphs on a Hopper GPU or newer.",
    ),
    option(
        "--deterministic/--no-deterministic",
        default=False,
        help="A request's tokens do not depend on its neighbours; slower.",
    ),
    option("--seed", type=int, default=0, help="Root of the seeds of requests that name none."),
    option(
        "--step-log",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write a line of JSON for every step: what it did, what it was expected to take and took.",
    ),
)

MEDIA_OPTIONS = (
    option(
        "--limit-mm-per-prompt",
        type=counts,
        metavar="COUNTS",
        help="For example image=16,video=4, which is the default.",
    ),
    option("--max-image-pixels", type=int, default=64_000_000, help="Larger pictures are refused undecoded."),
    option(
        "--allowed-media-domains",
        multiple=True,
        metavar="HOST",
        help="Fetch pictures only from these hosts (repeat the option). [default: any public host]",
    ),
    option(
        "--allowed-local-media-path",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Allow file: URLs below this folder. [default: none]",
    ),
    option("--media-fetch-timeout", type=float, default=10.0, help="Seconds for one remote picture."),
)

SERVER_OPTIONS = (
    option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all."),
    option("--port", type=int, default=8000, help="0 picks a free one."),
    option("--api-key", multiple=True, metavar="KEY", help="Require one of these keys (repeat the option)."),
    option("--served-model-name", multiple=True, metavar="NAME", help="Names clients may use for the model."),
    option(
        "--max-body-bytes", type=size_in_bytes, metavar="SIZE", default="64MiB", help="Largest request body."
    ),
    option("--request-timeout", type=float, default=600.0, help="Seconds from a request to its last token."),
    option("--read-timeout", type=float, default=60.0, help="Seconds a request may take to arrive."),
    option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="What the server writes to stderr.",
    ),
    option(
        "--slow-request-seconds",
        type=float,
        default=30.0,
        help="Log where the time went of requests that take longer; 0: of none.",
    ),
    option(
        "--shutdown-timeout", type=float, default=30.0, help="Seconds running requests get after SIGTERM."
    ),
)


def with_options(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
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
