"""The report of `saccade profile`: tables, and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from saccade.tools.profiler.sections import ENCODE, PREPROCESS, Section, SectionRun
from saccade.tools.profiler.trace import LONG_GAP, SectionTrace
from saccade.tools.report import figure, table

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


def show(profile: Profile, top: int, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TABLE_WIDTH, file=console.file)
    console.print(_stages(profile))
    for section in profile.sections:
        console.print(_kernels(profile, section, top))
    for section in profile.sections:
        console.print(_gap_line(section.name, profile.traces[section.name], profile.runs[section.name]))
    console.print(
        f"Peak rates: {profile.ceilings}. A floor is the time of bytes and operations at those rates."
    )


def _stages(profile: Profile) -> Table:
    rows: list[list[str]] = []
    for section in profile.sections:
        timed = profile.timed[section.name]
        floor = timed.run.floor
        cells = [figure(value) for value in (timed.wall, timed.waiting, timed.host, floor)]
        rows.append([section.name, *cells, f"{floor / timed.wall:.0%}", timed.run.what])
        for part in _parts(profile, section):
            least, share = "", ""
            if part.floor is not None:
                least, share = figure(part.floor), f"{part.floor / part.spent:.0%}" if part.spent else "-"
            rows.append([f"  {part.name}", figure(part.spent), "", "", least, share, part.what])
    heads = ("stage", "wall ms", "waiting", "host", "floor", "of the peak", "what")
    return table(profile.where, heads, rows, left=("stage", "what"))


class Part(NamedTuple):
    name: str
    spent: float  # ms per repetition
    floor: float | None
    what: str = "in the trace"


def _parts(profile: Profile, section: Section) -> list[Part]:
    """The vision tower takes the time of encoding less preprocessing."""
    found, ran = profile.traces[section.name], profile.runs[section.name]
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
        idle = max(profile.timed[section.name].wall - found.busy / ran.times, 0.0)
        rows.append(Part("no kernel", idle, None, "the wall time less the kernels in the trace"))
    return rows


def _kernels(profile: Profile, section: Section, top: int) -> Table:
    found, times = profile.traces[section.name], profile.runs[section.name].times
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


def write_json(profile: Profile, path: Path) -> None:
    sections: Sequence[Section] = profile.sections
    document = {
        "where": profile.where,
        "ceilings": profile.ceilings,
        "sections": {
            one.name: {
                "what": profile.timed[one.name].run.what,
                "floor_ms": profile.timed[one.name].run.floor,
                "parts_floor_ms": profile.runs[one.name].parts,
                "wall_ms": profile.timed[one.name].wall,
                "waiting_ms": profile.timed[one.name].waiting,
                "traced": profile.runs[one.name].times,
                "found": asdict(profile.traces[one.name]),
            }
            for one in sections
        },
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
