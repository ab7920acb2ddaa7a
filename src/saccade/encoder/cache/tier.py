"""One tier of the feature store: features in a budget of bytes, the least worth keeping out first.

takes   features by view key with their size in bytes; word of every use; which keys must stay
gives   what there is, and what has to leave for the rest to fit
owns    the order of eviction of this tier
never   looks into features; gives up what is fixed

What is worth keeping. An entry is worth `age + log2(1 + uses)`: the age grows to the worth of whatever was
given up last, so that old fame fades, and a view asked for often outlives one asked for once. Bytes are not
in it: what encoding a view again takes grows with its bytes, so that per byte all views cost the same.
`python -m bench.eviction` plays this rule and others on skewed traffic.

A fixed entry is part of the working set: it may exceed the budget. What exceeds it goes once it is loose.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from math import log2
from typing import Generic, TypeVar

from saccade.metrics import TierStats

T = TypeVar("T")


@dataclass(slots=True)
class Entry(Generic[T]):
    value: T
    nbytes: int
    uses: int
    used: float  # seconds on the tier's clock
    worth: float = 0.0
    place: int = 0  # among all uses of the tier: of two entries of equal worth the older use goes first


class Tier(Generic[T]):
    def __init__(
        self, budget: int, ttl: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget = budget  # bytes
        self._ttl = ttl  # seconds an entry may go unused; None: any
        self._clock = clock
        self._entries: dict[bytes, Entry[T]] = {}
        self._fixed: dict[bytes, int] = {}  # how many want the key to stay; it may still be on its way
        self._loose: OrderedDict[bytes, None] = OrderedDict()  # entries not fixed, least recently used first
        # (worth, place, key) of the loose ones, and of some that have changed since: those no longer agree
        # with the entry's own place.
        self._heap: list[tuple[float, int, bytes]] = []
        self._places = count()
        self._age = 0.0
        self._bytes = 0
        self.hits = 0
        self.evictions = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __getitem__(self, key: bytes) -> Entry[T]:
        return self._entries[key]

    @property
    def keys(self) -> Iterable[bytes]:
        return self._entries.keys()

    @property
    def stats(self) -> TierStats:
        return TierStats(self._bytes, len(self._entries), self.hits, self.evictions)

    @property
    def fixed(self) -> dict[bytes, int]:
        """How often each key is fixed."""
        return dict(self._fixed)

    def is_fixed(self, key: bytes) -> bool:
        return key in self._fixed

    def fix(self, key: bytes) -> None:
        self._fixed[key] = self._fixed.get(key, 0) + 1
        self._loose.pop(key, None)

    def loosen(self, key: bytes) -> None:
        if key not in self._fixed:
            raise RuntimeError(f"features {key.hex()[:12]} are not pinned")
        self._fixed[key] -= 1
        if not self._fixed[key]:
            del self._fixed[key]
            if key in self._entries:
                self.touch(key)

    def put(self, key: bytes, value: T, nbytes: int, uses: int = 1) -> None:
        """Keep the features, in place of any older ones of the same view."""
        old = self._entries.get(key)
        self._bytes += nbytes - (old.nbytes if old else 0)
        self._entries[key] = Entry(value, nbytes, max(uses, old.uses if old else 0), 0.0)
        self.touch(key)

    def use(self, key: bytes) -> None:
        """The features were asked for again."""
        self._entries[key].uses += 1
        self.touch(key)

    def touch(self, key: bytes) -> None:
        """As recent as can be: its worth as of now, and its place in the order of eviction unless fixed."""
        entry = self._entries[key]
        entry.used, entry.place = self._clock(), next(self._places)
        entry.worth = self._age + log2(1 + entry.uses)
        if key in self._fixed:
            return
        self._loose[key] = None
        self._loose.move_to_end(key)
        heapq.heappush(self._heap, (entry.worth, entry.place, key))
        if len(self._heap) > 64 + 4 * len(self._loose):
            current = ((key, self._entries[key]) for key in self._loose)
            self._heap = [(entry.worth, entry.place, key) for key, entry in current]
            heapq.heapify(self._heap)

    def take(self, key: bytes) -> Entry[T]:
        """Out of the tier, whatever holds it."""
        entry = self._entries.pop(key)
        self._loose.pop(key, None)
        self._bytes -= entry.nbytes
        return entry

    def overflow(self) -> list[tuple[bytes, Entry[T]]]:
        """Takes out what has to leave, the least worth first; what is fixed stays."""
        gone = []
        while self._bytes > self.budget and self._loose:
            worth, place, key = heapq.heappop(self._heap)
            if key in self._loose and self._entries[key].place == place:
                self._age = max(self._age, worth)
                gone.append((key, self.take(key)))
        self.evictions += len(gone)
        return gone

    def expired(self) -> list[tuple[bytes, Entry[T]]]:
        """Takes out what nobody has used for the time to live."""
        gone: list[tuple[bytes, Entry[T]]] = []
        if self._ttl is None:
            return gone
        oldest = self._clock() - self._ttl
        while self._loose and self._entries[key := next(iter(self._loose))].used < oldest:
            gone.append((key, self.take(key)))
        self.evictions += len(gone)
        return gone

    def faults(self) -> list[str]:
        """What contradicts what."""
        found = []
        if self._bytes != sum(entry.nbytes for entry in self._entries.values()):
            found.append("the bytes do not add up")
        if set(self._loose) != set(self._entries) - set(self._fixed):
            found.append("the unpinned features and the order of eviction differ")
        if any(times < 1 for times in self._fixed.values()):
            found.append("a pin is counted less than once")
        if self._loose and self._bytes > self.budget:
            found.append(f"{self._bytes} bytes are kept over a budget of {self.budget}")
        queued = {(place, key) for _, place, key in self._heap}
        if any((self._entries[key].place, key) not in queued for key in self._loose):
            found.append("an unpinned entry would never be given up")
        return found
