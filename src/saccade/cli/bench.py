"""`saccade bench`"""

from typing import Any

import click

from saccade.cli.options import (
    ENGINE_OPTIONS,
    PROGRESS_OPTION,
    engine_config,
    option,
    run_tool,
    width_and_height,
    with_options,
)
from saccade.tools.bench.options import WORKLOADS, BenchOptions

_OPTIONS = (
    option("--workload", "workloads", multiple=True, metavar="NAME", help="See below; repeat the option."),
    option("--json", metavar="FILE", help="Also write every sample to FILE; - is stdout."),
    option(
        "--peer",
        type=click.Choice(["transformers", "none"]),
        help="Run a peer in the same run and print the ratio. [default: transformers on a CPU]",
    ),
    option("--requests", type=int, help="Requests of the workloads that send many at once."),
    option("--input-tokens", type=int, help="Text tokens per prompt."),
    option("--output-tokens", type=int, help="Tokens of every answer."),
    option(
        "--image-size",
        type=width_and_height,
        metavar="WxH",
        help="Image size, where the workload's name does not contain it.",
    ),
    option("--repeat", type=int, help="Timed runs; the median is reported."),
    option("--warmup", type=int, default=1, help="Untimed runs before those."),
    option("--phase-seconds", type=float, default=20.0, help="Length of each phase of mixed_load."),
    option("--text-rate", type=float, default=16.0, help="Text requests per second in mixed_load."),
    option(
        "--image-rate",
        "image_rates",
        type=float,
        multiple=True,
        default=(6.0, 15.0),
        help="Images per second in the later phases of mixed_load (repeat the option).",
    ),
    option("--bench-seed", type=int, default=0, help="Seed of prompts, images and arrivals."),
    option("--threads", type=int, help="CPU threads of torch, for Saccade and the peer."),
    PROGRESS_OPTION,
)
_WORKLOAD_LIST = "\n".join(f"  {name:20} {summary}" for name, summary in WORKLOADS.items())


@click.command("bench", epilog=f"\b\nWorkloads:\n{_WORKLOAD_LIST}")
@click.argument("model", default="embedded")
@with_options(_OPTIONS, ENGINE_OPTIONS)
def command(model: str, **given: Any) -> None:
    """Measure MODEL on this machine, by named workloads.

    \b
    Examples:
      saccade bench
      saccade bench ./my-checkpoint --workload text_bs8 --workload ttft_unique_1024x1024 --json out.json
    """
    engine = engine_config(model, given)
    run_tool("bench", engine, BenchOptions(seed=given.pop("bench_seed"), **given))
