"""`saccade bench`: decides what to run, runs it in the right order, reports.

Workloads that start an engine process of their own go first, while no engine of this process holds the
device's memory; the others share one engine.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.client import ProcessLink
from saccade.engine.memory import resolve_device, resolve_dtype
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.tools.bench.anchors import anchors_apply, chosen_scale
from saccade.tools.bench.comparison import PeerEngine, compare
from saccade.tools.bench.figures import Row, median_row
from saccade.tools.bench.library import RUN
from saccade.tools.bench.load import mixed_load
from saccade.tools.bench.machine import commit, describe, device_name, versions
from saccade.tools.bench.options import (
    ON_PROCESS,
    PEERED,
    BenchOptions,
    Workload,
    default_workloads,
    parse_workload,
)
from saccade.tools.bench.report import Report, figure, print_table, write_json
from saccade.tools.bench.session import Session

# Peers by name; each is imported only when it is asked for.
PEERS = {"transformers": "saccade.tools.bench.peer"}
THREADS_VARIABLE = "OMP_NUM_THREADS"  # what torch reads when it starts


def run(engine: EngineConfig, options: BenchOptions) -> int:
    """Measure, print the table, write the JSON; gives the exit status."""
    with _threads(options.threads), _ended_kindly():
        return _run(engine, options)


def _run(engine: EngineConfig, options: BenchOptions) -> int:
    if options.json not in (None, "-") and not Path(str(options.json)).resolve().parent.is_dir():
        raise ConfigError(f"the folder of {options.json} does not exist; make it first")
    checkpoint = open_checkpoint(engine.model)
    peer = _peer_name(engine, options)
    workloads = _workloads(engine, options, checkpoint, peer)
    rows: dict[str, list[Row]] = {}
    try:
        with _bar(options.progress) as bar:
            _measure(engine, checkpoint, workloads, options, peer, bar, rows)
    finally:  # a failure or an interrupt late in a long run does not take its figures along
        if rows:
            report = _report(engine, options, checkpoint, workloads, rows)
            print_table(report)
            write_json(report)
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
    """Fills `rows`, workload by workload."""
    for workload in workloads:
        if workload.kind in ON_PROCESS:
            rows[workload.name] = _on_process(engine, checkpoint, workload, options, bar)
    inside = [workload for workload in workloads if workload.kind not in ON_PROCESS]
    if not inside:
        return
    began = time.perf_counter()
    with contextlib.closing(LLM(engine.model, progress=False, **engine.options())) as llm:
        _tell(options, [median_row("engine", "ready", "s", [time.perf_counter() - began])])
        _tell(options, [median_row("engine", part, "s", [s]) for part, s in llm.engine.start_seconds.items()])
        while llm.engine.prepare():  # as a server does while nobody asks
            pass
        _tell(options, [median_row("engine", "prepared", "s", [time.perf_counter() - began])])
        session = Session(llm, checkpoint, options, bar)
        other: PeerEngine | None = None
        for workload in inside:
            if workload.kind in PEERED:
                other = other or _load_peer(peer, checkpoint, llm)
                rows[workload.name] = compare(session, workload, other)
            else:
                rows[workload.name] = RUN[workload.kind](session, workload)
            _tell(options, rows[workload.name])


def _tell(options: BenchOptions, rows: Sequence[Row]) -> None:
    """Where no bar is drawn, a line for each figure as soon as it is known: a run may be cut off."""
    if options.progress and not sys.stderr.isatty():
        for row in rows:
            print(f"{row.workload}: {row.metric} {figure(row.value)} {row.unit}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ended_kindly() -> Iterator[None]:
    """Within: SIGTERM is as good as an interrupt, so that the table of what was measured is still printed."""
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
    """So many CPU threads, here and in the processes started from here; as before afterwards."""
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
    asked = any(parse_workload(name).kind in PEERED for name in options.workloads)
    fitting = resolve_device(engine).type == "cpu" and engine.load_format != "dummy"
    return "transformers" if asked or (fitting and not options.workloads) else "none"


def _workloads(
    engine: EngineConfig, options: BenchOptions, checkpoint: Checkpoint, peer: str
) -> list[Workload]:
    """What to run, every one checked against the model before the first begins."""
    vision = checkpoint.image is not None and checkpoint.image_token_id is not None
    on_gpu = resolve_device(engine).type == "cuda"
    names = options.workloads or default_workloads(on_gpu=on_gpu, vision=vision, peer=peer != "none")
    if not options.workloads and on_gpu and engine.max_num_seqs < 256:
        names = tuple(name for name in names if parse_workload(name).batch <= engine.max_num_seqs)
    workloads = [parse_workload(name) for name in dict.fromkeys(names)]
    for workload in workloads:
        if workload.needs_vision and not vision:
            raise ConfigError(
                f"{workload.name} asks about pictures, and {checkpoint.name} takes none; run a text workload"
                " or a vision-language model"
            )
        if workload.kind in PEERED and engine.load_format == "dummy":
            raise ConfigError(f"{workload.name} compares answers; dummy weights are not the peer's weights")
    return workloads


def _on_process(
    engine: EngineConfig, checkpoint: Checkpoint, workload: Workload, options: BenchOptions, bar: Progress
) -> list[Row]:
    if workload.kind == "mixed_load":
        return mixed_load(engine, checkpoint, workload, options, bar, partial(_tell, options))
    times = chosen_scale(workload, options).repeat
    task = bar.add_task(workload.name, total=times)
    samples = []
    for _ in range(times):
        samples.append(asyncio.run(_start_once(engine)))
        bar.advance(task)
    rows = [median_row(workload.name, "start", "s", samples, note=f"load format {engine.load_format}")]
    _tell(options, rows)
    return rows


async def _start_once(engine: EngineConfig) -> float:
    start = time.perf_counter()
    link = ProcessLink(engine)
    await link.start()
    seconds = time.perf_counter() - start
    await link.stop()
    return seconds


def _load_peer(name: str, checkpoint: Checkpoint, llm: LLM) -> PeerEngine:
    try:
        module = import_module(PEERS[name])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the peer {name} is not installed ({error.name} is missing); install it or use --peer none"
        ) from error
    peer: PeerEngine = module.Peer(checkpoint, llm.engine.info.device, llm.engine.info.dtype)
    return peer


def _report(
    engine: EngineConfig,
    options: BenchOptions,
    checkpoint: Checkpoint,
    workloads: Sequence[Workload],
    rows: dict[str, list[Row]],
) -> Report:
    device = str(resolve_device(engine))
    dtype = str(resolve_dtype(engine, checkpoint, resolve_device(engine))).removeprefix("torch.")
    name = device_name(device)
    return Report(
        title=f"{checkpoint.name} ({dtype}) on {name}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=" ".join(sys.argv),
        commit=commit(),
        machine=describe(device),
        versions=versions(),
        engine={**asdict(engine), "resolved_device": device, "resolved_dtype": dtype},
        options=options,
        rows=tuple(row for workload in workloads for row in rows.get(workload.name, ())),
        unmeasured=tuple(workload.name for workload in workloads if workload.name not in rows),
        anchored=anchors_apply(checkpoint.config, name, dtype),
    )


def _bar(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not (show and console.is_terminal))
