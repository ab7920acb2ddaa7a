"""Prefetches features from disk into host memory for queued requests."""

import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from saccade.encoder.cache.disk import DiskRead, DiskTier

READ_SECONDS = 0.25  # a read may take before the view is encoded instead
NO_PIXELS_SECONDS = 30.0  # the same where there are no pixels to encode
PREFETCH_BYTES = 1 << 30  # read, or being read, for requests that have not used it yet
PREFETCH_SECONDS = 10.0  # prefetched features stay pinned without being used


class _Read(NamedTuple):
    ticket: int
    since: float  # on the cache's clock
    created: float  # Unix seconds


class Prefetcher:
    def __init__(self, disk: DiskTier | None, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._clock = clock
        self._reads: dict[bytes, _Read] = {}  # under way
        self._unused: dict[bytes, tuple[float, int]] = {}  # key -> since when, bytes
        self._unused_bytes = 0
        self._tickets = count()
        self.reads = 0
        self.failed = 0

    @property
    def unused(self) -> frozenset[bytes]:
        """Views read or being read that no request has used yet."""
        return frozenset(self._unused)

    def start(self, key: bytes, *, must: bool) -> bool:
        """Start a read; gives whether it did. `must` ignores the limit on unused bytes."""
        size = self._disk.size(key) if self._disk is not None else None
        if self._disk is None or size is None or key in self._reads or key in self._unused:
            return False
        if not must and self._unused_bytes + size > PREFETCH_BYTES:
            return False
        ticket = next(self._tickets)
        if not self._disk.read(key, ticket):
            return False
        now = self._clock()
        self._reads[key] = _Read(ticket, now, time.time())
        self._unused[key] = now, size
        self._unused_bytes += size
        return True

    def is_worth_waiting(self, key: bytes, *, must: bool) -> bool:
        read = self._reads.get(key)
        limit = NO_PIXELS_SECONDS if must else READ_SECONDS
        return read is not None and self._clock() - read.since < limit

    def mark_used(self, key: bytes) -> bool:
        """Gives whether the view was prefetched and not used before."""
        since = self._unused.pop(key, None)
        self._unused_bytes -= since[1] if since else 0
        return since is not None

    def expired(self) -> list[bytes]:
        """Views prefetched long ago and never used."""
        oldest = self._clock() - PREFETCH_SECONDS
        return [key for key, (since, _) in self._unused.items() if since < oldest]

    def cancel(self, key: bytes) -> None:
        """Ignore the result of a read."""
        self._reads.pop(key, None)

    def completed(self) -> list[tuple[DiskRead, float]]:
        """Completed reads that are still wanted, failed ones included, and when each began (Unix seconds)."""
        wanted = []
        for one in self._disk.completed_reads() if self._disk is not None else ():
            self.reads += 1
            self.failed += one.host is None
            read = self._reads.get(one.key)
            if read is not None and read.ticket == one.ticket:
                del self._reads[one.key]
                wanted.append((one, read.created))
        return wanted

    @property
    def has_reads(self) -> bool:
        return bool(self._reads)

    def wait(self, seconds: float) -> None:
        """Wait until a read completes, at most `seconds`; return at once without one."""
        if self._reads and self._disk is not None:
            self._disk.wait(seconds)
