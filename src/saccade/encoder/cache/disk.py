"""The disk tier: a folder of features behind threads, so that nobody waits for a disk.

takes   features to write, keys to read, pictures to delete
gives   what has been read, when asked; what there is, as of the last look into the folder
owns    the writing and the reading threads, the queue of writes
never   blocks its caller: a write the queue has no room for is dropped, a read comes back later or never, a
        deletion counts at once and says later when the files are gone
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from saccade.encoder.cache.feature_files import Blank, Folder, Found
from saccade.encoder.cache.index import Catalogue
from saccade.encoder.cache.transfer_api import Slab

log = logging.getLogger(__name__)

QUEUED_BYTES = 256 << 20  # of features waiting to be written
REFRESH_SECONDS = 5.0  # after which what other servers did in the folder is noticed
READERS = 2


class _Job(Enum):
    DELETE = "delete"  # there is something in `_deletions`
    END = "end"


class _Deletion(NamedTuple):
    when: float  # Unix seconds
    then: tuple[Callable[[], None], ...]  # whom to tell


@dataclass(frozen=True)
class _Write:
    key: bytes
    content: bytes
    kept: Any
    nbytes: int
    made: float  # Unix seconds


class Landed(NamedTuple):
    """A read that is over; `kept` is None if it was in vain."""

    key: bytes
    content: bytes
    ticket: int
    kept: Any | None
    nbytes: int  # of the features


class Disk:
    def __init__(
        self,
        folder: Folder,
        slab: Callable[[Any], Slab],
        blank: Blank,
        refresh: float = REFRESH_SECONDS,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:
        self._folder = folder
        self._slab = slab
        self._blank = blank
        self._refresh = refresh
        self._most = queued_bytes
        listing = folder.make_room()
        self._lock = threading.Lock()  # of whoever changes any of these
        self._views = Catalogue(listing.views)
        self.nbytes = listing.nbytes  # of the whole folder
        self.deleted = listing.deleted  # pictures deleted by any server lately, and when (Unix seconds)
        self._pending: dict[bytes, _Write] = {}  # to be written, or just being written
        self._pending_bytes = 0
        self._deletions: dict[bytes, _Deletion] = {}  # by picture: files to be removed
        self._barred: dict[bytes, float] = {}  # deleted here while the look into the folder may be older
        self._writes: queue.SimpleQueue[_Write | _Job] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[bytes, bytes, int] | None] = queue.SimpleQueue()
        self._landed: queue.SimpleQueue[Landed] = queue.SimpleQueue()
        self._arrived = threading.Event()
        self._closed = False
        self.written = 0  # files
        self.dropped_writes = 0
        self.evictions = 0  # files that left between two looks, whoever removed them
        self._threads = [threading.Thread(target=self._write_all, name="features-write", daemon=True)]
        self._threads += [
            threading.Thread(target=self._read_all, name="features-read", daemon=True) for _ in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    # What there is

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

    # Moves

    def wants(self, key: bytes) -> bool:
        """Whether it is neither there nor on its way."""
        return key not in self._views and key not in self._pending

    def write(self, key: bytes, content: bytes, kept: Any, nbytes: int, made: float) -> bool:
        """Have it written some time; False if that is dropped, or not needed."""
        with self._lock:
            if key in self._pending or key in self._views:
                return False
            if self._closed or self._pending_bytes + nbytes > self._most:
                self.dropped_writes += 1
                return False
            self._pending[key] = write = _Write(key, content, kept, nbytes, made)
            self._pending_bytes += nbytes
        self._writes.put(write)
        return True

    def read(self, key: bytes, ticket: int) -> bool:
        """Begin reading; what comes of it is in `landed` later. False if there is no such file."""
        found = self._views.get(key)
        if found is None or self._closed:
            return False
        self._reads.put((key, found.content, ticket))
        return True

    def landed(self) -> list[Landed]:
        """Reads that are over since the last call."""
        self._arrived.clear()
        found = []
        while not self._landed.empty():
            found.append(self._landed.get())
        return found

    def wait(self, seconds: float) -> None:
        """Until a read is over, or the time is."""
        self._arrived.wait(seconds)

    def delete(self, content: bytes, then: Callable[[], None] | None = None) -> None:
        """Every view of the picture, in the folder and on its way there: nobody finds it from here on. `then`
        is called by a thread once the files are gone too."""
        with self._lock:
            for key in [key for key, write in self._pending.items() if write.content == content]:
                self._pending_bytes -= self._pending.pop(key).nbytes
            self._barred[content] = time.monotonic()
            for key in self._views.of(content):
                self._take(key)
            told = self._deletions[content].then if content in self._deletions else ()
            self._deletions[content] = _Deletion(time.time(), (*told, then) if then is not None else told)
        self._writes.put(_Job.DELETE)

    def close(self, seconds: float = 2.0) -> None:
        """Ends the threads, once they have written what was waiting or the time is over."""
        with self._lock:
            self._closed = True
        self._writes.put(_Job.END)
        for _ in range(READERS):
            self._reads.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    # In threads

    def _write_all(self) -> None:
        looked = time.monotonic()
        while True:
            try:
                job = self._writes.get(timeout=max(looked + self._refresh - time.monotonic(), 0.0))
            except queue.Empty:
                looked = time.monotonic()
                self._look()
                continue
            self._delete_all()  # before whatever waits to be written: somebody waits for it
            if job is _Job.END:
                return
            if isinstance(job, _Write):
                self._try_to_write(job)
            if time.monotonic() - looked > self._refresh:
                looked = time.monotonic()
                self._look()

    def _delete_all(self) -> None:
        """All pictures at once: what takes long is to read the folder."""
        with self._lock:
            deletions = dict(self._deletions)
        if not deletions:
            return
        try:
            self._folder.delete_all({content: one.when for content, one in deletions.items()})
        except Exception:
            log.exception("files of deleted pictures could not be removed")
        with self._lock:
            for content, one in deletions.items():
                if self._deletions[content] is one:  # else it was deleted once more meanwhile
                    del self._deletions[content]
        for then in [then for one in deletions.values() for then in one.then]:
            try:
                then()
            except Exception:
                log.exception("it could not be told that a picture is deleted")

    def _try_to_write(self, write: _Write) -> None:
        try:
            self._write(write)
        except Exception:
            log.exception("features could not be written")
            self._forget(write)

    def _write(self, write: _Write) -> None:
        with self._lock:
            if self._pending.get(write.key) is not write:
                return  # deleted meanwhile
        nbytes = self._folder.write(write.key, write.content, self._slab(write.kept), write.made)
        self._forget(write)
        if not nbytes:
            with self._lock:
                self.dropped_writes += 1
            return
        with self._lock:
            self.written += 1
            self.nbytes += nbytes
            if write.content not in self._barred:
                self._views.add(write.key, Found(write.content, nbytes))
            full = self.nbytes > self._folder.budget
        if full:
            self._look()

    def _forget(self, write: _Write) -> None:
        with self._lock:
            if self._pending.get(write.key) is write:
                del self._pending[write.key]
                self._pending_bytes -= write.nbytes

    def _look(self) -> None:
        began = time.monotonic()
        listing = self._folder.make_room()
        views = Catalogue(listing.views)  # takes its time: nobody waits for the lock meanwhile
        with self._lock:
            before = [*self._views]
        missing = [key for key in before if key not in views]
        with self._lock:
            stay = self._deletions  # their files are still there
            self._barred = {one: when for one, when in self._barred.items() if when >= began or one in stay}
            for key in [key for content in self._barred for key in views.of(content)]:
                views.take(key)
            self.evictions += sum(key in self._views for key in missing)
            self._views, self.nbytes, self.deleted = views, listing.nbytes, listing.deleted

    def _take(self, key: bytes) -> None:
        found = self._views.take(key)
        self.nbytes -= found.nbytes if found else 0

    def _read_all(self) -> None:
        while (job := self._reads.get()) is not None:
            key, content, ticket = job
            try:
                kept = self._folder.read(key, content, self._blank)
            except Exception:  # out of memory, say
                log.exception("features could not be read")
                kept = None
            if kept is None:
                with self._lock:
                    self._take(key)
            nbytes = len(self._slab(kept).data) if kept is not None else 0
            self._landed.put(Landed(key, content, ticket, kept, nbytes))
            self._arrived.set()
