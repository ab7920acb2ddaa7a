"""`saccade profile`: warms up every section, times it without the profiler, traces all of them once, and
reports."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from saccade.config import EngineConfig
from saccade.engine.cost_prior import read_model_size
from saccade.engine.memory import DTYPES
from saccade.llm import LLM
from saccade.tools.environment import device_name
from saccade.tools.options import ProfileOptions
from saccade.tools.profiler.floors import floors, synchronize
from saccade.tools.profiler.sections import (
    ENCODE,
    PREPROCESS,
    Section,
    SectionFactory,
    SectionRun,
    instrumented,
)
from saccade.tools.profiler.trace import LONG_GAP, RANGE, SectionTrace, read
from saccade.tools.report import figure, median, table

WARMUP_RUNS = 2  # per section: kernels are compiled, CUDA graphs captured
TABLE_WIDTH = 130  # where stdout is no terminal


@dataclass(frozen=True)
class SectionTime:
    """Medians of a section without the profiler, ms per repetition."""

    wall: float
    waiting: float  # of it, waiting for the device
    run: SectionRun  # the last run

    @property
    def host(self) -> float:
        return self.wall - self.waiting


@dataclass(frozen=True)
class Profile:
    where: str
    ceilings: str
    sections: tuple[Section, ...]
    timed: dict[str, SectionTime]
    traces: dict[str, SectionTrace]
    runs: dict[str, SectionRun]  # under the profiler


def run(engine: EngineConfig, options: ProfileOptions) -> int:
    with contextlib.closing(LLM(engine.model, progress=False, **engine.options())) as llm:
        done = _profile(llm, options)
    show(done, options.top)
    if options.json is not None:
        write_json(done, options.json)
    if options.trace is not None:
        print(f"trace: {options.trace} (open it at https://ui.perfetto.dev)")
    return 0


def _profile(llm: LLM, options: ProfileOptions) -> Profile:
    info = llm.engine.info
    dtype, device = DTYPES[info.dtype], torch.device(info.device)
    bounds = floors(read_model_size(llm.processor.checkpoint.config, dtype.itemsize), device, dtype)
    sections = SectionFactory(llm, options, bounds).sections()
    timed = {section.name: _time(section, options.repeat, device) for section in sections}
    traced, recorded = _trace(sections, options, device)
    chip = bounds.chip
    rates = f"{chip.name}, {chip.bandwidth / 1e9:,.0f} GB/s, {chip.matrix / 1e12:,.2f} TFLOP/s"
    return Profile(
        where=f"{info.model} ({info.dtype}) on {device_name(info.device)}",
        ceilings=rates,
        sections=tuple(sections),
        timed=timed,
        traces=read(cast(Any, recorded).events() or (), [section.name for section in sections]),
        runs=traced,
    )


def _time(section: Section, repeat: int, device: torch.device) -> SectionTime:
    walls, waits = [], []
    for number in range(WARMUP_RUNS + repeat):
        _prepare(section, device)
        with instrumented() as clock:
            start = time.perf_counter()
            ran = section.run()
            wall = time.perf_counter() - start
        if number >= WARMUP_RUNS:
            walls.append(wall / ran.times * 1e3)
            waits.append(clock.waited / ran.times * 1e3)
    return SectionTime(median(walls), median(waits), ran)


def _trace(
    sections: Sequence[Section], options: ProfileOptions, device: torch.device
) -> tuple[dict[str, SectionRun], profile]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    traced = {}
    with profile(activities=activities, acc_events=True) as recorded, instrumented():
        for section in sections:
            _prepare(section, device)
            with record_function(RANGE + section.name):
                traced[section.name] = section.run()
                synchronize(device)
    if options.trace is not None:
        recorded.export_chrome_trace(str(options.trace))
    return traced, recorded


def _prepare(section: Section, device: torch.device) -> None:
    section.prepare()
    if not section.steady:
        synchronize(device)


def show(done: Profile, top: int, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TABLE_WIDTH, file=console.file)
    console.print(_stages(done))
    for section in done.sections:
        console.print(_kernels(done, section, top))
    for section in done.sections:
        console.print(_gap_line(section.name, done.traces[section.name], done.runs[section.name]))
    console.print(f"Peak rates: {done.ceilings}. A floor is the time of bytes and operations at those rates.")


def _stages(done: Profile) -> Table:
    rows: list[list[str]] = []
    for section in done.sections:
        timed = done.timed[section.name]
        floor = timed.run.floor
        cells = [figure(value) for value in (timed.wall, timed.waiting, timed.host, floor)]
        rows.append([section.name, *cells, f"{floor / timed.wall:.0%}", timed.run.what])
        for part in _parts(done, section):
            least, share = "", ""
            if part.floor is not None:
                least, share = figure(part.floor), f"{part.floor / part.spent:.0%}" if part.spent else "-"
            rows.append([f"  {part.name}", figure(part.spent), "", "", least, share, part.what])
    heads = ("stage", "wall ms", "waiting", "host", "floor", "of the peak", "what")
    return table(done.where, heads, rows, left=("stage", "what"))


class Part(NamedTuple):
    name: str
    spent: float  # ms per repetition
    floor: float | None
    what: str = "in the trace"


def _parts(done: Profile, section: Section) -> list[Part]:
    """The vision tower takes the time of encoding less preprocessing."""
    found, ran = done.traces[section.name], done.runs[section.name]
    rows = []
    for name, floor in ran.parts.items():
        if name == ENCODE:
            spent = found.ranges.get(ENCODE, 0.0) - found.ranges.get(PREPROCESS, 0.0)
            rows.append(Part("vision tower", spent / ran.times, floor))
        elif name == PREPROCESS:
            rows.append(Part("preprocess", found.ranges.get(PREPROCESS, 0.0) / ran.times, floor))
        else:
            rows.append(Part(name, found.of_kind(name) / ran.times, floor))
    if ENCODE in ran.parts:
        rows.append(Part("prefill", found.elsewhere / ran.times, ran.floor - ran.parts[ENCODE]))
    if found.busy is not None:
        idle = max(done.timed[section.name].wall - found.busy / ran.times, 0.0)
        rows.append(Part("no kernel", idle, None, "the wall time less the kernels in the trace"))
    return rows


def _kernels(done: Profile, section: Section, top: int) -> Table:
    found, times = done.traces[section.name], done.runs[section.name].times
    what = "kernels" if found.busy is not None else "operators, by their own time on the host"
    total = sum(one.microseconds for one in found.kernels) or 1.0

    def cells(calls: float, spent: float) -> list[str]:
        return [figure(calls / times), figure(spent / times), f"{spent / total:.1%}"]

    rows = [[one.name, one.kind, *cells(one.calls, one.microseconds)] for one in found.kernels[:top]]
    others = found.kernels[top:]
    if others:
        calls, spent = sum(one.calls for one in others), sum(one.microseconds for one in others)
        rows.append([f"{len(others)} others", "", *cells(calls, spent)])
    heads = ("name", "kind", "calls", "us", "share")
    return table(f"{section.name}: {what}, {_one(times)}", heads, rows, left=("name", "kind"))


def _one(times: int) -> str:
    return "of one" if times == 1 else f"of one, the mean of {times}"


def _gap_line(name: str, found: SectionTrace, ran: SectionRun) -> str:
    if found.busy is None or found.idle is None:
        return f"{name}: no kernel events on this device, so no gaps are known."
    line = (
        f"{name}, {_one(ran.times)}: kernels ran for {found.busy / ran.times:.2f} ms,"
        f" none for {found.idle / ran.times:.2f} ms between them. In all {_gaps(found.gaps)}."
    )
    if found.between:
        mean = sum(found.between) / len(found.between)
        steps = f"From a step to the next, {len(found.between)} times"
        line += f" {steps}: {_gaps(found.between)}, {mean:.0f} us the mean."
    if found.lost:
        line += f" {found.lost} kernels have no launch in the trace; their start time places them."
    return line


def _gaps(gaps: Sequence[float]) -> str:
    long = sum(1 for gap in gaps if gap > LONG_GAP)
    longest = f"{max(gaps):.0f} us" if gaps else "none"
    return f"{long} gaps longer than {LONG_GAP:.0f} us, the longest {longest}"


def write_json(done: Profile, path: Path) -> None:
    document = {
        "where": done.where,
        "ceilings": done.ceilings,
        "sections": {
            one.name: {
                "what": done.timed[one.name].run.what,
                "floor_ms": done.timed[one.name].run.floor,
                "parts_floor_ms": done.runs[one.name].parts,
                "wall_ms": done.timed[one.name].wall,
                "waiting_ms": done.timed[one.name].waiting,
                "traced": done.runs[one.name].times,
                "found": asdict(done.traces[one.name]),
            }
            for one in done.sections
        },
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
