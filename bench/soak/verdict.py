"""What must not be after a soak.

takes   outcomes, samples, the metrics of the idle server, what is left when it has ended
gives   a table, and the faults in words
never   excuses: what it cannot tell is a fault
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.soak.clients import Outcome
from bench.soak.watch import MIB, Held, Sample

FLAT = 16 * MIB  # what a process may have grown over the second half: a busy heap breathes
SPARE_DESCRIPTORS = 8  # connections that linger for their time-out


@dataclass(frozen=True)
class Growth:
    """Anonymous memory of one process: medians of the tenths around the middle and at the end."""

    name: str
    start: float
    middle: float
    end: float
    most: float

    @property
    def second_half(self) -> float:
        return self.end - self.middle


def growth(samples: Sequence[Sample], name: str) -> Growth:
    held: list[tuple[float, Held]] = [(one.seconds, getattr(one, name)) for one in samples]
    last = held[-1][0]

    def tenth(low: float, high: float) -> float:
        inside = [one.anonymous for at, one in held if low * last <= at <= high * last]
        return float(median(inside)) if inside else float(held[-1][1].anonymous)

    most = max(one.anonymous for _, one in held)
    return Growth(name, tenth(0.05, 0.15), tenth(0.45, 0.55), tenth(0.9, 1.0), float(most))


def request_faults(outcomes: Sequence[Outcome]) -> list[str]:
    bad = Counter((one.kind, one.behaviour, one.reason) for one in outcomes if one.end == "fault")
    return [f"{count} x {kind}, {how}: {why}" for (kind, how, why), count in bad.most_common()]


def memory_faults(samples: Sequence[Sample]) -> list[str]:
    found = []
    for name in ("front", "engine"):
        grown = growth(samples, name).second_half
        if grown > FLAT:
            found.append(f"the {name} process grew by {grown / MIB:.1f} MiB over the second half")
    return found


def idle_faults(idle: Mapping[str, float], blocks: float, features: Mapping[str, int]) -> list[str]:
    """Of the server's own metrics, once nobody asks any more."""
    empty = [name for name in idle if name.startswith(("saccade_requests{", "saccade_queue_choices{"))]
    empty += ["saccade_http_requests_in_flight", 'saccade_kv_blocks{state="used"}']
    found = [f"{name} is {idle[name]:g} on an idle server" for name in empty if idle[name]]
    pool = sum(value for name, value in idle.items() if name.startswith("saccade_kv_blocks{"))
    if pool != blocks:
        found.append(f"the pool has {pool:g} blocks, and had {blocks:g}")
    for tier, budget in features.items():
        kept = idle[f'saccade_feature_cache_bytes{{tier="{tier}"}}']
        if kept > budget:
            found.append(f"{kept:g} bytes of features are kept in {tier} over a budget of {budget}")
    return found


def held_faults(name: str, before: Held, after: Held) -> list[str]:
    found = []
    if after.descriptors > before.descriptors + SPARE_DESCRIPTORS:
        found.append(f"the {name} has {after.descriptors} descriptors open, and had {before.descriptors}")
    if after.children != before.children:
        found.append(f"the {name} has {after.children} child processes, and had {before.children}")
    return found


def table(outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> str:
    lines = [f"{'behaviour':14} {'sent':>6} {'answered':>9} {'refused':>8} {'left':>6} {'faults':>7}"]
    for how in sorted({one.behaviour for one in outcomes}):
        ends = Counter(one.end for one in outcomes if one.behaviour == how)
        lines.append(
            f"{how:14} {ends.total():6} {ends['answered']:9} {ends['refused']:8} {ends['left']:6}"
            f" {ends['fault']:7}"
        )
    reasons = Counter(f"{one.status} {one.reason}" for one in outcomes if one.end == "refused")
    lines.append("refused with: " + ", ".join(f"{count} x {why}" for why, count in reasons.most_common()))
    lines.append(
        f"\n{'anonymous MiB':14} {'at 10%':>8} {'at 50%':>8} {'at end':>8} {'most':>8} {'2nd half':>9}"
    )
    for name in ("front", "engine"):
        one = growth(samples, name)
        figures = [one.start, one.middle, one.end, one.most, one.second_half]
        lines.append(f"{name:14} " + " ".join(f"{value / MIB:8.1f}" for value in figures))
    return "\n".join(lines)
