"""`saccade eval`, `saccade eval-lod` and `saccade eval-quant`"""

from typing import Any

import click

from saccade.cli.options import ENGINE_OPTIONS, config_options, engine_config, run_tool, with_options
from saccade.tools.options import EvalOptions, LodEvalOptions, QuantEvalOptions


@click.command("eval")
@click.argument("model", default="embedded")
@with_options(config_options(EvalOptions), ENGINE_OPTIONS)
def command(model: str, **given: Any) -> None:
    """Accuracy of MODEL, task by task, on the fixed question set of drawn images.

    \b
    Examples:
      saccade eval --limit 20
      saccade eval --task needle --task small_print --visual-tokens 256 --json out.json
      saccade eval --curve --limit 20
    """
    engine = engine_config(model, given)
    run_tool("eval", engine, EvalOptions(**given))


@click.command("eval-lod")
@click.argument("model", default="embedded")
@with_options(config_options(LodEvalOptions), ENGINE_OPTIONS)
def lod_command(model: str, **given: Any) -> None:
    """Accuracy against visual tokens: level of detail beside resizing, random regions and the true region.

    \b
    Examples:
      saccade eval-lod --limit 10 --json out.json
      saccade eval-lod --task needle --share 0.25
    """
    engine = engine_config(model, given)
    run_tool("eval-lod", engine, LodEvalOptions(**given))


@click.command("eval-quant")
@click.argument("model", default="embedded")
@with_options(config_options(QuantEvalOptions), ENGINE_OPTIONS)
def quant_command(model: str, **given: Any) -> None:
    """Quantisation of MODEL: KL divergence, perplexity, changed answers, bytes and decode speed by scheme.

    Each scheme is compared with the unquantised model, on text-only prompts and on questions about images.

    \b
    Examples:
      saccade eval-quant --schemes fp8,int8,int4
      saccade eval-quant MODEL --schemes decoder=fp8,head=none --schemes int4,./model-w4a16 --plot quant.svg
    """
    engine = engine_config(model, given)
    run_tool("eval-quant", engine, QuantEvalOptions(**given))
