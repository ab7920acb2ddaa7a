"""CUDA graphs: capture of a function over static buffers, and the cache of captured graphs."""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)

MAX_CANDIDATES = 4096  # keys without a graph whose uses are counted

Replay = Callable[[], None]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recorder(Protocol):
    def record(self, function: Replay) -> Replay:
        """Capture a function that has run before, so that nothing is left to compile or to allocate. Raises a
        RuntimeError where capture is not possible."""
        ...


class PlainRecorder:
    """The CPU's reference implementation: a replay is a call."""

    def record(self, function: Replay) -> Replay:
        return function


class CudaRecorder:
    """All graphs of one recorder share a memory pool: no two of them may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # Libraries keep a workspace per stream. Allocated during a capture it would belong to that graph.
        with torch.cuda.stream(self._stream):
            for dtype in (torch.float32, torch.bfloat16):
                some = torch.zeros(16, 16, dtype=dtype, device=device)
                F.linear(some @ some, some, some[0])
        torch.cuda.synchronize(device)

    def record(self, function: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # thread_local: other threads may keep using the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is raised
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


@dataclass
class _Candidate:
    """A key without a graph."""

    uses: int = 0
    failures: int = 0
    failed_at: int = 0  # number of lookups then


class CudaGraphCache(Generic[K, V]):
    """Captured graphs by key (a shape), and the rules of when to capture and what to evict.

    A key is worth a capture from its `min_uses`-th use on. At `capacity` the least recently used entry is
    evicted, or with `evicts=False` nothing more is captured. After a failed capture a key runs without a
    graph; it is tried again after `retry_after` lookups, `max_failures` times in all.
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        capacity: int,
        *,
        min_uses: int = 1,
        evicts: bool = True,
        max_failures: int = 1,
        retry_after: int = 0,
    ) -> None:
        self._name, self._recorder = name, recorder
        self._capacity, self._evicts, self._min_uses = capacity, evicts, min_uses
        self._max_failures, self._retry_after = max_failures, retry_after
        self._entries: OrderedDict[K, V] = OrderedDict()  # least recently used first
        self._candidates: OrderedDict[K, _Candidate] = OrderedDict()
        self._last_removed: V | None = None  # a step in flight may still run it
        self._lookups = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    @property
    def keys(self) -> tuple[K, ...]:
        return tuple(self._entries)

    def get(self, key: K) -> V | None:
        self._lookups += 1
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def is_due(self, key: K, *, now: bool = False) -> bool:
        """Count a use of a key without a graph; gives whether to capture it. `now`: from the first use on."""
        candidate = self._candidates.setdefault(key, _Candidate())
        self._candidates.move_to_end(key)
        while len(self._candidates) > MAX_CANDIDATES:
            self._candidates.popitem(last=False)
        if candidate.failures and not self._may_retry(candidate):
            return False
        candidate.uses += 1
        return (self._evicts or self.has_room()) and (now or candidate.uses >= self._min_uses)

    def _may_retry(self, candidate: _Candidate) -> bool:
        waited = self._lookups - candidate.failed_at >= self._retry_after
        return candidate.failures < self._max_failures and waited

    def has_room(self, spare: int = 0) -> bool:
        """Whether an entry can be added without eviction, and `spare` more after it."""
        return len(self._entries) + spare < self._capacity

    def has_failed(self, key: K) -> bool:
        return key in self._candidates and self._candidates[key].failures > 0

    def record(self, function: Replay) -> Replay:
        return self._recorder.record(function)

    def put(self, key: K, entry: V) -> None:
        while len(self._entries) >= self._capacity:
            _, self._last_removed = self._entries.popitem(last=False)
        self._candidates.pop(key, None)
        self._entries[key] = entry

    def fail(self, key: K, error: Exception) -> None:
        """A capture failed: its key runs without a graph."""
        if key in self._entries:
            self._last_removed = self._entries.pop(key)
        candidate = self._candidates.setdefault(key, _Candidate())
        candidate.failures, candidate.failed_at = candidate.failures + 1, self._lookups
        if candidate.failures == 1:
            reason = str(error).partition("\n")[0]
            log.warning("%s %s cannot be captured (%s); it runs slower", self._name, key, reason)

    def check(self) -> None:
        """Raise unless the bounds hold and no key both has a graph and is counted."""
        if len(self._entries) > self._capacity or len(self._candidates) > MAX_CANDIDATES + 1:
            raise RuntimeError(f"{len(self._entries)} graphs of {self._capacity} are captured")
        if self._entries.keys() & self._candidates.keys():
            raise RuntimeError("a captured key is still counted")
