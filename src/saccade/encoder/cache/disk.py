"""The disk tier of the encoder cache: a folder of feature files behind threads.

No call blocks: a write that does not fit the queue is dropped, a read completes later or fails, a deletion
takes effect at once and reports later that the files are gone.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from saccade.encoder.cache.feature_files import AllocateHost, FeatureBytes, FeatureFile, FeatureFolder
from saccade.encoder.cache.tiers import ViewIndex

log = logging.getLogger(__name__)

QUEUED_BYTES = 256 << 20  # of features waiting to be written
REFRESH_SECONDS = 5.0  # between two listings, which show what other servers did in the folder
READERS = 2
READ_SECONDS = 0.25  # a read may take before the view is encoded instead
NO_PIXELS_SECONDS = 30.0  # the same where there are no pixels to encode
PREFETCH_BYTES = 1 << 30  # read, or being read, for requests that have not used it yet
PREFETCH_SECONDS = 10.0  # prefetched features stay pinned without being used


class _Job(Enum):
    DELETE = "delete"  # `_deletions` has entries
    END = "end"


class _Deletion(NamedTuple):
    when: float  # Unix seconds
    callbacks: tuple[Callable[[], None], ...]


@dataclass(frozen=True)
class _Write:
    key: bytes
    content: bytes
    host: Any
    nbytes: int
    created: float  # Unix seconds


@dataclass(eq=False)
class DiskRead:
    """A read. `host` stays None if it fails."""

    key: bytes
    content: bytes
    created: float  # Unix seconds
    host: Any | None = None
    nbytes: int = 0  # of the features


class DiskTier:
    def __init__(
        self,
        folder: FeatureFolder,
        to_bytes: Callable[[Any], FeatureBytes],
        allocate: AllocateHost,
        refresh: float = REFRESH_SECONDS,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:
        self._folder = folder
        self._to_bytes = to_bytes
        self._allocate = allocate
        self._refresh = refresh
        self._max_queued = queued_bytes
        listing = folder.make_room()
        self._lock = threading.Lock()  # guards changes of the state below
        self._views = ViewIndex(listing.views)
        self.nbytes = listing.nbytes  # of the whole folder
        self.deleted = listing.deleted  # images deleted by any server lately, and when (Unix seconds)
        self._pending: dict[bytes, _Write] = {}  # queued or being written
        self._pending_bytes = 0
        self._deletions: dict[bytes, _Deletion] = {}  # by image: files still to be removed
        self._hidden: dict[bytes, float] = {}  # images deleted here since the last listing began
        self._writes: queue.SimpleQueue[_Write | _Job] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[DiskRead | None] = queue.SimpleQueue()
        self._completed: queue.SimpleQueue[DiskRead] = queue.SimpleQueue()
        self._read_done = threading.Event()
        self._closed = False
        self.written = 0  # files
        self.dropped_writes = 0
        self.evictions = 0  # files that vanished between two listings, removed by any server
        self._threads = [threading.Thread(target=self._write_loop, name="features-write", daemon=True)]
        self._threads += [
            threading.Thread(target=self._read_loop, name="features-read", daemon=True)
            for _ in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def size(self, key: bytes) -> int | None:
        """Bytes of the view's file, None if there is none."""
        found = self._views.get(key)
        return found.nbytes if found else None

    def views(self, content: bytes) -> list[bytes]:
        with self._lock:
            return self._views.of(content)

    @property
    def entries(self) -> int:
        return len(self._views)

    def wants(self, key: bytes) -> bool:
        """Whether the view is neither on disk nor queued to be written."""
        return key not in self._views and key not in self._pending

    def write(self, key: bytes, content: bytes, host: Any, nbytes: int, created: float) -> bool:
        """Queue a write; False if it is dropped or not needed."""
        with self._lock:
            if key in self._pending or key in self._views:
                return False
            if self._closed or self._pending_bytes + nbytes > self._max_queued:
                self.dropped_writes += 1
                return False
            self._pending[key] = write = _Write(key, content, host, nbytes, created)
            self._pending_bytes += nbytes
        self._writes.put(write)
        return True

    def read(self, key: bytes) -> DiskRead | None:
        """Start a read, which `completed_reads` returns later. None if there is no such file."""
        found = self._views.get(key)
        if found is None or self._closed:
            return None
        read = DiskRead(key, found.content, time.time())
        self._reads.put(read)
        return read

    def completed_reads(self) -> list[DiskRead]:
        """Reads completed since the last call."""
        self._read_done.clear()
        found = []
        while not self._completed.empty():
            found.append(self._completed.get())
        return found

    def wait(self, seconds: float) -> None:
        """Wait until a read completes, at most `seconds`."""
        self._read_done.wait(seconds)

    def delete(self, content: bytes, then: Callable[[], None] | None = None) -> None:
        """Delete every view of an image, written or queued. They are hidden at once; a thread calls `then`
        when the files are gone."""
        with self._lock:
            for key in [key for key, write in self._pending.items() if write.content == content]:
                self._pending_bytes -= self._pending.pop(key).nbytes
            self._hidden[content] = time.monotonic()
            for key in self._views.of(content):
                self._remove(key)
            callbacks = self._deletions[content].callbacks if content in self._deletions else ()
            callbacks = (*callbacks, then) if then is not None else callbacks
            self._deletions[content] = _Deletion(time.time(), callbacks)
        self._writes.put(_Job.DELETE)

    def close(self, seconds: float = 2.0) -> None:
        """End the threads, after queued writes or `seconds`."""
        with self._lock:
            self._closed = True
        self._writes.put(_Job.END)
        for _ in range(READERS):
            self._reads.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    # Runs in threads

    def _write_loop(self) -> None:
        listed = time.monotonic()
        while True:
            try:
                job = self._writes.get(timeout=max(listed + self._refresh - time.monotonic(), 0.0))
            except queue.Empty:
                listed = time.monotonic()
                self._list_folder()
                continue
            self._delete_files()  # before any write: a client waits for it
            if job is _Job.END:
                return
            if isinstance(job, _Write):
                self._try_write(job)
            if time.monotonic() - listed > self._refresh:
                listed = time.monotonic()
                self._list_folder()

    def _delete_files(self) -> None:
        """Delete the files of all images at once: reading the folder takes longest."""
        with self._lock:
            deletions = dict(self._deletions)
        if not deletions:
            return
        try:
            self._folder.delete_all({content: one.when for content, one in deletions.items()})
        except Exception:
            log.exception("files of deleted images could not be removed")
        with self._lock:
            for content, one in deletions.items():
                if self._deletions[content] is one:  # otherwise it was deleted again meanwhile
                    del self._deletions[content]
        for callback in [callback for one in deletions.values() for callback in one.callbacks]:
            try:
                callback()
            except Exception:
                log.exception("the callback of a deletion failed")

    def _try_write(self, write: _Write) -> None:
        try:
            self._write(write)
        except Exception:
            log.exception("features could not be written")
            self._remove_pending(write)

    def _write(self, write: _Write) -> None:
        with self._lock:
            if self._pending.get(write.key) is not write:
                return  # deleted meanwhile
        nbytes = self._folder.write(write.key, write.content, self._to_bytes(write.host), write.created)
        self._remove_pending(write)
        if not nbytes:
            with self._lock:
                self.dropped_writes += 1
            return
        with self._lock:
            self.written += 1
            self.nbytes += nbytes
            if write.content not in self._hidden:
                self._views[write.key] = FeatureFile(write.content, nbytes)
            full = self.nbytes > self._folder.budget
        if full:
            self._list_folder()

    def _remove_pending(self, write: _Write) -> None:
        with self._lock:
            if self._pending.get(write.key) is write:
                del self._pending[write.key]
                self._pending_bytes -= write.nbytes

    def _list_folder(self) -> None:
        began = time.monotonic()
        listing = self._folder.make_room()
        views = ViewIndex(listing.views)  # built without the lock, because it takes long
        with self._lock:
            before = [*self._views]
        missing = [key for key in before if key not in views]
        with self._lock:
            files_left = self._deletions
            self._hidden = {
                one: when for one, when in self._hidden.items() if when >= began or one in files_left
            }
            for key in [key for content in self._hidden for key in views.of(content)]:
                views.pop(key)
            self.evictions += sum(key in self._views for key in missing)
            self._views, self.nbytes, self.deleted = views, listing.nbytes, listing.deleted

    def _remove(self, key: bytes) -> None:
        found = self._views.pop(key, None)
        self.nbytes -= found.nbytes if found else 0

    def _read_loop(self) -> None:
        while (read := self._reads.get()) is not None:
            try:
                read.host = self._folder.read(read.key, read.content, self._allocate)
            except Exception:  # out of memory, for example
                log.exception("features could not be read")
            if read.host is not None:
                read.nbytes = len(self._to_bytes(read.host).data)
            else:
                with self._lock:
                    self._remove(read.key)
            self._completed.put(read)
            self._read_done.set()


