"""The faults found by a soak test, in words, and its table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.soak.clients import ClientOutcome
from bench.soak.watch import MIB, Held, Sample

# What a process may have grown from the second quarter of the time to the last.
ALLOWED = {"low": 16 * MIB, "middle": 48 * MIB}
SPARE_DESCRIPTORS = 8  # connections that linger for their time-out


@dataclass(frozen=True)
class Growth:
    """Anonymous memory of one process, bytes, by quarters of the time.

    A busy heap breathes: what activations took is given back every ten seconds. What a process cannot give
    back is its low water, the level under which it is a twentieth of the time: a leak lifts that. The median
    tells how far it breathes out, and whether that creeps up.
    """

    name: str
    low: tuple[float, ...]
    middle: tuple[float, ...]
    most: tuple[float, ...]

    def grown(self, what: str) -> float:
        """From the second quarter to the last."""
        levels: tuple[float, ...] = getattr(self, what)
        return levels[3] - levels[1]


def growth(samples: Sequence[Sample], name: str) -> Growth:
    last = samples[-1].seconds or 1.0
    quarters: list[list[int]] = [[], [], [], []]
    for one in samples:
        held: Held = getattr(one, name)
        quarters[min(int(4 * one.seconds / last), 3)].append(held.anonymous)
    full = [sorted(each) or [0] for each in quarters]
    return Growth(
        name,
        tuple(float(each[len(each) // 20]) for each in full),
        tuple(float(each[len(each) // 2]) for each in full),
        tuple(float(each[-1]) for each in full),
    )


def request_faults(outcomes: Sequence[ClientOutcome]) -> list[str]:
    bad = Counter((one.kind, one.behaviour, one.reason) for one in outcomes if one.end == "fault")
    return [f"{count} x {kind}, {how}: {why}" for (kind, how, why), count in bad.most_common()]


def memory_faults(samples: Sequence[Sample]) -> list[str]:
    found = []
    for name in ("front", "engine"):
        one = growth(samples, name)
        for what, allowed in ALLOWED.items():
            if (grown := one.grown(what)) > allowed:
                found.append(f"the {what} level of the {name} process rose by {grown / MIB:.1f} MiB")
    return found


def idle_faults(idle: Mapping[str, float], blocks: float, features: Mapping[str, int]) -> list[str]:
    """Of the server's own metrics, once it is idle."""
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


def table(outcomes: Sequence[ClientOutcome], samples: Sequence[Sample]) -> str:
    lines = [f"{'behaviour':14} {'sent':>6} {'answered':>9} {'refused':>8} {'left':>6} {'faults':>7}"]
    for how in sorted({one.behaviour for one in outcomes}):
        ends = Counter(one.end for one in outcomes if one.behaviour == how)
        lines.append(
            f"{how:14} {ends.total():6} {ends['answered']:9} {ends['refused']:8} {ends['left']:6}"
            f" {ends['fault']:7}"
        )
    reasons = Counter(f"{one.status} {one.reason}" for one in outcomes if one.end == "refused")
    lines.append("refused with: " + ", ".join(f"{count} x {why}" for why, count in reasons.most_common()))
    lines.append("\nanonymous MiB by quarters of the time: low water, median, most")
    for name in ("front", "engine"):
        one = growth(samples, name)
        quarters = zip(one.low, one.middle, one.most, strict=True)
        lines.append(f"{name:8}" + " | ".join(" ".join(f"{v / MIB:6.1f}" for v in each) for each in quarters))
    return "\n".join(lines)
