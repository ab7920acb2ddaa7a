"""The feature store: within its budget except for what is in use, least recently used out first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from saccade.vision.store import FeatureStore

A, B, C = b"a", b"b", b"c"


def store(budget: int, *keys: bytes) -> FeatureStore[str]:
    made: FeatureStore[str] = FeatureStore(budget)
    for key in keys:
        made.put(key, key.decode(), 10)
    return made


def test_the_least_recently_used_goes_first() -> None:
    features = store(20, A, B)
    assert features.get(A) == "a"
    features.put(C, "c", 10)
    assert [features.has(key) for key in (A, B, C)] == [True, False, True]
    assert features.stats.bytes == 20


def test_what_is_pinned_stays_even_over_the_budget_and_goes_when_unpinned() -> None:
    features = store(10)
    for key in (A, B, C):
        features.pin(key)
        features.put(key, "x", 10)
    assert features.stats.bytes == 30
    features.unpin(A)
    assert not features.has(A)
    features.unpin(B)
    assert not features.has(B)
    features.unpin(C)
    assert features.has(C)
    features.check()


def test_pins_are_counted() -> None:
    features = store(0)
    features.pin(A)
    features.pin(A)
    features.put(A, "a", 10)
    features.unpin(A)
    assert features.get(A) == "a"
    features.unpin(A)
    assert not features.has(A)
    with pytest.raises(RuntimeError, match="not pinned"):
        features.unpin(A)


def test_a_budget_of_nothing_keeps_nothing_that_is_not_pinned() -> None:
    features = store(0, A)
    assert features.stats.bytes == features.stats.entries == 0


def test_a_view_larger_than_the_budget_passes_through() -> None:
    features = store(20, A)
    features.pin(B)
    features.put(B, "b", 50)
    assert features.get(B) == "b"
    features.unpin(B)
    assert not features.has(B)
    features.check()


def test_pinned_features_on_their_way_are_a_hit_for_the_next() -> None:
    features = store(100)
    features.pin(A)
    assert features.expects(A)
    assert not features.has(A)
    features.pin(A)
    features.put(A, "a", 10)
    features.pin(A)
    assert (features.stats.hits, features.stats.misses) == (2, 1)


def test_putting_again_replaces() -> None:
    features = store(100, A)
    features.put(A, "again", 30)
    assert features.get(A) == "again"
    assert (features.stats.bytes, features.stats.entries) == (30, 1)


class StoreAgainstModel(RuleBasedStateMachine):
    """The store beside a list in order of use."""

    keys = st.sampled_from([b"%d" % number for number in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.store: FeatureStore[bytes] = FeatureStore(25)
        self.sizes: dict[bytes, int] = {}
        self.order: list[bytes] = []  # unpinned, least recently used first
        self.pins: dict[bytes, int] = {}

    def trim(self) -> None:
        while sum(self.sizes.values()) > 25 and self.order:
            del self.sizes[self.order.pop(0)]

    def touch(self, key: bytes) -> None:
        self.order = [other for other in self.order if other != key]
        if key in self.sizes and key not in self.pins:
            self.order.append(key)

    @rule(key=keys, size=st.integers(0, 30))
    def put(self, key: bytes, size: int) -> None:
        self.store.put(key, key, size)
        self.sizes[key] = size
        self.touch(key)
        self.trim()

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        self.store.pin(key)
        self.pins[key] = self.pins.get(key, 0) + 1
        self.touch(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.store.unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            self.touch(key)
            self.trim()

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sizes)))
        assert self.store.get(key) == key
        self.touch(key)

    @invariant()
    def agrees(self) -> None:
        self.store.check()
        assert self.store.pins == self.pins
        assert self.store.stats.bytes == sum(self.sizes.values())
        for number in range(6):
            assert self.store.has(b"%d" % number) == (b"%d" % number in self.sizes)


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
