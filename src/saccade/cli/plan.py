"""`saccade plan`: the fields of `PlanOptions` as options, with their defaults and help texts."""

import sys
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, get_args

import click

from saccade.cli.options import option, size_in_bytes
from saccade.kv_cache.pool_sizing import KVDtype, VisionScope
from saccade.tools.planner.command import PlanOptions, run

SIZES = ("weight_bytes", "memory", "kv_cache_bytes", "swap_bytes")
TYPES = {
    "kv_cache_dtype": click.Choice(get_args(KVDtype)),
    "kv_vision_dtype": click.Choice(get_args(KVDtype)),
    "kv_vision_share": click.FLOAT,
    "kv_vision_views": click.Choice(get_args(VisionScope)),
}


def _option(field: Field[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A field as an option; fields without a default are integers."""
    name = "--" + field.name.replace("_", "-")
    settings: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
    if field.name == "traffic":
        return option(name, multiple=True, metavar="KIND", **settings)
    if field.name == "json":
        return click.option(name, is_flag=True, help=field.metadata["help"])
    if field.name == "prefix_caching":
        return option(f"{name}/--no-prefix-caching", **settings)
    if field.name in SIZES:
        if isinstance(field.default, int):
            settings["default"] = f"{field.default / (1 << 30):g}GiB"
        return option(name, type=size_in_bytes, metavar="SIZE", **settings)
    if field.name in TYPES:
        return option(name, type=TYPES[field.name], **settings)
    return option(name, type=int if field.default is None else type(field.default), **settings)


def _with_fields(function: Callable[..., Any]) -> Callable[..., Any]:
    for field in reversed(fields(PlanOptions)):
        if field.name != "model":
            function = _option(field)(function)
    return function


@click.command("plan")
@click.argument("model", required=False)
@_with_fields
def command(model: str | None, **given: Any) -> None:
    """Predict how much traffic a machine serves and how long requests wait, without running the model.

    MODEL is a checkpoint folder, a config.json or `embedded`; else give --layers, --kv-heads, --weight-bytes.

    \b
    Examples:
      saccade plan ./my-checkpoint --traffic text:rate=16,prompt=130,output=64
      saccade plan --layers 80 --kv-heads 8 --weight-bytes 180GB --kv-cache-bytes 50GB --seconds 0
    """
    sys.exit(run(PlanOptions(model=model, **given)))
