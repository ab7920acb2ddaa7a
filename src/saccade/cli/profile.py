"""`saccade profile`"""

from typing import Any

import click

from saccade.cli.options import ENGINE_OPTIONS, config_options, engine_config, run_tool, with_options
from saccade.tools.options import ProfileOptions


@click.command("profile")
@click.argument("model", default="embedded")
@with_options(config_options(ProfileOptions), ENGINE_OPTIONS)
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
