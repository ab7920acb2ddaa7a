"""The command line of the planner: `PlanOptions` as options, by their help texts and defaults."""

import sys
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, get_args

import click

from saccade.kv_cache.pool_sizing import KVDtype, VisionScope
from saccade.tools.planner.command import HELP, PlanOptions, run

SIZES = ("weight_bytes", "memory", "kv_cache_bytes", "swap_bytes")
TYPES = {
    "kv_cache_dtype": click.Choice(get_args(KVDtype)),
    "kv_vision_dtype": click.Choice(get_args(KVDtype)),
    "kv_vision_share": click.FLOAT,
    "kv_vision_views": click.Choice(get_args(VisionScope)),
}
Size = Callable[[str], int]  # reads '2GiB'


def plan_command(size: Size) -> click.Command:
    """`saccade plan`; `size` reads sizes as the other commands do."""
    command: Callable[..., None] = _plan
    for field in reversed(fields(PlanOptions)):
        if field.name != "model":
            command = _option(field, size)(command)
    return click.command(name="plan")(click.argument("model", required=False)(command))


def _option(field: Field[Any], size: Size) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A field as an option; those without a default are whole numbers."""
    name = "--" + field.name.replace("_", "-")
    settings: dict[str, Any] = {"default": field.default, "help": HELP[field.name]}
    settings["show_default"] = field.default is not None
    if field.name == "traffic":
        return click.option(name, multiple=True, metavar="KIND", **settings)
    if field.name == "json":
        return click.option(name, is_flag=True, help=HELP[field.name])
    if field.name == "prefix_caching":
        return click.option(f"{name}/--no-prefix-caching", **settings)
    if field.name in SIZES:
        if isinstance(field.default, int):
            settings["default"] = f"{field.default / (1 << 30):g}GiB"
        return click.option(name, type=size, metavar="SIZE", **settings)
    if field.name in TYPES:
        return click.option(name, type=TYPES[field.name], **settings)
    return click.option(name, type=int if field.default is None else type(field.default), **settings)


def _plan(model: str | None, **given: Any) -> None:
    """How much traffic fits on a machine, and the waits to expect, without running the model.

    MODEL is a checkpoint folder, a config.json or `embedded`; else give --layers, --kv-heads, --weight-bytes.

    \b
    Examples:
      saccade plan ./my-checkpoint --traffic text:rate=16,prompt=130,output=64
      saccade plan --layers 80 --kv-heads 8 --weight-bytes 180GB --kv-cache-bytes 50GB --seconds 0
    """
    sys.exit(run(PlanOptions(model=model, **given)))
