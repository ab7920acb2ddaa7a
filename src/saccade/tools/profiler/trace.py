"""Reads what torch's profiler recorded: kernels, gaps and ranges of each section.

A kernel belongs to the section that launched it: a CUDA graph runs long after its launch. Without kernel
events (on a CPU) it gives operators by their own time, and no gaps."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

LONG_GAP = 50.0  # us without a kernel in a steady loop that count as long
RANGE = "saccade."
STEP = "saccade.step"  # the range of one engine step
LAUNCH = re.compile(r"cu(da)?[A-Z]")  # cudaGraphLaunch, cuLaunchKernelEx, ...
# Kind of a kernel by its name; the first match counts.
KINDS = {
    "products": r"gemm|gemv|cutlass|nvjet|skinny|many_kernel|^reduce_kernel|splitk|matmul"
    r"|aten::(mm|addmm|bmm|linear)|mkldnn|onednn",
    "attention": r"attention|fmha|flash|sdpa|_split_kernel|_prefill_kernel|paged|_combine",
    "copies": r"memcpy|memset|aten::(copy_|_to_copy|cat|index_select|index|index_put)",
}


@dataclass(frozen=True)
class KernelTime:
    name: str
    kind: str
    calls: int
    microseconds: float  # without the overlap with a kernel that started before


@dataclass(frozen=True)
class SectionTrace:
    """What one section launched, whenever it ran. Times are of the whole section."""

    kernels: tuple[KernelTime, ...]  # longest first
    busy: float | None  # ms in which any kernel ran; None without kernel events
    idle: float | None  # ms between the first kernel and the last in which none ran
    gaps: tuple[float, ...]  # us, longest first
    ranges: dict[str, float]  # ms of what named ranges launched, or of the host without kernel events
    elsewhere: float  # ms of what is in no range
    between: tuple[float, ...] = ()  # us from a step's last kernel to the next step's first
    lost: int = 0  # kernels whose launch is not in the trace; their start time places them

    def of_kind(self, kind: str) -> float:
        """Milliseconds."""
        return sum(one.microseconds for one in self.kernels if one.kind == kind) / 1e3


def kind_of(name: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "rest"


def short_name(name: str) -> str:
    """Without template arguments and parameters."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"<.*", "", name) if len(name) > 60 else name
    return re.sub(r"\(.*", "", name)[:60]


def read(events: Iterable[Any], sections: Sequence[str]) -> dict[str, SectionTrace]:
    """`events`: of torch.profiler, after it has stopped."""
    every = list(events)
    hosts = [event for event in every if _on_host(event)]
    kernels = _runs(every, hosts)
    found = {}
    for event in hosts:
        name = event.name.removeprefix(RANGE)
        if event.name != RANGE + name or name not in sections:
            continue
        low, high = event.time_range.start, event.time_range.end
        inside = [one for one in hosts if low <= one.time_range.start <= high and one is not event]
        launched = [one for one in kernels if low <= one.launched <= high]
        found[name] = _on_device(launched, inside) if kernels else _on_cpu(inside, high - low)
    return found


@dataclass(frozen=True)
class _Run:
    """A kernel or copy that ran on the device; us."""

    name: str
    start: float
    end: float
    launched: float  # start of the launch of it or of its CUDA graph
    lost: bool  # no known launch: `launched` is `start`


def _runs(every: Sequence[Any], hosts: Sequence[Any]) -> list[_Run]:
    """All kernels with their launches. A launch and its kernels share an id; operators have ids of their
    own, so only launches are looked up."""
    launches = {event.id: event.time_range.start for event in hosts if LAUNCH.match(event.name)}
    runs = []
    for event in every:
        if not _on_host(event) and not event.name.startswith(RANGE):
            start, end = event.time_range.start, event.time_range.end
            known = launches.get(event.id)
            runs.append(_Run(event.name, start, end, start if known is None else known, known is None))
    return sorted(runs, key=lambda one: (one.start, one.end))


