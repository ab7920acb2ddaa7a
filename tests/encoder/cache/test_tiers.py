"""One tier: within its budget except for what is fixed, the least worth keeping out first."""

from math import log2

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.eviction import TRACES, work_saved
from saccade.encoder.cache.tiers import CacheTier

A, B, C = b"a", b"b", b"c"


def keys_of(tier: CacheTier[str]) -> set[bytes]:
    assert not tier.faults()
    return set(tier.keys)


def filled(
    budget: int, *keys: bytes, ttl: float | None = None, now: list[float] | None = None
) -> CacheTier[str]:
    moment = now if now is not None else [0.0]
    made: CacheTier[str] = CacheTier(budget, ttl, lambda: moment[0])
    for key in keys:
        made.put(key, key.decode(), 10)
    return made


def test_of_equal_priority_the_least_recently_used_is_evicted_first() -> None:
    tier = filled(20, A, B)
    tier.touch(A)
    tier.put(C, "c", 10)
    assert [key for key, _ in tier.evict()] == [B]
    assert keys_of(tier) == {A, C}


def test_a_view_used_again_outlives_a_newer_one() -> None:
    tier = filled(20, A)
    tier.use(A)
    tier.put(B, "b", 10)
    tier.put(C, "c", 10)
    assert [key for key, _ in tier.evict()] == [B]
    assert keys_of(tier) == {A, C}


def test_old_popularity_fades() -> None:
    tier = filled(20, A)
    for _ in range(6):
        tier.use(A)  # worth log2(8) = 3; a newcomer is worth 1 more than what was given up last
    survived = 0
    while A in keys_of(tier):
        tier.put(b"new %d" % survived, "x", 10)
        tier.evict()
        survived += 1
    assert 2 < survived < 8


def test_entries_unused_for_their_time_to_live_expire_unless_pinned() -> None:
    now = [0.0]
    tier = filled(100, A, B, C, ttl=10.0, now=now)
    tier.pin(B)
    now[0] = 6.0
    tier.touch(C)
    now[0] = 11.0
    assert [key for key, _ in tier.expire()] == [A]
    tier.unpin(B)  # its time begins when nobody needs it any more
    now[0] = 20.0
    assert [key for key, _ in tier.expire()] == [C]
    now[0] = 22.0
    assert [key for key, _ in tier.expire()] == [B]
    assert tier.stats.bytes == tier.stats.entries == 0
    assert tier.stats.evictions == 3


@pytest.mark.parametrize("trace", TRACES)
def test_reuse_counts_save_no_less_encoding_than_recency_alone(trace: str) -> None:
    """On skewed traffic clearly more; where the favourites keep changing nothing to speak of is lost."""
    by_worth, by_recency = work_saved(trace, "worth", 6000), work_saved(trace, "recency", 6000)
    assert by_worth > by_recency * (1.02 if "skewed" in trace else 0.98)


class TierAgainstModel(RuleBasedStateMachine):
    """The tier beside a plain table that is searched for the least worth."""

    keys = st.sampled_from([b"%d" % number for number in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.tier: CacheTier[bytes] = CacheTier(25)
        self.sizes: dict[bytes, int] = {}
        self.uses: dict[bytes, int] = {}
        self.worth: dict[bytes, tuple[float, int]] = {}
        self.fixed: dict[bytes, int] = {}
        self.age = 0.0
        self.moment = 0

    def touched(self, key: bytes) -> None:
        self.moment += 1
        self.worth[key] = self.age + log2(1 + self.uses[key]), self.moment

    @rule(key=keys, size=st.integers(0, 30))
    def put(self, key: bytes, size: int) -> None:
        self.tier.put(key, key, size)
        self.sizes[key] = size
        self.uses.setdefault(key, 1)
        self.touched(key)
        self.trim()

    def trim(self) -> None:
        gone = []
        while sum(self.sizes.values()) > 25 and (loose := self.sizes.keys() - self.fixed.keys()):
            key = min(loose, key=lambda key: self.worth[key])
            self.age = max(self.age, self.worth[key][0])
            del self.sizes[key], self.uses[key], self.worth[key]
            gone.append(key)
        assert [key for key, _ in self.tier.evict()] == gone

    @rule(key=keys)
    def fix(self, key: bytes) -> None:
        self.tier.pin(key)
        self.fixed[key] = self.fixed.get(key, 0) + 1

    @precondition(lambda self: self.fixed)
    @rule(data=st.data())
    def loosen(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.fixed)))
        self.tier.unpin(key)
        self.fixed[key] -= 1
        if not self.fixed[key]:
            del self.fixed[key]
            if key in self.sizes:
                self.touched(key)
            self.trim()

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), again=st.booleans())
    def use(self, data: st.DataObject, again: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.sizes)))
        if again:
            self.tier.use(key)
            self.uses[key] += 1
        else:
            self.tier.touch(key)
        self.touched(key)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sizes)))
        assert self.tier.pop(key).nbytes == self.sizes.pop(key)
        del self.uses[key], self.worth[key]

    @invariant()
    def agrees(self) -> None:
        assert not self.tier.faults()
        assert self.tier.pins == self.fixed
        assert set(self.tier.keys) == set(self.sizes)
        assert self.tier.stats.bytes == sum(self.sizes.values())


TestTierAgainstModel = TierAgainstModel.TestCase
TestTierAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