class Prefetcher:
    """Reads features from disk into host memory for queued requests."""

    def __init__(self, disk: DiskTier | None, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._clock = clock
        self._reads: dict[bytes, tuple[DiskRead, float]] = {}  # under way, and since when
        self._unused: dict[bytes, tuple[float, int]] = {}  # key -> since when, bytes
        self._unused_bytes = 0
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
        read = self._disk.read(key)
        if read is None:
            return False
        now = self._clock()
        self._reads[key] = read, now
        self._unused[key] = now, size
        self._unused_bytes += size
        return True

    def is_worth_waiting(self, key: bytes, *, must: bool) -> bool:
        limit = NO_PIXELS_SECONDS if must else READ_SECONDS
        return key in self._reads and self._clock() - self._reads[key][1] < limit

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

    def completed(self) -> list[DiskRead]:
        """Completed reads that are still wanted, failed ones included."""
        wanted = []
        for read in self._disk.completed_reads() if self._disk is not None else ():
            self.reads += 1
            self.failed += read.host is None
            current = self._reads.get(read.key)
            if current is not None and current[0] is read:
                del self._reads[read.key]
                wanted.append(read)
        return wanted

    @property
    def has_reads(self) -> bool:
        return bool(self._reads)

    def wait(self, seconds: float) -> None:
        """Wait until a read completes, at most `seconds`; return at once without one."""
        if self._reads and self._disk is not None:
            self._disk.wait(seconds)
