"""`saccade serve`"""

import logging
import sys
from typing import Any

import click

from saccade.cli.options import (
    ENGINE_OPTIONS,
    MEDIA_OPTIONS,
    SERVER_OPTIONS,
    engine_config,
    media_limits,
    take_config,
    with_options,
)
from saccade.config import ServeConfig
from saccade.server.launch import run_server


@click.command("serve")
@click.argument("model", default="embedded")
@with_options(SERVER_OPTIONS, ENGINE_OPTIONS, MEDIA_OPTIONS)
def command(model: str, **given: Any) -> None:
    """Serve MODEL over the OpenAI API.

    MODEL is a checkpoint folder, a hub id, or `embedded`, the small model inside the package.

    \b
    Examples:
      saccade serve
      saccade serve Qwen/Qwen3-VL-8B-Instruct --port 8080 --max-model-len 32768
      saccade serve ./my-checkpoint --api-key secret --allowed-media-domains images.example.com
    """
    engine = engine_config(model, given)
    config = take_config(ServeConfig, given, media=media_limits(given))
    logging.basicConfig(
        level=given["log_level"].upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the server logs its own start and stop
    sys.exit(run_server(engine, config))
