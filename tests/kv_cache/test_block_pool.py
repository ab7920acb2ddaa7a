"""The block pool: every block in one state, none lost, none written by two."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from saccade.kv_cache.block_pool import BlockPool


def test_a_block_with_one_reference_is_writable_until_shared_or_cached() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert pool.is_writable(block)
    pool.acquire(block)
    assert not pool.is_writable(block)
    pool.release(block)
    assert pool.is_writable(block)
    pool.mark_cached(block)
    assert not pool.is_writable(block)


def test_released_blocks_are_free_or_stay_cached() -> None:
    pool = BlockPool(3)
    plain, sealed = pool.allocate(), pool.allocate()
    pool.mark_cached(sealed)
    pool.release(plain)
    pool.release(sealed)
    assert (pool.used, pool.cached, pool.free, pool.num_available()) == (0, 1, 2, 3)
    pool.acquire(sealed)
    assert (pool.used, pool.cached, pool.free) == (1, 0, 2)
    pool.check()


def test_cached_blocks_are_evicted_after_free_ones_longest_released_first() -> None:
    pool = BlockPool(3)
    forgotten: list[int] = []
    pool.on_evict = forgotten.append
    first, second, _ = blocks = [pool.allocate() for _ in range(3)]
    for block in blocks[:2]:
        pool.mark_cached(block)
    for block in blocks:
        pool.release(block)
    pool.acquire(first)
    pool.release(first)  # used again since: now second was released longest ago
    taken = [pool.allocate() for _ in range(3)]
    assert taken == [blocks[2], second, first]
    assert forgotten == [second, first]
    assert pool.is_writable(second), "a block given up is no longer sealed"


def test_misuse_is_an_error_and_not_a_leak() -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError, match="free"):
        pool.acquire(0)
    with pytest.raises(RuntimeError, match="no reference to release"):
        pool.release(0)
    with pytest.raises(RuntimeError, match="is not in use"):
        pool.mark_cached(0)
    pool.allocate()
    with pytest.raises(RuntimeError, match="all 1 KV blocks are in use"):
        pool.allocate()
    pool.check()


def test_a_full_pool_allocates_nothing_from_the_other() -> None:
    pool = BlockPool(3, vision=1)
    image = pool.allocate(vision=True)
    with pytest.raises(RuntimeError, match="all 1 KV blocks"):
        pool.allocate(vision=True)
    assert [pool.allocate(), pool.allocate()] == [0, 1]
    with pytest.raises(RuntimeError, match="all 2 KV blocks"):
        pool.allocate()
    pool.release(image)
    assert (pool.num_available(), pool.num_available(vision=True)) == (0, 1)
    with pytest.raises(ValueError, match="the text pool needs at least one"):
        BlockPool(3, vision=3)


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool beside the plainest description of it: how often each block is held, and which are sealed."""

    vision = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, self.vision)
        self.pool.on_evict = self.forget
        self.held: dict[int, int] = {}
        self.sealed: set[int] = set()

    def forget(self, block: int) -> None:
        assert block not in self.held, "a block was given up while it was held"
        self.sealed.remove(block)

    @rule(vision=st.booleans())
    def take(self, vision: bool) -> None:
        vision = vision and bool(self.vision)
        if not self.pool.num_available(vision=vision):
            with pytest.raises(RuntimeError, match="are in use"):
                self.pool.allocate(vision=vision)
            return
        block = self.pool.allocate(vision=vision)
        assert (block >= 6 - self.vision) == vision, "a block of the other pool was handed out"
        assert block not in self.held, "a block was handed out twice"
        assert self.pool.is_writable(block)
        self.held[block] = 1

    @precondition(lambda self: self.held or self.sealed)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.held, *self.sealed})))
        self.pool.acquire(block)
        self.held[block] = self.held.get(block, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(block)
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.mark_cached(block)
        self.sealed.add(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.used == len(self.held)
        assert self.pool.cached == len(self.sealed - set(self.held))
        for kind, mine in ((False, range(6 - self.vision)), (True, range(6 - self.vision, 6))):
            used, kept = (
                sum(block in mine for block in blocks) for blocks in (self.held, self.sealed - set(self.held))
            )
            assert self.pool.counts(vision=kind) == (used, kept, len(mine) - used - kept)
        for block in range(6):
            assert self.pool.ref_count(block) == self.held.get(block, 0)
            assert self.pool.is_writable(block) == (self.held.get(block) == 1 and block not in self.sealed)


class TwoPoolsAgainstModel(PoolAgainstModel):
    vision = 2


TestTwoPoolsAgainstModel = TwoPoolsAgainstModel.TestCase
TestTwoPoolsAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
