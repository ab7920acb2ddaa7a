"""The feature store: what the vision tower made of each view, kept for whoever asks again.

takes   features by view key with their size in bytes; pins from the scheduler
gives   features, and whether they are there
owns    the byte budget and the order of eviction (least recently used first)
never   looks into the features, which may be tensors of any device; evicts what is pinned

A pin says "a running sequence needs this view until it is computed". The scheduler may pin a key whose
features are still to be put by the step it is planning. Pinned features are the working set and may
exceed the budget; what exceeds it goes as soon as it is unpinned.
"""

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class StoreStats(NamedTuple):
    hits: int  # pins of a view that was there, or already on its way
    misses: int  # pins of a view that had to be encoded
    bytes: int
    entries: int


class FeatureStore(Generic[T]):
    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes
        self._features: dict[bytes, tuple[T, int]] = {}
        self._pins: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # unpinned keys, least recently used first
        self._bytes = 0
        self._hits = 0
        self._misses = 0

    @property
    def stats(self) -> StoreStats:
        return StoreStats(self._hits, self._misses, self._bytes, len(self._features))

    @property
    def pins(self) -> dict[bytes, int]:
        """How often each key is pinned."""
        return dict(self._pins)

    def has(self, key: bytes) -> bool:
        return key in self._features

    def expects(self, key: bytes) -> bool:
        """Whether the features are there or, pinned by somebody, on their way."""
        return key in self._features or key in self._pins

    def pin(self, key: bytes) -> None:
        if self.expects(key):
            self._hits += 1
        else:
            self._misses += 1
        self._pins[key] = self._pins.get(key, 0) + 1
        self._idle.pop(key, None)

    def unpin(self, key: bytes) -> None:
        if key not in self._pins:
            raise RuntimeError(f"features {key.hex()[:12]} are not pinned")
        self._pins[key] -= 1
        if self._pins[key]:
            return
        del self._pins[key]
        if key in self._features:
            self._idle[key] = None
            self._trim()

    def put(self, key: bytes, features: T, nbytes: int) -> None:
        """Keep the features, in place of any older ones of the same view."""
        self._bytes += nbytes - self._features.get(key, (None, 0))[1]
        self._features[key] = (features, nbytes)
        if key not in self._pins:
            self._idle.pop(key, None)
            self._idle[key] = None
        self._trim()

    def get(self, key: bytes) -> T:
        """The features of a view that is pinned or known to be there."""
        if key in self._idle:
            del self._idle[key]
            self._idle[key] = None
        return self._features[key][0]

    def _trim(self) -> None:
        while self._bytes > self.budget and self._idle:
            key = next(iter(self._idle))
            del self._idle[key]
            self._bytes -= self._features.pop(key)[1]

    def check(self) -> None:
        """Raise unless bytes, pins, order and budget agree."""
        faults = []
        if self._bytes != sum(nbytes for _, nbytes in self._features.values()):
            faults.append("the bytes do not add up")
        if set(self._idle) != set(self._features) - set(self._pins):
            faults.append("the unpinned features and the order of eviction differ")
        if any(count < 1 for count in self._pins.values()):
            faults.append("a pin is counted less than once")
        if self._idle and self._bytes > self.budget:
            faults.append(f"{self._bytes} bytes are kept over a budget of {self.budget}")
        if faults:
            raise RuntimeError("feature store: " + "; ".join(faults))
