"""Option tables that commands share, their parsers, and the configs made of them."""

import sys
from collections.abc import Callable
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import click

from saccade.config import (
    EngineConfig,
    MediaLimits,
    ServeConfig,
    VisionCache,
    field_type,
    parse_size,
    size_text,
)
from saccade.errors import ConfigError

CommandFunction = Callable[..., Any]
Config = TypeVar("Config", EngineConfig, MediaLimits, ServeConfig)
Decorator = Callable[[CommandFunction], CommandFunction]

# Tools that load torch: imported when they run, so that help texts appear without it.
TOOLS = {
    "bench": "saccade.tools.bench.command",
    "eval": "saccade.tools.evaluation.command",
    "eval-lod": "saccade.tools.evaluation.lod",
    "eval-quant": "saccade.tools.evaluation.quantization",
    "profile": "saccade.tools.profiler.command",
    "tune": "saccade.tools.tune",
    "quantize": "saccade.tools.quantize.command",
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


# Fields of the configs whose type says too little for the command line.
_SETTINGS: dict[str, dict[str, Any]] = {
    "pin_prefix": {"type": text_of_file},
    "step_log": {"type": click.Path(dir_okay=False)},
    "allowed_local_path": {"type": click.Path(exists=True, file_okay=False, path_type=Path)},
    "allowed_domains": {"callback": lambda *given: given[2] or None},
}


def config_options(config: type[Any]) -> tuple[Decorator, ...]:
    """An option for every field of the config that has a help text; the model is an argument."""
    described = [one for one in fields(config) if one.metadata.get("help") and one.name != "model"]
    return tuple(_field_option(one) for one in described)


def _field_option(one: Field[Any]) -> Decorator:
    details, (kind, _) = one.metadata, field_type(one)
    default: Any = one.default
    flag = details.get("flag", f"--{one.name.replace('_', '-')}")
    settings = {"help": details["help"], "metavar": details.get("metavar"), "default": default}
    if kind is bool:
        flag += f"/--no-{flag.removeprefix('--')}"
    elif kind == tuple[int, int]:
        text = default and "{}x{}".format(*default)
        settings |= {"type": width_and_height, "metavar": "WxH", "default": text}
    elif get_origin(kind) is tuple:
        settings |= {"multiple": True, "type": get_args(kind)[0], "default": default or None}
    elif kind is VisionCache:
        settings |= {"type": vision_cache, "default": None}
        settings["callback"] = lambda *given: given[2] or VisionCache()
    elif kind is Path:
        settings["type"] = click.Path(dir_okay=False, path_type=Path)
    elif get_origin(kind) is Literal:
        settings["type"] = click.Choice(get_args(kind))
    elif details.get("size"):
        text = None if default is None else size_text(default)
        settings |= {"type": size_in_bytes, "metavar": "SIZE", "default": text}
    else:
        settings["type"] = kind
    return option(flag, one.name, **settings | _SETTINGS.get(one.name, {}))


ENGINE_OPTIONS = config_options(EngineConfig)
MEDIA_OPTIONS = (
    option(
        "--limit-mm-per-prompt",
        type=media_counts,
        metavar="COUNTS",
        help="Most media per prompt. [default: image=16,video=4]",
    ),
    *config_options(MediaLimits),
)
SERVER_OPTIONS = (
    *config_options(ServeConfig),
    option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Log level on stderr.",
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


def take_config(config: type[Config], given: dict[str, Any], **more: Any) -> Config:
    """The config of its options, which are removed from `given`, and of `more`."""
    names = [one.name for one in fields(config) if one.metadata.get("help")]
    return config(**{name: given.pop(name) for name in names}, **more)


def engine_config(model: str, given: dict[str, Any]) -> EngineConfig:
    """The engine's config; removes its options from `given`."""
    return take_config(EngineConfig, given, model=model)


def media_limits(given: dict[str, Any]) -> MediaLimits:
    """The media limits; removes their options from `given`."""
    counts = given.pop("limit_mm_per_prompt") or {}
    return take_config(MediaLimits, given, **{f"{kind}s_per_prompt": count for kind, count in counts.items()})
