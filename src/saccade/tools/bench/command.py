"""`saccade bench`: runs the workloads and reports.

Workloads that start an engine process of their own run first, while no engine of this process holds device
memory; the others share one engine."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from rich.progress import Progress

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.client import EngineClient
from saccade.engine.memory import resolve_device
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.tools.bench.anchors import anchors_apply, chosen_scale
from saccade.tools.bench.mixed_load import mixed_load
from saccade.tools.bench.options import (
    OWN_PROCESS,
    PEERED,
    BenchOptions,
    Workload,
    default_workloads,
    parse_workload,
)
from saccade.tools.bench.report import BenchReport, print_report, write_report
from saccade.tools.bench.workloads import RUN, Row, Session, compare, median_row
from saccade.tools.environment import commit, run_info
from saccade.tools.peer import PeerEngine, load_peer
from saccade.tools.report import check_json_target, figure, progress_bar

THREADS_VARIABLE = "OMP_NUM_THREADS"  # torch reads it on start


def run(engine: EngineConfig, options: BenchOptions) -> int:
    """Returns the exit status."""
    with _threads(options.threads), _sigterm_interrupts():
        return _run(engine, options)


def _run(engine: EngineConfig, options: BenchOptions) -> int:
    check_json_target(options.json)
    checkpoint = open_checkpoint(engine.model)
    peer = _peer_name(engine, options)
    workloads = _workloads(engine, options, checkpoint, peer)
    rows: dict[str, list[Row]] = {}
    try:
        with progress_bar(options.progress) as bar:
            _measure(engine, checkpoint, workloads, options, peer, bar, rows)
    finally:  # after a failure or an interrupt the figures so far are still reported
        if rows:
            report = _report(engine, options, checkpoint, workloads, rows)
            print_report(report)
            write_report(report)
    return 0


def _measure(
    engine: EngineConfig,
    checkpoint: Checkpoint,
    workloads: Sequence[Workload],
    options: BenchOptions,
    peer: str,
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
        other: PeerEngine | None = None
        for workload in shared:
            if workload.kind in PEERED:
                other = other or _load_peer(peer, checkpoint, llm)
                rows[workload.name] = compare(session, workload, other)
            else:
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
def _threads(count: int | None) -> Iterator[None]:
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


def _peer_name(engine: EngineConfig, options: BenchOptions) -> str:
    if options.peer is not None:
        return options.peer
    named = any(parse_workload(name).kind in PEERED for name in options.workloads)
    suits = resolve_device(engine).type == "cpu" and engine.load_format != "dummy"
    return "transformers" if named or (suits and not options.workloads) else "none"


def _workloads(
    engine: EngineConfig, options: BenchOptions, checkpoint: Checkpoint, peer: str
) -> list[Workload]:
    """The workloads to run, all checked against the model before the first starts."""
    vision = checkpoint.image is not None and checkpoint.image_token_id is not None
    on_gpu = resolve_device(engine).type == "cuda"
    names = options.workloads or default_workloads(on_gpu=on_gpu, vision=vision, peer=peer != "none")
    if not options.workloads and on_gpu and engine.max_num_seqs < 256:
        names = tuple(name for name in names if parse_workload(name).batch <= engine.max_num_seqs)
    workloads = [parse_workload(name) for name in dict.fromkeys(names)]
    for workload in workloads:
        if workload.needs_vision and not vision:
            raise ConfigError(
                f"{workload.name} asks about images, and {checkpoint.name} takes none; run a text workload"
                " or a vision-language model"
            )
        if workload.kind in PEERED and engine.load_format == "dummy":
            raise ConfigError(f"{workload.name} compares answers; dummy weights are not the peer's weights")
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


def _load_peer(name: str, checkpoint: Checkpoint, llm: LLM) -> PeerEngine:
    info = llm.engine.info
    return load_peer(name, checkpoint, info.device, info.dtype, stop_at_end=False, remedy="use --peer none")


def _report(
    engine: EngineConfig,
    options: BenchOptions,
    checkpoint: Checkpoint,
    workloads: Sequence[Workload],
    rows: dict[str, list[Row]],
) -> BenchReport:
    run = run_info(engine, checkpoint, commit())
    return BenchReport(
        run=run,
        options=options,
        rows=tuple(row for workload in workloads for row in rows.get(workload.name, ())),
        unmeasured=tuple(workload.name for workload in workloads if workload.name not in rows),
        anchored=anchors_apply(checkpoint.config, str(run.machine["device"]), run.dtype),
    )
