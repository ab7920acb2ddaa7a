"""A memory tier of the encoder cache, and the interface of the copies between tiers. Torch-free."""

import heapq
import time
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from math import log2
from typing import Any, Generic, Protocol, TypeVar

from saccade.encoder.cache.feature_files import FeatureBytes
from saccade.metrics import TierStats

T = TypeVar("T")


class PendingUpload(Generic[T]):
    """Features being copied to the device. `wait` gives them; the device, not the host, waits for the
    copy."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self.wait = wait


class FeatureTransfer(Generic[T]):
    """Copies between device and host memory. No call waits for a copy, except `to_bytes`, which threads call.
    This base class copies nothing: simulations have only names as features."""

    def to_host(self, features: T) -> Any:
        return features

    def to_device(self, host: Any) -> T | PendingUpload[T]:
        found: T = host
        return found

    def host_bytes(self, nbytes: int) -> int:
        """Host memory taken by features of `nbytes` on the device."""
        return nbytes

    def to_bytes(self, host: Any) -> FeatureBytes:
        raise NotImplementedError("simulated features have no bytes")

    def allocate_host(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, memoryview]:
        """Host memory to read features into, and a view of its bytes."""
        raise NotImplementedError("simulated features have no bytes")


@dataclass(slots=True)
class CacheEntry(Generic[T]):
    value: T
    nbytes: int
    uses: int
    used: float  # seconds on the tier's clock
    priority: float = 0.0
    order: int = 0  # of its last use among all uses of the tier; breaks ties of priority


class CacheTier(Generic[T]):
    """Entries within a budget of bytes.

    Eviction takes the entry of lowest priority, `age + log2(1 + uses)`: the age rises to the priority of the
    last evicted entry, so that old popularity fades and a view used often outlives one used once. Size does
    not count: the cost of encoding a view again grows with its bytes, so all views cost the same per byte.
    `python -m bench.eviction` compares this rule with others on skewed traffic.

    Pinned entries may exceed the budget; the excess is evicted once they are unpinned.
    """

    def __init__(
        self, budget: int, ttl: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget = budget  # bytes
        self._ttl = ttl  # seconds an entry may stay unused; None: no limit
        self._clock = clock
        self._entries: dict[bytes, CacheEntry[T]] = {}
        self._pins: dict[bytes, int] = {}  # pin counts; a pinned key may still be without an entry
        self._unpinned: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        # (priority, order, key); items whose order differs from their entry's are stale
        self._heap: list[tuple[float, int, bytes]] = []
        self._orders = count()
        self._age = 0.0
        self._bytes = 0
        self.hits = 0
        self.evictions = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __getitem__(self, key: bytes) -> CacheEntry[T]:
        return self._entries[key]

    @property
    def keys(self) -> Iterable[bytes]:
        return self._entries.keys()

    @property
    def stats(self) -> TierStats:
        return TierStats(self._bytes, len(self._entries), self.hits, self.evictions)

    @property
    def pins(self) -> dict[bytes, int]:
        """How often each key is pinned."""
        return dict(self._pins)

    def is_pinned(self, key: bytes) -> bool:
        return key in self._pins

    def pin(self, key: bytes) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1
        self._unpinned.pop(key, None)

    def unpin(self, key: bytes) -> None:
        if key not in self._pins:
            raise RuntimeError(f"features {key.hex()[:12]} are not pinned")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            if key in self._entries:
                self.touch(key)

    def put(self, key: bytes, value: T, nbytes: int, uses: int = 1) -> None:
        """Add an entry, or replace the older one of the same view."""
        old = self._entries.get(key)
        self._bytes += nbytes - (old.nbytes if old else 0)
        self._entries[key] = CacheEntry(value, nbytes, max(uses, old.uses if old else 0), 0.0)
        self.touch(key)

    def use(self, key: bytes) -> None:
        """Count a use."""
        self._entries[key].uses += 1
        self.touch(key)

    def touch(self, key: bytes) -> None:
        """Make the entry the most recently used and renew its priority."""
        entry = self._entries[key]
        entry.used, entry.order = self._clock(), next(self._orders)
        entry.priority = self._age + log2(1 + entry.uses)
        if key in self._pins:
            return
        self._unpinned[key] = None
        self._unpinned.move_to_end(key)
        heapq.heappush(self._heap, (entry.priority, entry.order, key))
        if len(self._heap) > 64 + 4 * len(self._unpinned):
            current = ((key, self._entries[key]) for key in self._unpinned)
            self._heap = [(entry.priority, entry.order, key) for key, entry in current]
            heapq.heapify(self._heap)

    def pop(self, key: bytes) -> CacheEntry[T]:
        """Remove an entry, pinned or not."""
        entry = self._entries.pop(key)
        self._unpinned.pop(key, None)
        self._bytes -= entry.nbytes
        return entry

    def evict(self) -> list[tuple[bytes, CacheEntry[T]]]:
        """Remove unpinned entries until the rest fits the budget, lowest priority first."""
        evicted = []
        while self._bytes > self.budget and self._unpinned:
            priority, order, key = heapq.heappop(self._heap)
            if key in self._unpinned and self._entries[key].order == order:
                self._age = max(self._age, priority)
                evicted.append((key, self.pop(key)))
        self.evictions += len(evicted)
        return evicted

    def expire(self) -> list[tuple[bytes, CacheEntry[T]]]:
        """Remove unpinned entries unused for the time to live."""
        expired: list[tuple[bytes, CacheEntry[T]]] = []
        if self._ttl is None:
            return expired
        oldest = self._clock() - self._ttl
        while self._unpinned and self._entries[key := next(iter(self._unpinned))].used < oldest:
            expired.append((key, self.pop(key)))
        self.evictions += len(expired)
        return expired

    def faults(self) -> list[str]:
        """Contradictions in the tier's state."""
        found = []
        if self._bytes != sum(entry.nbytes for entry in self._entries.values()):
            found.append("the bytes do not add up")
        if set(self._unpinned) != set(self._entries) - set(self._pins):
            found.append("the unpinned entries and the eviction order differ")
        if any(times < 1 for times in self._pins.values()):
            found.append("a pin is counted less than once")
        if self._unpinned and self._bytes > self.budget:
            found.append(f"{self._bytes} bytes are kept over a budget of {self.budget}")
        queued = {(order, key) for _, order, key in self._heap}
        if any((self._entries[key].order, key) not in queued for key in self._unpinned):
            found.append("an unpinned entry would never be evicted")
        return found


class HasContent(Protocol):
    @property
    def content(self) -> bytes:
        """Hash of the image that a view shows."""


K = TypeVar("K", bound=HasContent)


class ViewIndex(UserDict[bytes, K]):
    """Views by key, and the keys of each image's views."""

    def __init__(self, views: Mapping[bytes, K] | None = None) -> None:
        self._by_content: dict[bytes, set[bytes]] = {}
        super().__init__(views)

    def of(self, content: bytes) -> list[bytes]:
        """The views of an image."""
        return list(self._by_content.get(content, ()))

    def __setitem__(self, key: bytes, view: K) -> None:
        self.pop(key, None)
        super().__setitem__(key, view)
        self._by_content.setdefault(view.content, set()).add(key)

    def __delitem__(self, key: bytes) -> None:
        content = self[key].content
        super().__delitem__(key)
        self._by_content[content].discard(key)
        if not self._by_content[content]:
            del self._by_content[content]

    def check(self) -> None:
        """Raise unless both directions hold the same views."""
        listed = {(content, key) for content, keys in self._by_content.items() for key in keys}
        if listed != {(view.content, key) for key, view in self.items()}:
            raise RuntimeError("the views of images and the images of views differ")