def _on_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _on_cpu(events: Sequence[Any], whole: float) -> SectionTrace:
    ranges: dict[str, float] = {}
    for event in events:
        if event.name.startswith(RANGE):
            ranges[event.name] = ranges.get(event.name, 0.0) + event.cpu_time_total / 1e3
    named = [(event.name, event.self_cpu_time_total) for event in events if not event.name.startswith(RANGE)]
    covered, _ = _busy_and_gaps(sorted(_span(event) for event in events if event.name.startswith(RANGE)))
    return SectionTrace(_gathered(named), None, None, (), ranges, (whole - covered) / 1e3)


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def _on_device(runs: Sequence[_Run], hosts: Sequence[Any]) -> SectionTrace:
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in hosts:
        if event.name.startswith(RANGE):
            spans.setdefault(event.name, []).append(_span(event))
    indices = {
        name: [_span_index(sorted(each), one.launched) for one in runs] for name, each in spans.items()
    }
    ranges = {
        name: _busy([one for one, span in zip(runs, where, strict=True) if span is not None])
        for name, where in indices.items()
    }
    outside = [one for index, one in enumerate(runs) if all(at[index] is None for at in indices.values())]
    busy, gaps = _busy_and_gaps([(one.start, one.end) for one in runs])
    return SectionTrace(
        kernels=_gathered(_own_times(runs)),
        busy=busy / 1e3,
        idle=sum(gaps) / 1e3,
        gaps=tuple(sorted(gaps, reverse=True)),
        ranges=ranges,
        elsewhere=_busy(outside),
        between=_between(runs, indices.get(STEP, ())),
        lost=sum(one.lost for one in runs),
    )


def _own_times(runs: Sequence[_Run]) -> Iterator[tuple[str, float]]:
    """Names and us. A kernel that starts before the previous one has ended counts from that end, so that the
    sum is the time in which any ran. Copies run beside kernels and count in full; with several streams the
    later kernels count too little."""
    reached = -math.inf
    for one in runs:
        if kind_of(one.name) == "copies":
            yield one.name, one.end - one.start
        else:
            yield one.name, max(one.end - max(one.start, reached), 0.0)
            reached = max(reached, one.end)


def _span_index(spans: Sequence[tuple[float, float]], moment: float) -> int | None:
    """Which of the sorted, disjoint spans contains a moment."""
    index = bisect_right(spans, moment, key=lambda span: span[0]) - 1
    return index if index >= 0 and moment <= spans[index][1] else None


def _busy(runs: Sequence[_Run]) -> float:
    """Milliseconds in which any ran."""
    return _busy_and_gaps([(one.start, one.end) for one in runs])[0] / 1e3


def _between(runs: Sequence[_Run], steps: Sequence[int | None]) -> tuple[float, ...]:
    """Copies do not count: those of the next step may overlap this one."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for one, step in zip(runs, steps, strict=bool(steps)):
        if step is not None and kind_of(one.name) != "copies":
            first[step] = min(first.get(step, one.start), one.start)
            last[step] = max(last.get(step, one.end), one.end)
    order = sorted(first)
    return tuple(max(0.0, first[after] - last[one]) for one, after in pairwise(order))


def _gathered(times: Iterable[tuple[str, float]]) -> tuple[KernelTime, ...]:
    total: dict[str, list[float]] = {}
    for name, spent in times:
        total.setdefault(name, []).append(spent)
    kernels = [
        KernelTime(short_name(name), kind_of(name), len(each), sum(each)) for name, each in total.items()
    ]
    return tuple(sorted(kernels, key=lambda one: -one.microseconds))


def _busy_and_gaps(spans: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Microseconds covered by any span, and the gaps between them; spans are sorted by their start."""
    busy, gaps = 0.0, []
    reached: float | None = None
    for start, end in spans:
        if reached is not None and start > reached:
            gaps.append(start - reached)
        fresh = start if reached is None or start > reached else reached
        if end > fresh:
            busy += end - fresh
            reached = end
    return busy, gaps
