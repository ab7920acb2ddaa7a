"""`saccade quantize`"""

import sys
from importlib import import_module
from typing import Any

import click

from saccade.cli.options import TOOLS, config_options, with_options
from saccade.tools.quantize.options import QuantizeOptions


@click.command("quantize")
@click.argument("model")
@click.argument("out")
@with_options(config_options(QuantizeOptions))
def command(model: str, out: str, **given: Any) -> None:
    """Write MODEL, a 16-bit checkpoint, to the new folder OUT in the compressed-tensors format.

    \b
    Examples:
      saccade quantize ./my-checkpoint ./my-checkpoint-fp8
      saccade quantize embedded ./small --scheme int4 --method gptq
      saccade quantize ./my-checkpoint ./out --scheme decoder=int4,vision=fp8 --method awq
      saccade quantize ./my-checkpoint ./out --scheme int8 --method smoothquant --calibration ./images
    """
    sys.exit(import_module(TOOLS["quantize"]).run(model, out, QuantizeOptions(**given)))
