"""The encoder cache: vision tower outputs by view key, in device memory, host memory and on disk.

Demotion: what is evicted from the device goes to host memory, and what is evicted from there is dropped. With
a disk, every encoded view is also written there in the background, so that it survives both, and the process.
Promotion: pinning a view found in host memory starts its copy to the device. A view found on disk is read
into host memory when a request that needs it is queued. If a read fails or is late, the view is encoded
instead.

A pin keeps a view on the device until a running sequence has computed it; a key may be pinned before its
features are put by the step being planned. A hold keeps a view in some tier because a request came without
the image's pixels. Both may exceed the budgets; the excess is evicted on release. No call waits: copies start
here and complete elsewhere.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from saccade.encoder.cache.disk import DiskTier
from saccade.encoder.cache.prefetch import Prefetcher
from saccade.encoder.cache.tiers import CachedView, CacheTier, CacheTiers, FeatureTransfer
from saccade.metrics import FeatureStats, TierStats

T = TypeVar("T")


class EncoderCache(Generic[T]):
    def __init__(
        self,
        budget: int,
        *,
        host: int = 0,
        disk: DiskTier | None = None,
        transfer: FeatureTransfer[T] | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget` and `host` are bytes of device and host memory; `ttl` the seconds a view may stay
        unused."""
        tiers = CacheTiers(CacheTier(budget, ttl, clock), CacheTier(host, ttl, clock), disk, transfer)
        self._tiers: CacheTiers[T] = tiers
        self._device = self._tiers.device
        self._host = self._tiers.host  # pinned there: held or prefetched views
        self._disk = disk
        self._prefetcher = Prefetcher(disk, clock)
        self._holds: Counter[bytes] = Counter()
        self._seen_deletions: dict[bytes, float] = {}  # deletions in the folder that were followed here
        self._misses = self._disk_hits = 0
        self.on_delete: Callable[[bytes], None] | None = None  # called with every deleted image

    def on_device(self, key: bytes) -> bool:
        return key in self._device

    def is_ready(self, key: bytes) -> bool:
        """Whether a pin is a hit: on the device, in host memory, or pinned and about to be encoded."""
        return key in self._device or self._device.is_pinned(key) or key in self._host

    def is_fetching(self, key: bytes) -> bool:
        """Whether it is being read from disk and worth waiting for."""
        return self._prefetcher.is_worth_waiting(key, must=key in self._holds)

    def is_expected(self, key: bytes) -> bool:
        return self.is_ready(key) or self.is_fetching(key)

    def contains(self, key: bytes) -> bool:
        """Whether any tier has it."""
        return self._tiers.contains(key)

    def nbytes_of(self, key: bytes) -> int:
        """Bytes of the features; 0 on a miss."""
        view = self._tiers.views.get(key)
        on_disk = self._disk.size(key) if self._disk is not None else None
        return view.nbytes if view else on_disk or 0

    def count_by_tier(self, content: bytes) -> dict[str, int]:
        """How many views of an image each tier has."""
        views = self._tiers.checkpoint_views(content)
        return {
            "gpu": sum(key in self._device for key in views),
            "host": sum(key in self._host for key in views),
            "disk": len(self._disk.views(content)) if self._disk is not None else 0,
        }

    @property
    def pins(self) -> dict[bytes, int]:
        """How often each key is pinned."""
        return self._device.pins

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
            downs=self._tiers.demotions,
            ups=self._tiers.promotions,
            reads=self._prefetcher.reads,
            failed_reads=self._prefetcher.failed,
            writes=disk.written if disk is not None else 0,
            dropped_writes=disk.dropped_writes if disk is not None else 0,
        )

    def pin(self, key: bytes) -> None:
        """Keep the view on the device; counts a hit or a miss."""
        prefetched = self._prefetcher.mark_used(key)
        if key in self._device or self._device.is_pinned(key):
            self._device.hits += 1
            if key in self._device:
                self._device.use(key)
        elif key in self._host:
            self._disk_hits += prefetched
            self._host.hits += not prefetched
            self._host.use(key)
            self._tiers.promote(key)
        else:
            self._misses += 1
        self._device.pin(key)
        if prefetched:
            self._host.unpin(key)
        self._tiers.evict()

    def unpin(self, key: bytes) -> None:
        self._device.unpin(key)
        self._tiers.after_unpin(key)

    def hold(self, key: bytes) -> None:
        self._holds[key] += 1
        self._host.pin(key)

    def release(self, key: bytes) -> None:
        self._host.unpin(key)
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
        self._tiers.after_unpin(key)

    def prefetch(self, key: bytes) -> None:
        """A request that needs the view is queued: read it from disk into host memory."""
        wanted = not self.is_ready(key) and key not in self._tiers.deleted
        if wanted and self._prefetcher.start(key, must=key in self._holds):
            self._host.pin(key)

    def put(self, key: bytes, features: T, nbytes: int, content: bytes = b"") -> None:
        """Add an encoded view, or replace its older features."""
        self._tiers.put_encoded(key, features, nbytes, content)

    def get(self, key: bytes) -> T:
        """The features of a view that is pinned or known to be on the device."""
        return self._tiers.get(key)

    def delete_image(self, content: bytes, then: Callable[[], None] | None = None) -> int:
        """Delete every view of an image in all tiers; gives how many there were. Pinned and held views go on
        release. `then` is called, perhaps by another thread, when the files are gone too."""
        views = set(self._tiers.checkpoint_views(content))
        if self._disk is not None:
            views.update(self._disk.views(content))
            self._disk.delete(content, then)
        elif then is not None:
            then()
        for key in views:
            self.discard(key)
        self._notify(content)
        return len(views)

    def discard(self, key: bytes) -> None:
        """Drop one view from memory, at once or on release; it may be pinned and not put yet."""
        self._prefetcher.cancel(key)
        self._drop_prefetched(key)
        self._tiers.delete(key)

    def poll(self) -> list[bytes]:
        """Take in completed reads, expire old entries; gives images that other servers have deleted."""
        for one, created in self._prefetcher.completed():
            if one.host is None:
                self._drop_prefetched(one.key)
            else:
                self._tiers.put_fetched(one.key, one.host, CachedView(one.content, one.nbytes, created))
        for key in self._prefetcher.expired():
            self._drop_prefetched(key)
        self._tiers.expire()
        self._tiers.evict()
        return self._follow_deletions()

    @property
    def has_pending_reads(self) -> bool:
        return self._prefetcher.has_reads

    def wait(self, seconds: float = 0.002) -> None:
        """Wait until a read completes, at most `seconds`; return at once without one."""
        self._prefetcher.wait(seconds)

    def close(self) -> None:
        """Finish queued writes to disk."""
        if self._disk is not None:
            self._disk.close()

    def _drop_prefetched(self, key: bytes) -> None:
        if self._prefetcher.mark_used(key):
            self._host.unpin(key)

    def _follow_deletions(self) -> list[bytes]:
        """Drop views created before their image was deleted in the folder, by any server."""
        if self._disk is None or self._disk.deleted is self._seen_deletions:
            return []
        before, self._seen_deletions = self._seen_deletions, self._disk.deleted
        new = {content: when for content, when in self._seen_deletions.items() if before.get(content) != when}
        views = self._tiers.views
        for content, when in new.items():
            for key in views.of(content):
                if views[key].created <= when:
                    self.discard(key)
            self._notify(content)
        return list(new)

    def _notify(self, content: bytes) -> None:
        if self.on_delete is not None:
            self.on_delete(content)

    def check(self) -> None:
        """Raise unless tiers, pins, holds and prefetches agree."""
        faults = self._tiers.faults()
        if self._host.pins != dict(self._holds + Counter(self._prefetcher.unused)):
            faults.append("a view pinned in host memory is neither held nor prefetched")
        if faults:
            raise RuntimeError("encoder cache: " + "; ".join(faults))
