"""The encoder cache: vision tower outputs by view key, in device memory, host memory and on disk.

Demotion: what is evicted from the device goes to host memory, and what is evicted from there is dropped. With
a disk, every encoded view is also written there in the background, so that it survives both, and the process.
Features never change: a copy in a lower tier stays valid while the view is on the device, and evicting such a
view costs nothing. Promotion: pinning a view found in host memory starts its copy to the device. A view found
on disk is read into host memory when a request that needs it is queued. If a read fails or is late, the view
is encoded instead.

A pin keeps a view on the device until a running sequence has computed it; a key may be pinned before its
features are put by the step being planned. A hold keeps a view in some tier because a request came without
the image's pixels. Both may exceed the budgets; the excess is evicted on release. No call waits: copies start
here and complete elsewhere.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from saccade.encoder.cache.disk import DiskTier, Prefetcher
from saccade.encoder.cache.tiers import CacheEntry, CacheTier, FeatureTransfer, PendingUpload, ViewIndex
from saccade.metrics import FeatureStats, TierStats

log = logging.getLogger(__name__)

T = TypeVar("T")


class CachedView(NamedTuple):
    """A view that a memory tier holds."""

    content: bytes  # hash of its image
    nbytes: int  # on the device
    created: float  # Unix seconds


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
        self._device: CacheTier[T | PendingUpload[T]] = CacheTier(budget, ttl, clock)
        self._host: CacheTier[Any] = CacheTier(host, ttl, clock)  # pinned there: held or prefetched views
        self._disk = disk
        self._transfer: FeatureTransfer[T] = transfer or FeatureTransfer()
        self._prefetcher = Prefetcher(disk, clock)
        self._views: ViewIndex[CachedView] = ViewIndex()  # in memory
        self._deleted: set[bytes] = set()  # pinned when they were deleted; they go when unpinned
        self._holds: Counter[bytes] = Counter()
        self._seen_deletions: dict[bytes, float] = {}  # deletions in the folder that were followed here
        self._misses = self._disk_hits = self._demotions = self._promotions = 0
        self.on_delete: Callable[[bytes], None] | None = None  # called with every deleted image
        self.needs_poll = disk is not None or ttl is not None

    def on_device(self, key: bytes) -> bool:
        return key in self._device

    def is_ready(self, key: bytes) -> bool:
        """Whether a pin is a hit: on the device, in host memory, or pinned and about to be encoded."""
        return key in self._device or self._device.is_pinned(key) or key in self._host

    def is_fetching(self, key: bytes) -> bool:
        """Whether it is being read from disk and worth waiting for."""
        if self._disk is None:
            return False
        return self._prefetcher.is_worth_waiting(key, must=key in self._holds)

    def is_expected(self, key: bytes) -> bool:
        return self.is_ready(key) or self.is_fetching(key)

    def contains(self, key: bytes) -> bool:
        """Whether any tier has it."""
        on_disk = self._disk is not None and self._disk.size(key) is not None
        return key not in self._deleted and (key in self._device or key in self._host or on_disk)

    def nbytes_of(self, key: bytes) -> int:
        """Bytes of the features; 0 on a miss."""
        view = self._views.get(key)
        on_disk = self._disk.size(key) if self._disk is not None else None
        return view.nbytes if view else on_disk or 0

    def count_by_tier(self, content: bytes) -> dict[str, int]:
        """How many views of an image each tier has."""
        views = self._views_of(content)
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
            downs=self._demotions,
            ups=self._promotions,
            reads=self._prefetcher.reads,
            failed_reads=self._prefetcher.failed,
            writes=disk.written if disk is not None else 0,
            dropped_writes=disk.dropped_writes if disk is not None else 0,
        )

    def pin(self, key: bytes) -> None:
        """Keep the view on the device; counts a hit or a miss."""
        prefetched = self._disk is not None and self._prefetcher.mark_used(key)
        if key in self._device or self._device.is_pinned(key):
            self._device.hits += 1
            if key in self._device:
                self._device.use(key)
        elif key in self._host:
            self._disk_hits += prefetched
            self._host.hits += not prefetched
            self._host.use(key)
            self._promote(key)
        else:
            self._misses += 1
        self._device.pin(key)
        if prefetched:
            self._host.unpin(key)
        self._evict()

    def unpin(self, key: bytes) -> None:
        self._device.unpin(key)
        self._after_unpin(key)

    def hold(self, key: bytes) -> None:
        self._holds[key] += 1
        self._host.pin(key)

    def release(self, key: bytes) -> None:
        self._host.unpin(key)
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
        self._after_unpin(key)

    def prefetch(self, key: bytes) -> None:
        """A request that needs the view is queued: read it from disk into host memory."""
        wanted = self._disk is not None and not self.is_ready(key) and key not in self._deleted
        if wanted and self._prefetcher.start(key, must=key in self._holds):
            self._host.pin(key)

    def put(self, key: bytes, features: T, nbytes: int, content: bytes = b"") -> None:
        """Add an encoded view, or replace its older features."""
        self._views[key] = CachedView(content, nbytes, time.time())
        self._device.put(key, features, nbytes)
        self._save(key, features)
        self._evict()

    def get(self, key: bytes) -> T:
        """The features of a view that is pinned or known to be on the device, which waits for their
        upload."""
        entry = self._device[key]
        features = entry.value = _wait(entry.value)
        self._device.touch(key)
        return features

    def delete_image(self, content: bytes, then: Callable[[], None] | None = None) -> int:
        """Delete every view of an image in all tiers; gives how many there were. Pinned and held views go on
        release. `then` is called, perhaps by another thread, when the files are gone too."""
        views = set(self._views_of(content))
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
        self._remove(key)

    def poll(self) -> list[bytes]:
        """Take in completed reads, expire old entries; gives images that other servers have deleted."""
        for read in self._prefetcher.completed():
            if read.host is None:
                self._drop_prefetched(read.key)
            elif read.key not in self._host:
                self._views.setdefault(read.key, CachedView(read.content, read.nbytes, read.created))
                self._host.put(read.key, read.host, self._transfer.host_bytes(read.nbytes))
        for key in self._prefetcher.expired():
            self._drop_prefetched(key)
        for key, entry in self._device.expire():
            self._demote(key, entry, keep=False)
        for key, _ in self._host.expire():
            self._forget_if_evicted(key)
        self._evict()
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
        for content, when in new.items():
            for key in self._views.of(content):
                if self._views[key].created <= when:
                    self.discard(key)
            self._notify(content)
        return list(new)

    def _notify(self, content: bytes) -> None:
        if self.on_delete is not None:
            self.on_delete(content)

    # Between the tiers

    def _is_pinned(self, key: bytes) -> bool:
        return self._device.is_pinned(key) or self._host.is_pinned(key)

    def _views_of(self, content: bytes) -> list[bytes]:
        """The views of an image that are in memory."""
        return [key for key in self._views.of(content) if key not in self._deleted]

    def _promote(self, key: bytes) -> None:
        """Start copying an entry of the host tier to the device."""
        entry = self._host[key]
        self._device.put(key, self._upload(entry.value), self._views[key].nbytes, entry.uses)
        self._promotions += 1

    def _upload(self, host: Any) -> T | PendingUpload[T]:
        """Planning a step must not fail. If the copy cannot start, for example for lack of memory, the step
        that needs the features tries again, and fails alone."""
        try:
            return self._transfer.to_device(host)
        except Exception:
            log.exception("features could not be copied to the device")
        return PendingUpload(lambda: _wait(self._transfer.to_device(host)))

    def _evict(self) -> None:
        """Bring every tier within its budget, except for pinned entries."""
        for key, entry in self._device.evict():
            self._demote(key, entry, keep=True)
        for key, host_entry in self._host.evict():
            self._write(key, host_entry.value)
            self._forget_if_evicted(key)

    def _remove(self, key: bytes) -> None:
        """Remove a view from memory, at once or when it is unpinned."""
        if self._is_pinned(key):
            self._deleted.add(key)
            return
        for tier in (self._device, self._host):
            if key in tier:
                tier.pop(key)
        self._views.pop(key, None)

    def _after_unpin(self, key: bytes) -> None:
        if key in self._deleted and not self._is_pinned(key):
            self._deleted.discard(key)
            self._remove(key)
        self._evict()

    def _demote(self, key: bytes, entry: CacheEntry[T | PendingUpload[T]], *, keep: bool) -> None:
        """An entry has left the device. It goes to the host tier if it is pinned there, or is to be kept and
        fits; otherwise to disk if it is to be kept."""
        nbytes = self._transfer.host_bytes(entry.nbytes)
        fits = keep and nbytes <= self._host.budget and key not in self._deleted
        if key not in self._host and (fits or self._host.is_pinned(key)):
            host = self._download(entry.value)
            if host is not None:
                self._host.put(key, host, nbytes, entry.uses)
                self._demotions += 1
        elif keep:
            self._save(key, entry.value)
        self._forget_if_evicted(key)

    def _download(self, features: T | PendingUpload[T]) -> Any | None:
        """None without memory for a copy: the features are lost."""
        try:
            return self._transfer.to_host(_wait(features))
        except Exception:
            log.exception("features could not be copied to host memory")
            return None

    def _save(self, key: bytes, features: T | PendingUpload[T]) -> None:
        """Write to disk, unless they are there."""
        if self._disk is not None and self._disk.wants(key):
            self._write(key, self._host[key].value if key in self._host else self._download(features))

    def _write(self, key: bytes, host: Any | None) -> None:
        if self._disk is not None and host is not None and key not in self._deleted:
            view = self._views[key]
            self._disk.write(key, view.content, host, view.nbytes, view.created)

    def _forget_if_evicted(self, key: bytes) -> None:
        if key not in self._device and key not in self._host:
            self._views.pop(key, None)

    def check(self) -> None:
        """Raise unless tiers, index, pins, holds and prefetches agree."""
        self._views.check()
        faults = [f"device: {fault}" for fault in self._device.faults()]
        faults += [f"host: {fault}" for fault in self._host.faults()]
        if {*self._views} != {*self._device.keys, *self._host.keys}:
            faults.append("the index and the tiers hold different views")
        if not all(self._is_pinned(key) for key in self._deleted):
            faults.append("a deleted view is kept though nothing pins it")
        if self._host.pins != dict(self._holds + Counter(self._prefetcher.unused)):
            faults.append("a view pinned in host memory is neither held nor prefetched")
        if faults:
            raise RuntimeError("encoder cache: " + "; ".join(faults))


def _wait(features: T | PendingUpload[T]) -> T:
    return features.wait() if isinstance(features, PendingUpload) else features
