"""`saccade tune`"""

from typing import Any

import click

from saccade.cli.options import ENGINE_OPTIONS, config_options, engine_config, run_tool, with_options
from saccade.tools.options import TuneOptions


@click.command("tune")
@click.argument("model", default="embedded")
@with_options(config_options(TuneOptions), ENGINE_OPTIONS)
def command(model: str, **given: Any) -> None:
    """Search kernel launch parameters for the products of MODEL on this GPU.

    Results are kept in the user's cache folder, where every later start finds them. Only shapes count:
    --load-format dummy needs no weights.

    \b
    Examples:
      saccade tune ./my-checkpoint
      saccade tune ./my-checkpoint --quantization fp8 --load-format dummy --budget 60
    """
    engine = engine_config(model, given)
    run_tool("tune", engine, TuneOptions(**given))
