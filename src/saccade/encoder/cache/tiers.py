"""The tiers together: where each view's features are, and their ways from one tier to the next.

takes   features that were encoded, or fetched from disk; keys somebody needs on the device
gives   them there; what is known of every view
owns    the device's tier, host memory's, and what is written to disk
never   drops what is fixed in a tier; knows for whom it is fixed

Features never change, so a copy in a lower tier stays good when a view is moved up again, and leaving the
device is free where such a copy exists.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from saccade.encoder.cache.disk import Disk
from saccade.encoder.cache.index import Catalogue
from saccade.encoder.cache.tier import Entry, Tier
from saccade.encoder.cache.transfer_api import Arriving, AsTheyAre, Mover

log = logging.getLogger(__name__)

T = TypeVar("T")


class Known(NamedTuple):
    """A view that a tier in memory has."""

    content: bytes  # of which picture
    nbytes: int  # on the device
    made: float  # Unix seconds


class Tiers(Generic[T]):
    def __init__(
        self,
        budget: int,
        host: int,
        disk: Disk | None,
        mover: Mover[T] | None,
        ttl: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.device: Tier[T | Arriving[T]] = Tier(budget, ttl, clock)
        self.host: Tier[Any] = Tier(host, ttl, clock)
        self.disk = disk
        self.known: Catalogue[Known] = Catalogue()
        self.doomed: set[bytes] = set()  # forgotten while fixed: to go when loose
        self.downs = self.ups = 0
        self._mover: Mover[T] = mover if mover is not None else AsTheyAre()

    def needed(self, key: bytes) -> bool:
        return self.device.is_fixed(key) or self.host.is_fixed(key)

    def keeps(self, key: bytes) -> bool:
        on_disk = self.disk is not None and self.disk.size(key) is not None
        return key not in self.doomed and (key in self.device or key in self.host or on_disk)

    def views(self, content: bytes) -> list[bytes]:
        """Those of a picture that memory has."""
        return [key for key in self.known.of(content) if key not in self.doomed]

    # In

    def encoded(self, key: bytes, features: T, nbytes: int, content: bytes) -> None:
        self.known.add(key, Known(content, nbytes, time.time()))
        self.device.put(key, features, nbytes)
        self._save(key, features)
        self.trim()

    def fetched(self, key: bytes, kept: Any, known: Known) -> None:
        if key not in self.host:
            if key not in self.known:
                self.known.add(key, known)
            self.host.put(key, kept, self._mover.weigh(known.nbytes))

    # Up

    def promote(self, key: bytes) -> None:
        """What host memory has is on its way to the device."""
        entry = self.host[key]
        self.device.put(key, self._up(entry.value), self.known[key].nbytes, entry.uses)
        self.ups += 1

    def _up(self, kept: Any) -> T | Arriving[T]:
        """If the copy cannot begin now, for want of memory say, it is tried again by the step that needs it,
        which alone fails then: this is called while steps are planned, where nothing may."""
        try:
            return self._mover.up(kept)
        except Exception:
            log.exception("features could not be copied to the device")
        return Arriving(lambda: _landed(self._mover.up(kept)))

    def on_device(self, key: bytes) -> T:
        """If they were on their way, the device waits for them, once."""
        entry = self.device[key]
        features = entry.value = _landed(entry.value)
        self.device.touch(key)
        return features

    # Down and out

    def trim(self) -> None:
        """Every tier within its budget, but for what is fixed."""
        for key, entry in self.device.overflow():
            self._leave_device(key, entry, keep=True)
        for key, entry in self.host.overflow():
            self._write(key, entry.value)
            self._tidy(key)

    def expire(self) -> None:
        for key, entry in self.device.expired():
            self._leave_device(key, entry, keep=False)
        for key, _ in self.host.expired():
            self._tidy(key)

    def forget(self, key: bytes) -> None:
        """Out of memory: at once, or when nobody needs it any more."""
        if self.needed(key):
            self.doomed.add(key)
            return
        for tier in (self.device, self.host):
            if key in tier:
                tier.take(key)
        self.known.take(key)

    def let_go(self, key: bytes) -> None:
        """It may be that nobody needs it any more."""
        if key in self.doomed and not self.needed(key):
            self.doomed.discard(key)
            self.forget(key)
        self.trim()

    def _leave_device(self, key: bytes, entry: Entry[T | Arriving[T]], *, keep: bool) -> None:
        """To host memory if it is wanted there: somebody needs it, or it is to be kept and fits."""
        weight = self._mover.weigh(entry.nbytes)
        fits = keep and weight <= self.host.budget and key not in self.doomed
        if key not in self.host and (fits or self.host.is_fixed(key)):
            kept = self._down(entry.value)
            if kept is not None:
                self.host.put(key, kept, weight, entry.uses)
                self.downs += 1
        elif keep:
            self._save(key, entry.value)
        self._tidy(key)

    def _down(self, features: T | Arriving[T]) -> Any | None:
        """None if there is no memory for a copy: then they are gone from here."""
        try:
            return self._mover.down(_landed(features))
        except Exception:
            log.exception("features could not be copied to host memory")
            return None

    def _save(self, key: bytes, features: T | Arriving[T]) -> None:
        """To disk, unless it is there."""
        if self.disk is not None and self.disk.wants(key):
            self._write(key, self.host[key].value if key in self.host else self._down(features))

    def _write(self, key: bytes, kept: Any | None) -> None:
        if self.disk is not None and kept is not None and key not in self.doomed:
            known = self.known[key]
            self.disk.write(key, known.content, kept, known.nbytes, known.made)

    def _tidy(self, key: bytes) -> None:
        if key not in self.device and key not in self.host:
            self.known.take(key)

    def faults(self) -> list[str]:
        """What contradicts what."""
        self.known.check()
        found = [f"device: {fault}" for fault in self.device.faults()]
        found += [f"host: {fault}" for fault in self.host.faults()]
        if {*self.known} != {*self.device.keys, *self.host.keys}:
            found.append("what is known and what is kept differ")
        if not all(self.needed(key) for key in self.doomed):
            found.append("forgotten features are kept though nobody needs them")
        return found


def _landed(features: T | Arriving[T]) -> T:
    return features.arrive() if isinstance(features, Arriving) else features
