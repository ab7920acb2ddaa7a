"""The profile as tables for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from saccade.tools.profiler.sections import ENCODE, PREPROCESS, Ran, Section
from saccade.tools.profiler.trace import LONG_GAP, Found
from saccade.tools.report import figure

TABLE_WIDTH = 130  # where stdout is no terminal


@dataclass(frozen=True)
class Timed:
    """A section without the profiler: medians, ms of one."""

    wall: float
    waiting: float  # of it, for the device
    ran: Ran  # the last time

    @property
    def host(self) -> float:
        return self.wall - self.waiting


@dataclass(frozen=True)
class Profile:
    where: str
    ceilings: str
    sections: tuple[Section, ...]
    timed: dict[str, Timed]
    found: dict[str, Found]
    traced: dict[str, Ran]


def show(profile: Profile, top: int, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TABLE_WIDTH, file=console.file)
    console.print(_stages(profile))
    for section in profile.sections:
        console.print(_kernels(profile, section, top))
    for section in profile.sections:
        console.print(_gap_line(section.name, profile.found[section.name], profile.traced[section.name]))
    console.print(f"Ceilings: {profile.ceilings}. A floor is what bytes and operations take at them alone.")


def _stages(profile: Profile) -> Table:
    table = Table(title=profile.where, title_justify="left")
    table.add_column("stage")
    for name in ("wall ms", "waiting", "host", "floor", "of the ceiling"):
        table.add_column(name, justify="right")
    table.add_column("what")
    for section in profile.sections:
        timed = profile.timed[section.name]
        floor = timed.ran.floor
        cells = [figure(value) for value in (timed.wall, timed.waiting, timed.host, floor)]
        table.add_row(section.name, *cells, f"{floor / timed.wall:.0%}", timed.ran.what)
        for part in _parts(profile, section):
            least, share = "", ""
            if part.floor is not None:
                least, share = figure(part.floor), f"{part.floor / part.spent:.0%}" if part.spent else "-"
            table.add_row(f"  {part.name}", figure(part.spent), "", "", least, share, part.what)
    return table


class Part(NamedTuple):
    name: str
    spent: float  # ms of one
    floor: float | None
    what: str = "in the trace"


def _parts(profile: Profile, section: Section) -> list[Part]:
    """The tower is what encoding takes less preprocessing."""
    found, ran = profile.found[section.name], profile.traced[section.name]
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
    found, times = profile.found[section.name], profile.traced[section.name].times
    what = "kernels" if found.busy is not None else "operators, by their own time on the host"
    table = Table(title=f"{section.name}: {what}, {_one(times)}", title_justify="left")
    table.add_column("name")
    table.add_column("kind")
    for name in ("calls", "us", "share"):
        table.add_column(name, justify="right")
    total = sum(one.microseconds for one in found.kernels) or 1.0
    for one in found.kernels[:top]:
        table.add_row(
            one.name,
            one.kind,
            figure(one.calls / times),
            figure(one.microseconds / times),
            f"{one.microseconds / total:.1%}",
        )
    others = found.kernels[top:]
    if others:
        spent = sum(one.microseconds for one in others)
        calls = sum(one.calls for one in others)
        cells = (figure(calls / times), figure(spent / times), f"{spent / total:.1%}")
        table.add_row(f"{len(others)} others", "", *cells)
    return table


def _one(times: int) -> str:
    return "of one" if times == 1 else f"of one, the mean of {times}"


def _gap_line(name: str, found: Found, ran: Ran) -> str:
    if found.busy is None or found.idle is None:
        return f"{name}: no kernel events on this device, so no gaps to tell."
    line = (
        f"{name}, {_one(ran.times)}: kernels ran for {found.busy / ran.times:.2f} ms,"
        f" none for {found.idle / ran.times:.2f} ms between them. In all {_gaps(found.gaps)}."
    )
    if found.between:
        mean = sum(found.between) / len(found.between)
        steps = f"From a step to the next, {len(found.between)} times"
        line += f" {steps}: {_gaps(found.between)}, {mean:.0f} us the mean."
    if found.lost:
        line += f" {found.lost} kernels have no launch in the trace, and are placed by when they began."
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
                "what": profile.timed[one.name].ran.what,
                "floor_ms": profile.timed[one.name].ran.floor,
                "parts_floor_ms": profile.traced[one.name].parts,
                "wall_ms": profile.timed[one.name].wall,
                "waiting_ms": profile.timed[one.name].waiting,
                "traced": profile.traced[one.name].times,
                "found": asdict(profile.found[one.name]),
            }
            for one in sections
        },
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
