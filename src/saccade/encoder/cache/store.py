"""The feature store: what the vision tower made of each view, kept for whoever asks again.

takes   features by view key with their size in bytes; pins and holds from the scheduler
gives   features on the device, and whether they are or will be there
owns    the tiers (device, host memory, disk), who needs what in them, what is fetched ahead
never   looks into the features; drops what is pinned or held; waits: moves begin here and go on elsewhere

Down: what leaves the device goes to host memory, and what leaves that is forgotten. With a disk, whatever is
encoded is written there in the background, so that it outlives both, and the process. Up: a view found in
host memory is on its way to the device as soon as it is pinned; one found on disk is fetched into host memory
when a request that needs it is queued. A fetch that fails or is late is given up, and the view encoded.

A pin says "a running sequence needs this view on the device until it is computed". The scheduler may pin
a key whose features are still to be put by the step it is planning. A hold says "a request came without this
picture's pixels": its features stay in some tier until that request has ended. Both may exceed the budgets;
what exceeds them goes as soon as it is let go.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from saccade.encoder.cache.disk import Disk
from saccade.encoder.cache.prefetch import Fetches
from saccade.encoder.cache.tiers import Known, Tiers
from saccade.encoder.cache.transfer_api import Mover
from saccade.metrics import FeatureStats, TierStats

T = TypeVar("T")


class FeatureStore(Generic[T]):
    def __init__(
        self,
        budget: int,
        *,
        host: int = 0,
        disk: Disk | None = None,
        mover: Mover[T] | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bytes of device and host memory; `ttl` is how many seconds features may go unused."""
        self._tiers: Tiers[T] = Tiers(budget, host, disk, mover, ttl, clock)
        self._device = self._tiers.device  # fixed there: pinned
        self._host = self._tiers.host  # fixed there: held, or fetched ahead
        self._disk = disk
        self._fetches = Fetches(disk, clock)
        self._holds: Counter[bytes] = Counter()
        self._heeded: dict[bytes, float] = {}  # the deletions in the folder that have been followed here
        self._misses = self._disk_hits = 0
        self.dropped: Callable[[bytes], None] | None = None  # told of every picture that is deleted

    # What there is

    def has(self, key: bytes) -> bool:
        return key in self._device

    def ready(self, key: bytes) -> bool:
        """Whether a pin finds it now: on the device, in host memory or, pinned by somebody, on its way."""
        return key in self._device or self._device.is_fixed(key) or key in self._host

    def coming(self, key: bytes) -> bool:
        """Whether it is being fetched, and worth waiting for."""
        return self._fetches.worth_waiting(key, must=key in self._holds)

    def expects(self, key: bytes) -> bool:
        return self.ready(key) or self.coming(key)

    def keeps(self, key: bytes) -> bool:
        """Whether somebody who asks for it later would find it, in any tier."""
        return self._tiers.keeps(key)

    def weight(self, key: bytes) -> int:
        """Bytes of the features; 0 if they are nowhere."""
        known = self._tiers.known.get(key)
        on_disk = self._disk.size(key) if self._disk is not None else None
        return known.nbytes if known else on_disk or 0

    def find(self, content: bytes) -> dict[str, int]:
        """How many views of a picture each tier keeps."""
        views = self._tiers.views(content)
        return {
            "gpu": sum(key in self._device for key in views),
            "host": sum(key in self._host for key in views),
            "disk": len(self._disk.views(content)) if self._disk is not None else 0,
        }

    @property
    def pins(self) -> dict[bytes, int]:
        """How often each key is pinned."""
        return self._device.fixed

    @property
    def holds(self) -> dict[bytes, int]:
        return dict(self._holds)

    @property
    def stats(self) -> FeatureStats:
        disk = self._disk
        counts = (disk.nbytes, disk.entries, self._disk_hits, disk.evictions) if disk is not None else ()
        return FeatureStats(
            gpu=self._device.stats,
            host=self._host.stats,
            disk=TierStats(*counts),
            misses=self._misses,
            downs=self._tiers.downs,
            ups=self._tiers.ups,
            reads=self._fetches.reads,
            failed_reads=self._fetches.failed,
            writes=disk.written if disk is not None else 0,
            dropped_writes=disk.dropped_writes if disk is not None else 0,
        )

    # Needed

    def pin(self, key: bytes) -> None:
        ahead = self._fetches.used(key)
        if key in self._device or self._device.is_fixed(key):
            self._device.hits += 1
            if key in self._device:
                self._device.use(key)
        elif key in self._host:
            self._disk_hits += ahead
            self._host.hits += not ahead
            self._host.use(key)
            self._tiers.promote(key)
        else:
            self._misses += 1
        self._device.fix(key)
        if ahead:
            self._host.loosen(key)
        self._tiers.trim()

    def unpin(self, key: bytes) -> None:
        self._device.loosen(key)
        self._tiers.let_go(key)

    def hold(self, key: bytes) -> None:
        self._holds[key] += 1
        self._host.fix(key)

    def release(self, key: bytes) -> None:
        self._host.loosen(key)
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
        self._tiers.let_go(key)

    def fetch(self, key: bytes) -> None:
        """A request that needs the view is queued: have it in memory when its turn comes."""
        wanted = not self.ready(key) and key not in self._tiers.doomed
        if wanted and self._fetches.begin(key, must=key in self._holds):
            self._host.fix(key)

    def put(self, key: bytes, features: T, nbytes: int, content: bytes = b"") -> None:
        """Keep what was encoded, in place of any older features of the same view."""
        self._tiers.encoded(key, features, nbytes, content)

    def get(self, key: bytes) -> T:
        """The features of a view that is pinned or known to be on the device."""
        return self._tiers.on_device(key)

    # Unwanted

    def drop(self, content: bytes, then: Callable[[], None] | None = None) -> int:
        """Forget every view of a picture, in all tiers; gives how many there were. What is pinned or held
        goes when it is let go. `then` is called, perhaps by another thread, when its files are gone too."""
        views = set(self._tiers.views(content))
        if self._disk is not None:
            views.update(self._disk.views(content))
            self._disk.delete(content, then)
        elif then is not None:
            then()
        for key in views:
            self.forget(key)
        self._tell(content)
        return len(views)

    def forget(self, key: bytes) -> None:
        """One view: at once, or when it is let go; also one that is pinned and still to be put."""
        self._fetches.cancel(key)
        self._unfetch(key)
        self._tiers.forget(key)

    # As time goes by

    def poll(self) -> list[bytes]:
        """Take in what was fetched, give up what is outlived; gives pictures other servers have deleted."""
        for one, asked in self._fetches.landed():
            if one.kept is None:
                self._unfetch(one.key)
            else:
                self._tiers.fetched(one.key, one.kept, Known(one.content, one.nbytes, asked))
        for key in self._fetches.outlived():
            self._unfetch(key)
        self._tiers.expire()
        self._tiers.trim()
        return self._heed()

    @property
    def fetching(self) -> bool:
        return self._fetches.going_on

    def wait(self, seconds: float = 0.002) -> None:
        """For a moment, or until a fetch is over; not at all if there is none going on."""
        self._fetches.wait(seconds)

    def close(self) -> None:
        """What waits to be written to disk is; the rest is gone with the process."""
        if self._disk is not None:
            self._disk.close()

    def _unfetch(self, key: bytes) -> None:
        if self._fetches.used(key):
            self._host.loosen(key)

    def _heed(self) -> list[bytes]:
        """Follow deletions in the folder: what was made before them goes here too."""
        if self._disk is None or self._disk.deleted is self._heeded:
            return []
        before, self._heeded = self._heeded, self._disk.deleted
        news = {content: when for content, when in self._heeded.items() if before.get(content) != when}
        known = self._tiers.known
        for content, when in news.items():
            for key in known.of(content):
                if known[key].made <= when:
                    self.forget(key)
            self._tell(content)
        return list(news)

    def _tell(self, content: bytes) -> None:
        if self.dropped is not None:
            self.dropped(content)

    def check(self) -> None:
        """Raise unless tiers, pins, holds and what is known of them agree."""
        faults = self._tiers.faults()
        if self._host.fixed != dict(self._holds + Counter(self._fetches.ahead)):
            faults.append("what is fixed in host memory is neither held nor fetched ahead")
        if faults:
            raise RuntimeError("feature store: " + "; ".join(faults))
