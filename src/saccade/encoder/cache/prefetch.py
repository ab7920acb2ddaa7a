"""Features being read from disk ahead of their use.

takes   keys of views that queued requests need
gives   what has arrived; whether a view is worth waiting for
owns    which reads are going on, and how much has been read that nobody has come to use yet
never   waits longer than a fetch is worth: the view is encoded instead
"""

import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from saccade.encoder.cache.disk import Disk, Landed

LATE_SECONDS = 0.25  # a fetch may take before the view is encoded instead
LOST_SECONDS = 30.0  # the same where there are no pixels to encode
AHEAD_BYTES = 1 << 30  # fetched, or being fetched, for requests that have not come to use it
AHEAD_SECONDS = 10.0  # after which such features are kept no better than others


class _Reading(NamedTuple):
    ticket: int
    since: float  # on the store's clock
    asked: float  # Unix seconds


class Fetches:
    def __init__(self, disk: Disk | None, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._clock = clock
        self._reading: dict[bytes, _Reading] = {}
        self._ahead: dict[bytes, tuple[float, int]] = {}  # key -> since when, bytes
        self._ahead_bytes = 0
        self._tickets = count()
        self.reads = 0
        self.failed = 0

    @property
    def ahead(self) -> frozenset[bytes]:
        """Fetched or being fetched, and not used yet."""
        return frozenset(self._ahead)

    def begin(self, key: bytes, *, must: bool) -> bool:
        """Whether a fetch was begun; with `must` however much has been fetched ahead already."""
        size = self._disk.size(key) if self._disk is not None else None
        if self._disk is None or size is None or key in self._reading or key in self._ahead:
            return False
        if not must and self._ahead_bytes + size > AHEAD_BYTES:
            return False
        ticket = next(self._tickets)
        if not self._disk.read(key, ticket):
            return False
        now = self._clock()
        self._reading[key] = _Reading(ticket, now, time.time())
        self._ahead[key] = now, size
        self._ahead_bytes += size
        return True

    def worth_waiting(self, key: bytes, *, must: bool) -> bool:
        reading = self._reading.get(key)
        patience = LOST_SECONDS if must else LATE_SECONDS
        return reading is not None and self._clock() - reading.since < patience

    def used(self, key: bytes) -> bool:
        """Whether it had been fetched ahead; from here on it has not."""
        since = self._ahead.pop(key, None)
        self._ahead_bytes -= since[1] if since else 0
        return since is not None

    def outlived(self) -> list[bytes]:
        """What was fetched long ago and never used."""
        oldest = self._clock() - AHEAD_SECONDS
        return [key for key, (since, _) in self._ahead.items() if since < oldest]

    def cancel(self, key: bytes) -> None:
        """What comes of it is not wanted any more."""
        self._reading.pop(key, None)

    def landed(self) -> list[tuple[Landed, float]]:
        """Fetches that are over and still wanted, those in vain without features; and when each was begun
        (Unix seconds)."""
        wanted = []
        for one in self._disk.landed() if self._disk is not None else ():
            self.reads += 1
            self.failed += one.kept is None
            reading = self._reading.get(one.key)
            if reading is not None and reading.ticket == one.ticket:
                del self._reading[one.key]
                wanted.append((one, reading.asked))
        return wanted

    @property
    def going_on(self) -> bool:
        return bool(self._reading)

    def wait(self, seconds: float) -> None:
        """Until a fetch is over, or the time is; not at all if there is none going on."""
        if self._reading and self._disk is not None:
            self._disk.wait(seconds)
