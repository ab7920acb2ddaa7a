"""`saccade plan`"""

import sys
from typing import Any

import click

from saccade.cli.options import config_options, with_options
from saccade.tools.planner.command import PlanOptions, run


@click.command("plan")
@click.argument("model", required=False)
@with_options(config_options(PlanOptions))
def command(model: str | None, **given: Any) -> None:
    """Predict how much traffic a machine serves and how long requests wait, without running the model.

    MODEL is a checkpoint folder, a config.json or `embedded`; else give --layers, --kv-heads, --weight-bytes.

    \b
    Examples:
      saccade plan ./my-checkpoint --traffic text:rate=16,prompt=130,output=64
      saccade plan --layers 80 --kv-heads 8 --weight-bytes 180GB --kv-cache-bytes 50GB --seconds 0
    """
    sys.exit(run(PlanOptions(model=model, **given)))
