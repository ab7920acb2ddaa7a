"""The feature store: what is needed stays, and what leaves one tier is found in the next."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from saccade.encoder.cache import disk as fetches
from saccade.encoder.cache.disk import DiskRead, DiskTier
from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.cache.tiers import FeatureTransfer

A, B, C = b"a", b"b", b"c"


def store(budget: int, *keys: bytes, host: int = 0) -> EncoderCache[str]:
    made: EncoderCache[str] = EncoderCache(budget, host=host)
    for key in keys:
        made.put(key, key.decode(), 10, content=b"of " + key)
    return made


class SlowDisk(DiskTier):
    """A disk in memory whose reads are over when the test says so."""

    def __init__(self, *, size: int = 10) -> None:
        self.files: dict[bytes, tuple[bytes, str]] = {}  # key -> content, features
        self.damaged: set[bytes] = set()
        self.reading: list[DiskRead] = []
        self._over: list[DiskRead] = []
        self._size = size
        self.nbytes = self.evictions = self.written = self.dropped_writes = 0
        self.deleted: dict[bytes, float] = {}

    @property
    def entries(self) -> int:
        return len(self.files)

    def size(self, key: bytes) -> int | None:
        return self._size if key in self.files else None

    def views(self, content: bytes) -> list[bytes]:
        return [key for key, (of, _) in self.files.items() if of == content]

    def wants(self, key: bytes) -> bool:
        return key not in self.files

    def write(self, key: bytes, content: bytes, kept: str, nbytes: int, made: float) -> bool:
        self.files[key] = content, kept
        return True

    def read(self, key: bytes) -> DiskRead | None:
        content, _ = self.files.get(key, (b"", None))
        self.reading.append(DiskRead(key, content, time.time()))
        return self.reading[-1]

    def finish(self, *keys: bytes) -> None:
        """Reads of these (or all) are over; of what is gone or damaged nothing comes."""
        for read in [one for one in self.reading if not keys or one.key in keys]:
            self.reading.remove(read)
            _, kept = self.files.get(read.key, (b"", None))
            if read.key in self.damaged:
                self.files.pop(read.key, None)
                kept = None
            read.host, read.nbytes = kept, self._size if kept else 0
            self._over.append(read)

    def completed_reads(self) -> list[DiskRead]:
        over, self._over = self._over, []
        return over

    def wait(self, seconds: float) -> None:
        pass

    def delete(self, content: bytes, then: Callable[[], None] | None = None) -> None:
        for key in self.views(content):
            del self.files[key]
        if then is not None:
            then()


def on_disk(
    *keys: bytes, budget: int = 100, host: int = 0
) -> tuple[EncoderCache[str], SlowDisk, list[float]]:
    """A store whose disk has the keys, and its clock."""
    disk, now = SlowDisk(), [0.0]
    disk.files = {key: (b"of " + key, key.decode()) for key in keys}
    return EncoderCache(budget, host=host, disk=disk, clock=lambda: now[0]), disk, now


def test_pinned_views_stay_over_the_budget_and_are_evicted_when_unpinned() -> None:
    features = store(10)
    for key in (A, B, C):
        features.pin(key)
        features.put(key, "x", 10)
    assert features.stats.gpu.bytes == 30
    features.unpin(A)
    assert not features.on_device(A)
    features.unpin(B)
    assert not features.on_device(B)
    features.unpin(C)
    assert features.on_device(C)
    features.check()


def test_pins_are_counted() -> None:
    features = store(0)
    features.pin(A)
    features.pin(A)
    features.put(A, "a", 10)
    features.unpin(A)
    assert features.get(A) == "a"
    features.unpin(A)
    assert not features.on_device(A)
    with pytest.raises(RuntimeError, match="not pinned"):
        features.unpin(A)


def test_a_budget_of_zero_keeps_only_pinned_views() -> None:
    features = store(0, A)
    assert features.stats.gpu.bytes == features.stats.gpu.entries == 0


def test_a_view_larger_than_the_budget_passes_through() -> None:
    features = store(20, A)
    features.pin(B)
    features.put(B, "b", 50)
    assert features.get(B) == "b"
    features.unpin(B)
    assert not features.on_device(B)
    features.check()


def test_pinned_features_still_to_be_encoded_are_a_hit() -> None:
    features = store(100)
    features.pin(A)
    assert features.is_expected(A)
    assert not features.on_device(A)
    features.pin(A)
    features.put(A, "a", 10)
    features.pin(A)
    assert (features.stats.hits, features.stats.misses) == (2, 1)


def test_putting_again_replaces() -> None:
    features = store(100, A)
    features.put(A, "again", 30)
    assert features.get(A) == "again"
    assert (features.stats.gpu.bytes, features.stats.gpu.entries) == (30, 1)


def test_views_evicted_from_the_device_are_found_in_host_memory() -> None:
    features = store(10, A, B, host=20)
    assert not features.on_device(A)
    assert features.is_ready(A)
    features.pin(A)
    assert features.get(A) == "a"
    features.unpin(A)
    stats = features.stats
    assert (stats.host.hits, stats.ups, stats.misses) == (1, 1, 0)
    features.check()


def test_a_view_with_a_host_copy_is_not_copied_again() -> None:
    features = store(10, A, B, host=20)
    for key in (A, B, A, B):
        features.pin(key)
        features.unpin(key)
    assert features.stats.downs == 2
    assert features.stats.ups == 4


def test_views_of_one_image_are_kept_side_by_side_and_deleted_together() -> None:
    features = store(100)
    for key in (A, B, C):
        features.put(key, "x", 10, content=b"p" if key != C else b"other")
    assert features.count_by_tier(b"p") == {"gpu": 2, "host": 0, "disk": 0}
    assert features.delete_image(b"p") == 2
    assert [features.contains(key) for key in (A, B, C)] == [False, False, True]
    features.check()


def test_a_deleted_view_in_use_stays_hidden_until_it_is_unpinned() -> None:
    features = store(100, A)
    features.pin(A)
    features.delete_image(b"of a")
    assert features.get(A) == "a"
    assert not features.contains(A)
    assert features.count_by_tier(b"of a") == {"gpu": 0, "host": 0, "disk": 0}
    features.unpin(A)
    assert not features.on_device(A)
    features.check()


def test_held_views_are_demoted_over_the_budget_and_evicted_when_released() -> None:
    features = store(10, A)
    features.hold(A)
    features.put(B, "b", 10)
    assert not features.on_device(A)
    assert features.is_ready(A)
    features.pin(A)
    assert features.get(A) == "a"
    features.unpin(A)
    features.release(A)
    features.check()
    assert features.stats.host.bytes == 0


def test_a_deleted_view_that_is_held_survives_demotion() -> None:
    features = store(10, A)
    features.hold(A)
    features.delete_image(b"of a")
    features.put(B, "b", 10)
    features.pin(A)
    assert features.get(A) == "a"
    features.unpin(A)
    features.release(A)
    assert not features.is_ready(A)
    features.check()


class FailingTransfer(FeatureTransfer[Any]):
    """Has memory for copies when the test says so."""

    def __init__(self) -> None:
        self.poor: set[str] = set()

    def to_host(self, features: Any) -> Any:
        self._need("to_host")
        return features

    def to_device(self, kept: Any) -> Any:
        self._need("to_device")
        return kept

    def _need(self, way: str) -> None:
        if way in self.poor:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("with_disk", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_without_memory_for_demotion_features_are_lost_and_nothing_fails(held: bool, with_disk: bool) -> None:
    transfer = FailingTransfer()
    disk = SlowDisk() if with_disk else None
    features: EncoderCache[str] = EncoderCache(10, host=100, transfer=transfer, disk=disk)
    transfer.poor = {"to_host"}
    features.put(A, "a", 10)
    if held:
        features.hold(A)
    features.put(B, "b", 10)
    features.check()
    assert not features.is_ready(A)
    assert disk is None or not disk.files
    if held:
        features.release(A)
    transfer.poor = set()
    features.put(C, "c", 10)
    assert features.is_ready(B)
    features.check()


def test_without_memory_for_promotion_only_the_reader_fails() -> None:
    transfer = FailingTransfer()
    features: EncoderCache[str] = EncoderCache(10, host=100, transfer=transfer)
    features.put(A, "a", 10)
    features.put(B, "b", 10)
    transfer.poor = {"to_device"}
    features.pin(A)  # while a step is planned
    features.check()
    with pytest.raises(RuntimeError, match="out of memory"):
        features.get(A)
    features.unpin(A)
    features.put(B, "b", 10)  # it is given up before it was ever there
    features.check()
    transfer.poor = set()
    features.pin(A)
    assert features.get(A) == "a"
    features.unpin(A)
    features.check()


def test_a_view_on_disk_is_prefetched_and_not_encoded() -> None:
    features, disk, _ = on_disk(A)
    assert not features.is_expected(A)
    features.prefetch(A)
    assert features.is_fetching(A)
    assert not features.is_ready(A)
    disk.finish()
    features.poll()
    features.check()
    assert features.is_ready(A)  # though host memory has no budget: it is kept for whoever asked
    features.pin(A)
    assert features.get(A) == "a"
    features.unpin(A)
    assert (features.stats.disk.hits, features.stats.misses, features.stats.failed_reads) == (1, 0, 0)
    features.check()


def test_a_failed_read_is_a_miss() -> None:
    features, disk, _ = on_disk(A)
    disk.damaged.add(A)
    features.prefetch(A)
    disk.finish()
    features.poll()
    assert not features.is_expected(A)
    assert features.stats.failed_reads == 1
    features.check()


def test_a_late_read_is_given_up_and_harmless() -> None:
    features, disk, now = on_disk(A)
    features.prefetch(A)
    now[0] = fetches.READ_SECONDS
    assert not features.is_expected(A)
    features.pin(A)
    features.put(A, "encoded", 10)
    disk.finish()
    features.poll()
    assert features.get(A) == "encoded"
    features.unpin(A)
    features.check()


def test_without_pixels_a_read_may_take_longer() -> None:
    features, _, now = on_disk(A)
    features.hold(A)
    features.prefetch(A)
    now[0] = fetches.READ_SECONDS
    assert features.is_fetching(A)
    now[0] = fetches.NO_PIXELS_SECONDS
    assert not features.is_fetching(A)


def test_prefetching_is_bounded() -> None:
    features, disk, now = on_disk(A, B)
    disk._size = fetches.PREFETCH_BYTES
    features.prefetch(A)
    features.prefetch(B)
    assert [read.key for read in disk.reading] == [A]
    disk.finish()
    features.poll()
    now[0] = fetches.PREFETCH_SECONDS + 1  # nobody came for it
    features.poll()
    features.check()
    assert features.stats.host.bytes == 0
    features.prefetch(B)
    assert [read.key for read in disk.reading] == [B]


def test_a_view_deleted_while_it_is_read_does_not_come_back() -> None:
    features, disk, _ = on_disk(A)
    features.prefetch(A)
    kept = disk.files[A]
    assert features.delete_image(b"of a") == 1
    disk.files[A] = kept  # the read was quicker than the deletion
    disk.finish()
    features.poll()
    assert not features.is_ready(A)
    features.check()


def test_a_deletion_by_another_server_is_followed_for_older_features() -> None:
    features, disk, _ = on_disk()
    features.put(A, "a", 10, content=b"p")
    disk.deleted = {b"p": 2e10}
    assert features.poll() == [b"p"]
    assert not features.is_ready(A)
    features.put(A, "a", 10, content=b"p")
    disk.deleted = {b"p": 2e10}
    assert features.poll() == []  # the same deletion once more
    assert features.is_ready(A)
    disk.deleted = {b"p": 2e10, b"q": 1.0}
    features.put(B, "b", 10, content=b"q")
    assert features.poll() == [b"q"]
    assert features.is_ready(B)  # made after that
    features.check()


def test_encoded_views_are_written_to_disk_unless_deleted_in_use() -> None:
    features, disk, _ = on_disk()
    features.put(A, "a", 10, content=b"p")
    assert set(disk.files) == {A}
    features.pin(B)
    features.put(B, "b", 10, content=b"q")
    features.delete_image(b"q")
    features.put(B, "b", 10, content=b"q")
    features.unpin(B)
    assert set(disk.files) == {A}
    features.check()


def test_unused_features_expire() -> None:
    now = [0.0]
    features: EncoderCache[str] = EncoderCache(100, host=100, ttl=5.0, clock=lambda: now[0])
    for key in (A, B, C):
        features.put(key, "x", 10)
    features.pin(B)
    features.hold(C)
    now[0] = 6.0
    features.poll()
    features.check()
    assert [features.is_ready(key) for key in (A, B, C)] == [False, True, True]


class StoreAgainstPromises(RuleBasedStateMachine):
    """Random use of all tiers: what a pin or hold promises is kept, features are always their view's own."""

    keys = st.sampled_from([b"%d" % number for number in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.disk = SlowDisk()
        self.store: EncoderCache[str] = EncoderCache(
            25, host=20, disk=self.disk, ttl=60.0, clock=lambda: self.now
        )
        self.pins: dict[bytes, int] = {}
        self.held: dict[bytes, int] = {}
        self.safe: set[bytes] = set()  # held since they were in memory

    @rule(key=keys, size=st.integers(1, 20))
    def encode(self, key: bytes, size: int) -> None:
        """As a step does it: pinned first, then put."""
        self.pin(key)
        if not self.store.on_device(key):
            self.store.put(key, f"features of {key!r}", size, content=key)

    def pin(self, key: bytes) -> None:
        self.store.pin(key)
        self.pins[key] = self.pins.get(key, 0) + 1

    @rule(key=keys)
    def pin_if_ready(self, key: bytes) -> None:
        if self.store.is_ready(key):
            self.pin(key)
            assert self.store.get(key) == f"features of {key!r}"

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.store.unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]

    @rule(key=keys)
    def hold(self, key: bytes) -> None:
        if self.store.contains(key):
            self.store.hold(key)
            self.held[key] = self.held.get(key, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.store.release(key)
        self.held[key] -= 1
        if not self.held[key]:
            del self.held[key]
            self.safe.discard(key)

    @rule(key=keys)
    def fetch(self, key: bytes) -> None:
        self.store.prefetch(key)

    @rule(key=keys, damaged=st.booleans())
    def land(self, key: bytes, damaged: bool) -> None:
        if damaged:
            self.disk.damaged.add(key)
        self.disk.finish(key)
        self.disk.damaged.discard(key)
        self.store.poll()

    @rule(key=keys)
    def lose_file(self, key: bytes) -> None:
        self.disk.files.pop(key, None)

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        self.store.delete_image(key)
        assert not self.store.contains(key)

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.store.poll()

    @invariant()
    def promises(self) -> None:
        self.store.check()
        assert self.store.pins == self.pins
        assert self.store.holds == self.held
        assert all(self.store.is_ready(key) for key in self.safe)
        self.safe.update(key for key in self.held if self.store.is_ready(key))
        for key in self.pins:
            assert self.store.get(key) == f"features of {key!r}"

    def teardown(self) -> None:
        """Everything let go and given time, everything is within its budget."""
        for key, times in [*self.pins.items()]:
            for _ in range(times):
                self.store.unpin(key)
        for key, times in [*self.held.items()]:
            for _ in range(times):
                self.store.release(key)
        self.now += 2 * fetches.PREFETCH_SECONDS
        self.disk.finish()
        self.store.poll()
        self.store.check()
        assert self.store.stats.gpu.bytes <= 25
        assert self.store.stats.host.bytes <= 20


TestStoreAgainstPromises = StoreAgainstPromises.TestCase
TestStoreAgainstPromises.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
