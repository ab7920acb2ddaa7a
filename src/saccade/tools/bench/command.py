"""`saccade bench`: runs the workloads and reports.

Workloads that start an engine process of their own run first, while no engine of this process holds device
memory; the others share one engine."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.progress import Progress
from rich.table import Table

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.client import EngineClient
from saccade.engine.memory import resolve_device
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.tools.bench.mixed_load import mixed_load
from saccade.tools.bench.options import (
    OWN_PROCESS,
    BenchOptions,
    Workload,
    chosen_scale,
    default_workloads,
    parse_workload,
)
from saccade.tools.bench.workloads import RUN, Row, Session, median_row
from saccade.tools.environment import RunInfo, commit, run_info
from saccade.tools.report import check_json_target, figure, output_console, progress_bar, write_json

THREADS_VARIABLE = "OMP_NUM_THREADS"  # torch reads it on start


@dataclass(frozen=True)
class BenchReport:
    run: RunInfo
    options: BenchOptions
    rows: tuple[Row, ...]
    unmeasured: tuple[str, ...] = ()  # workloads that a failure or an interrupt cut off

    def show(self) -> None:
        """Prints the table and writes the JSON."""
        console = output_console(self.options.json)
        console.print(self._table())
        if self.unmeasured:
            console.print(f"Not measured: {', '.join(self.unmeasured)}.")
        fields = asdict(self)
        document = {"title": self.run.title, **fields.pop("run"), **fields}
        write_json(self.options.json, json.dumps(document, indent=2, allow_nan=False) + "\n")

    def _table(self) -> Table:
        table = Table(title=self.run.title, title_justify="left")
        for name in ("workload", "metric", "value", "spread", "scale", "note"):
            table.add_column(name, justify="right" if name in ("value", "spread") else "left")
        previous, shown = "", ("", "")
        for row in self.rows:
            if previous and row.workload != previous:
                table.add_section()
            name = row.workload if row.workload != previous else ""
            scale = ", ".join(f"{name} {value}" for name, value in row.parameters.items())
            scale_cell = scale if (row.workload, scale) != shown else ""
            table.add_row(
                name, row.metric, f"{figure(row.value)} {row.unit}", _spread(row), scale_cell, row.note
            )
            previous, shown = row.workload, (row.workload, scale)
        return table


def _spread(row: Row) -> str:
    if len(row.samples) < 2 or row.workload == "mixed_load":
        return ""
    return f"{figure(min(row.samples))} - {figure(max(row.samples))}"


def run(engine: EngineConfig, options: BenchOptions) -> int:
    """Returns the exit status."""
    with cpu_threads(options.threads), _sigterm_interrupts():
        return _run(engine, options)


def _run(engine: EngineConfig, options: BenchOptions) -> int:
    check_json_target(options.json)
    checkpoint = open_checkpoint(engine.model)
    workloads = _workloads(engine, options, checkpoint)
    rows: dict[str, list[Row]] = {}
    try:
        with progress_bar(options.progress) as bar:
            _measure(engine, checkpoint, workloads, options, bar, rows)
    finally:  # after a failure or an interrupt the figures so far are still reported
        if rows:
            BenchReport(
                run=run_info(engine, checkpoint, commit()),
                options=options,
                rows=tuple(row for workload in workloads for row in rows.get(workload.name, ())),
                unmeasured=tuple(workload.name for workload in workloads if workload.name not in rows),
            ).show()
    return 0


def _measure(
    engine: EngineConfig,
    checkpoint: Checkpoint,
    workloads: Sequence[Workload],
    options: BenchOptions,
    bar: Progress,
    rows: dict[str, list[Row]],
) -> None:
    """Fills `rows`."""
    for workload in workloads:
        if workload.kind in OWN_PROCESS:
            rows[workload.name] = _in_own_process(engine, checkpoint, workload, options, bar)
    shared = [workload for workload in workloads if workload.kind not in OWN_PROCESS]
    if not shared:
        return
    began = time.perf_counter()
    with contextlib.closing(LLM(engine.model, progress=False, **engine.options())) as llm:
        _print_early(options, [median_row("engine", "ready", "s", [time.perf_counter() - began])])
        _print_early(
            options, [median_row("engine", part, "s", [s]) for part, s in llm.engine.start_seconds.items()]
        )
        while llm.engine.warm_up():  # warm-up, as an idle server does it
            pass
        _print_early(options, [median_row("engine", "prepared", "s", [time.perf_counter() - began])])
        session = Session(llm, checkpoint, options, bar)
        for workload in shared:
            rows[workload.name] = RUN[workload.kind](session, workload)
            _print_early(options, rows[workload.name])


def _print_early(options: BenchOptions, rows: Sequence[Row]) -> None:
    """Without a progress bar: a line per figure as soon as it is known, because a run may be cut off."""
    if options.progress and not sys.stderr.isatty():
        for row in rows:
            print(f"{row.workload}: {row.metric} {figure(row.value)} {row.unit}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that the figures so far are printed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Sets the number of CPU threads, here and in child processes, and restores it."""
    if count is None:
        yield
        return
    before, variable = torch.get_num_threads(), os.environ.get(THREADS_VARIABLE)
    torch.set_num_threads(count)
    os.environ[THREADS_VARIABLE] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        os.environ.pop(THREADS_VARIABLE)
        if variable is not None:
            os.environ[THREADS_VARIABLE] = variable


def _workloads(engine: EngineConfig, options: BenchOptions, checkpoint: Checkpoint) -> list[Workload]:
    """The workloads to run, all checked against the model before the first starts."""
    vision = checkpoint.image is not None and checkpoint.image_token_id is not None
    on_gpu = resolve_device(engine).type == "cuda"
    names = options.workloads or default_workloads(on_gpu=on_gpu, vision=vision)
    if not options.workloads and on_gpu and engine.max_num_seqs < 256:
        names = tuple(name for name in names if parse_workload(name).batch <= engine.max_num_seqs)
    workloads = [parse_workload(name) for name in dict.fromkeys(names)]
    for workload in workloads:
        if workload.needs_vision and not vision:
            raise ConfigError(
                f"{workload.name} asks about images, and {checkpoint.name} takes none; run a text workload"
                " or a vision-language model"
            )
    return workloads


def _in_own_process(
    engine: EngineConfig, checkpoint: Checkpoint, workload: Workload, options: BenchOptions, bar: Progress
) -> list[Row]:
    if workload.kind == "mixed_load":
        return mixed_load(engine, checkpoint, workload, options, bar, partial(_print_early, options))
    times = chosen_scale(workload, options).repeat
    task = bar.add_task(workload.name, total=times)
    samples = []
    for _ in range(times):
        samples.append(asyncio.run(_start_once(engine)))
        bar.advance(task)
    rows = [median_row(workload.name, "start", "s", samples, note=f"load format {engine.load_format}")]
    _print_early(options, rows)
    return rows


async def _start_once(engine: EngineConfig) -> float:
    start = time.perf_counter()
    link = EngineClient(engine)
    await link.start()
    seconds = time.perf_counter() - start
    await link.stop()
    return seconds
