"""The profile as tables for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from saccade.bench.report import figure
from saccade.profile.sections import ENCODE, PREPROCESS, Section
from saccade.profile.trace import LONG_GAP, Found

TABLE_WIDTH = 130  # where stdout is no terminal


@dataclass(frozen=True)
class Timed:
    """A section without the profiler: medians, ms of one."""

    wall: float
    waiting: float  # of it, for the device

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
    counts: dict[str, int]  # how often each section's thing was done in the trace


def show(profile: Profile, top: int, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TABLE_WIDTH, file=console.file)
    console.print(_stages(profile))
    for section in profile.sections:
        console.print(_kernels(profile, section, top))
    for section in profile.sections:
        console.print(_gap_line(section.name, profile.found[section.name]))
    console.print(f"Ceilings: {profile.ceilings}. A floor is what bytes and operations take at them alone.")


def _stages(profile: Profile) -> Table:
    table = Table(title=profile.where, title_justify="left")
    table.add_column("stage")
    for name in ("wall ms", "waiting", "host", "floor", "of the ceiling"):
        table.add_column(name, justify="right")
    table.add_column("what")
    for section in profile.sections:
        timed = profile.timed[section.name]
        cells = [figure(value) for value in (timed.wall, timed.waiting, timed.host, section.floor)]
        table.add_row(section.name, *cells, f"{section.floor / timed.wall:.0%}", section.what)
        for name, spent, floor in _parts(profile, section):
            share = f"{floor / spent:.0%}" if spent else "-"
            table.add_row(f"  {name}", figure(spent), "", "", figure(floor), share, "in the trace")
    return table


def _parts(profile: Profile, section: Section) -> list[tuple[str, float, float]]:
    """Name, ms and floor of the parts of a section; the tower is what encoding takes less preprocessing."""
    found, times = profile.found[section.name], profile.counts[section.name]
    rows = []
    for name, floor in section.parts.items():
        if name == ENCODE:
            spent = found.ranges.get(ENCODE, 0.0) - found.ranges.get(PREPROCESS, 0.0)
            rows.append(("vision tower", spent / times, floor))
        elif name == PREPROCESS:
            rows.append(("preprocess", found.ranges.get(PREPROCESS, 0.0) / times, floor))
        else:
            rows.append((name, found.of_kind(name) / times, floor))
    if section.name == "picture":
        whole = profile.timed[section.name].wall
        rest = sum(spent for _, spent, _ in rows)
        rows.append(("prefill and the rest", max(whole - rest, 0.0), section.floor - section.parts[ENCODE]))
    return rows


def _kernels(profile: Profile, section: Section, top: int) -> Table:
    found, times = profile.found[section.name], profile.counts[section.name]
    what = "kernels" if found.busy is not None else "operators, by their own time on the host"
    table = Table(title=f"{section.name}: {what}, of one", title_justify="left")
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


def _gap_line(name: str, found: Found) -> str:
    if found.busy is None or found.idle is None:
        return f"{name}: no kernel events on this device, so no gaps to tell."
    long = [gap for gap in found.gaps if gap > LONG_GAP]
    longest = f"{found.gaps[0]:.0f} us" if found.gaps else "none"
    return (
        f"{name}: kernels ran for {found.busy:.2f} ms, none for {found.idle:.2f} ms between them;"
        f" {len(long)} gaps longer than {LONG_GAP:.0f} us, the longest {longest}."
    )


def write_json(profile: Profile, path: Path) -> None:
    sections: Sequence[Section] = profile.sections
    document = {
        "where": profile.where,
        "ceilings": profile.ceilings,
        "sections": {
            one.name: {
                "what": one.what,
                "floor_ms": one.floor,
                "parts_floor_ms": one.parts,
                "wall_ms": profile.timed[one.name].wall,
                "waiting_ms": profile.timed[one.name].waiting,
                "traced": profile.counts[one.name],
                "found": asdict(profile.found[one.name]),
            }
            for one in sections
        },
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
