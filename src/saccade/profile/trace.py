"""What torch's profiler recorded, section by section: kernels, gaps between them, ranges.

takes   the profiler's events
gives   `Found` of each section
never   guesses: on a device without kernel events (a CPU) it tells operators by their own time, and no gaps
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LONG_GAP = 50.0  # us the device may stand between two kernels of a steady loop
RANGE = "saccade."
# What a kernel does, by its name; the first that fits.
KINDS = {
    "products": r"gemm|gemv|cutlass|nvjet|skinny|splitk|matmul|aten::(mm|addmm|bmm|linear)|mkldnn|onednn",
    "attention": r"attention|fmha|flash|sdpa|_split_kernel|paged|_combine",
    "copies": r"memcpy|memset|aten::(copy_|_to_copy|cat|index_select|index|index_put)",
}


@dataclass(frozen=True)
class Kernel:
    name: str
    kind: str
    calls: int
    microseconds: float


@dataclass(frozen=True)
class Found:
    """One section of the trace. Times are of the whole section."""

    kernels: tuple[Kernel, ...]  # longest first
    busy: float | None  # ms in which any kernel ran; None without kernel events
    idle: float | None  # ms between the first kernel and the last in which none ran
    gaps: tuple[float, ...]  # us, longest first
    ranges: dict[str, float]  # ms of named ranges: of their kernels, or of the host without kernel events

    def of_kind(self, kind: str) -> float:
        """Milliseconds."""
        return sum(one.microseconds for one in self.kernels if one.kind == kind) / 1e3


def kind_of(name: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "rest"


def short_name(name: str) -> str:
    """Without what only a compiler wants to know."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"<.*", "", name) if len(name) > 60 else name
    return re.sub(r"\(.*", "", name)[:60]


def read(events: Iterable[Any], sections: Sequence[str]) -> dict[str, Found]:
    """`events`: of torch.profiler, after it has stopped."""
    every = list(events)
    windows = {
        event.name.removeprefix(RANGE): (event.time_range.start, event.time_range.end)
        for event in every
        if event.name in {RANGE + name for name in sections} and _on_host(event)
    }
    on_device = any(_is_kernel(event) for event in every)
    return {
        name: _found([event for event in every if low <= event.time_range.start <= high], on_device, name)
        for name, (low, high) in windows.items()
    }


def _is_kernel(event: Any) -> bool:
    return not _on_host(event) and not event.name.startswith(RANGE)


def _on_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _found(events: Sequence[Any], on_device: bool, section: str) -> Found:
    inner = [event for event in events if event.name.startswith(RANGE) and event.name != RANGE + section]
    ranges: dict[str, float] = {}
    for event in inner:
        if _on_host(event):
            spent = event.device_time_total if on_device else event.cpu_time_total
            ranges[event.name] = ranges.get(event.name, 0.0) + spent / 1e3
    if not on_device:
        ops = [event for event in events if not event.name.startswith(RANGE)]
        return Found(_gathered((one.name, one.self_cpu_time_total) for one in ops), None, None, (), ranges)
    kernels = [event for event in events if _is_kernel(event)]
    spans = sorted((one.time_range.start, one.time_range.end) for one in kernels)
    busy, gaps = _busy_and_gaps(spans)
    named = _gathered((one.name, one.time_range.end - one.time_range.start) for one in kernels)
    return Found(named, busy / 1e3, sum(gaps) / 1e3, tuple(sorted(gaps, reverse=True)), ranges)


def _gathered(times: Iterable[tuple[str, float]]) -> tuple[Kernel, ...]:
    total: dict[str, list[float]] = {}
    for name, spent in times:
        total.setdefault(name, []).append(spent)
    kernels = [Kernel(short_name(name), kind_of(name), len(each), sum(each)) for name, each in total.items()]
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
