"""The figures that can share one engine, for GPU machines with little time.

    python -m bench.one MODEL [--seconds 300] [--plots FOLDER] [options of the engine]

It prints, each line as soon as it is known: the rows of `saccade bench` that run in this process, the scaling
of steps and first tokens, the growth of memory over some thousand requests. A part starts only while there
are seconds left. The engine takes more sequences and longer contexts than that of `saccade bench`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from bench import growth, scaling
from bench.questions import Scope
from saccade.cli.options import ENGINE_OPTIONS, engine_config, option, with_options
from saccade.llm import LLM
from saccade.tools.bench.options import ON_GPU, OWN_PROCESS, BenchOptions, parse_workload
from saccade.tools.bench.workloads import RUN, Session
from saccade.tools.environment import device_name
from saccade.tools.report import figure

# The quickest and most important rows run first.
LAST = ("vlm_unique", "text_bs128", "text_throughput", "text_bs256")
POINTS = {
    "batch": (1, 4, 8, 16, 32, 64, 128, 256, 512),
    "context": (512, 2048, 8192, 32768, 65536),
    "images": (224, 448, 896, 1024, 1408, 2048, 2896),
}
SCALED_STEPS = 24  # a point


ROWS = tuple(name for name in ON_GPU if parse_workload(name).kind not in OWN_PROCESS)


def rows(llm: LLM, repeat: int, names: tuple[str, ...]) -> Iterator[str]:
    ordered = [name for name in names if name not in LAST] + [name for name in LAST if name in names]
    with Progress(disable=True) as bar:
        session = Session(llm, llm.processor.checkpoint, BenchOptions(repeat=repeat, progress=False), bar)
        for workload in map(parse_workload, ordered):
            for row in RUN[workload.kind](session, workload):
                spread = " ".join(figure(sample) for sample in row.samples)
                yield f"{row.workload}: {row.metric} {figure(row.value)} {row.unit} ({spread})"


def scaled(llm: LLM, plots: Path | None) -> Iterator[str]:
    bench = scaling.ScalingBench(llm, SCALED_STEPS, 3)
    info = llm.engine.info
    where = f"{info.model}, {info.dtype}, {device_name(info.device)}"
    found: dict[str, list[scaling.Point]] = {}
    for part, values in POINTS.items():
        found[part] = scaling.measure(bench, part, values)
        scaling.show(part, found[part], where)
        if plots is not None:
            scaling.store(found, where, plots)
        yield f"scaling over {part}: {len(found[part])} points"


def grown(llm: LLM, requests: int) -> Iterator[str]:
    samples = growth.measure(llm, requests, 0, Scope(images=0.3, grain=growth.GRAIN))
    for one in samples[:: max(1, len(samples) // 6)] + samples[-1:]:
        sizes = (one.host, one.allocated, one.reserved)
        yield f"growth: {one.requests:5} requests, MiB " + " ".join(
            f"{size / growth.MIB:.1f}" for size in sizes
        )
    yield "growth after the first fifth, MiB: " + str(
        {name: round(value / growth.MIB, 1) for name, value in growth.grown(samples).items()}
    )


@click.command(help=__doc__)
@click.argument("model", default="embedded")
@option("--seconds", type=float, default=300.0, help="after which no part starts")
@option("--repeat", type=int, default=2, help="timed runs of a row")
@option("--row", "chosen", type=click.Choice(ROWS), multiple=True, help="only these rows")
@option("--requests", type=int, default=2000, help="of growth")
@option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="folder for scaling.json; `bench.scaling --redraw` draws it",
)
@with_options(ENGINE_OPTIONS)
def main(
    model: str,
    seconds: float,
    repeat: int,
    chosen: tuple[str, ...],
    requests: int,
    plots: Path | None,
    **given: Any,
) -> None:
    began = time.perf_counter()
    llm = LLM(model, progress=False, **engine_config(model, given).options())
    laps = ", ".join(f"{part} {took:.1f}" for part, took in llm.engine.start_seconds.items())
    print(f"ready after {time.perf_counter() - began:.1f} s: {laps}", flush=True)
    while llm.engine.warm_up():  # warm-up, as an idle server does it
        pass
    print(f"warm after {time.perf_counter() - began:.1f} s", flush=True)
    everything = (rows(llm, repeat, ROWS), scaled(llm, plots), grown(llm, requests))
    parts = (rows(llm, repeat, chosen),) if chosen else everything
    for line in (line for part in parts for line in part):
        print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)
        if time.perf_counter() - began > seconds:
            print("out of time: what follows is left out", flush=True)
            break
    llm.close()


if __name__ == "__main__":
    main()
