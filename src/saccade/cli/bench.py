"""`saccade bench`"""

from typing import Any

import click

from saccade.cli.options import ENGINE_OPTIONS, config_options, engine_config, option, run_tool, with_options
from saccade.tools.bench.options import WORKLOADS, BenchOptions

_SEED = option("--bench-seed", type=int, default=0, help="Seed of prompts, images and arrivals.")
_WORKLOAD_LIST = "\n".join(f"  {name:20} {summary}" for name, summary in WORKLOADS.items())


@click.command("bench", epilog=f"\b\nWorkloads:\n{_WORKLOAD_LIST}")
@click.argument("model", default="embedded")
@with_options(config_options(BenchOptions), (_SEED,), ENGINE_OPTIONS)
def command(model: str, **given: Any) -> None:
    """Measure MODEL on this machine, by named workloads.

    \b
    Examples:
      saccade bench
      saccade bench ./my-checkpoint --workload text_bs8 --workload ttft_unique_1024x1024 --json out.json
    """
    engine = engine_config(model, given)
    run_tool("bench", engine, BenchOptions(seed=given.pop("bench_seed"), **given))
