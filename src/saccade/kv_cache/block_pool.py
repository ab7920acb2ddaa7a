"""The pool of KV blocks: reference counts, free lists and the eviction order of cached blocks.

    used     referenced by at least one sequence
    cached   unreferenced, but the prefix cache can still hand it out; evicted when space is needed
    free     unreferenced, without useful content

A block may be written only by its single owner, and only while the prefix cache does not know it. The last
`vision` blocks can form a pool of their own for blocks that hold nothing but views
(`pool_sizing.VisionBlocks`); neither pool takes blocks of the other.
"""

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import NamedTuple

from saccade.step_plan import Role


class BlockCounts(NamedTuple):
    used: int
    cached: int
    free: int


class BlockPool:
    def __init__(self, count: int, vision: int = 0, roles: Set[Role] = frozenset()) -> None:
        if not 0 <= vision < max(count, 1):
            raise ValueError(f"{vision} of {count} blocks are for views; the text pool needs at least one")
        self.count = count
        self.vision = vision
        self.has_vision_pool = vision > 0
        self.roles = roles if vision else frozenset[Role]()  # of the views whose blocks the vision pool holds
        self.on_evict: Callable[[int], None] | None = None  # called with every evicted block
        self.shared_refs = 0  # references beyond the first, of all blocks together
        self._border = count - vision
        self._ref_counts = [0] * count
        self._in_prefix_cache: set[int] = set()
        self._free = (list(reversed(range(self._border))), list(reversed(range(self._border, count))))
        # In order of release: the first is evicted first. An OrderedDict finds its first key at once, where a
        # dict walks over all deleted ones.
        self._cached: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())

    def in_vision(self, block: int) -> bool:
        return block >= self._border

    def size(self, *, vision: bool) -> int:
        return self.vision if vision else self._border

    def counts(self, *, vision: bool) -> BlockCounts:
        free, cached = len(self._free[vision]), len(self._cached[vision])
        return BlockCounts(self.size(vision=vision) - cached - free, cached, free)

    @property
    def used(self) -> int:
        return self.count - self.cached - self.free

    @property
    def cached(self) -> int:
        return len(self._cached[0]) + len(self._cached[1])

    @property
    def free(self) -> int:
        return len(self._free[0]) + len(self._free[1])

    def num_available(self, *, vision: bool = False) -> int:
        """How many times `allocate` succeeds for that pool."""
        return len(self._free[vision]) + len(self._cached[vision])

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        """Whether the prefix cache knows it, used or not."""
        return block in self._in_prefix_cache

    def is_writable(self, block: int) -> bool:
        return self._ref_counts[block] == 1 and block not in self._in_prefix_cache

    def allocate(self, *, vision: bool = False) -> int:
        """A free block, otherwise the cached one released longest ago, with one reference."""
        free, cached = self._free[vision], self._cached[vision]
        if not free and not cached:
            size = self.size(vision=vision)
            raise RuntimeError(f"all {size} KV blocks are in use; ask `num_available` before allocating")
        if not free:
            self.evict(next(iter(cached)))
        block = free.pop()
        self._ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        cached = self._cached[self.in_vision(block)]
        if not self._ref_counts[block] and block not in cached:
            raise RuntimeError(f"block {block} is free; it has no content to share")
        cached.pop(block, None)
        self.shared_refs += self._ref_counts[block] > 0
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. Sequences release their last block first, so that the end of a hash chain is
        evicted before its beginning."""
        if not self._ref_counts[block]:
            raise RuntimeError(f"block {block} has no reference to release")
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            self.shared_refs -= 1
            return
        if block in self._in_prefix_cache:
            self._cached[self.in_vision(block)][block] = None
        else:
            self._free[self.in_vision(block)].append(block)

    def mark_cached(self, block: int) -> None:
        """The prefix cache knows the block: its content is final and it is never written again."""
        if not self._ref_counts[block]:
            raise RuntimeError(f"block {block} is not in use; only a used block can become cached")
        self._in_prefix_cache.add(block)

    def evict(self, block: int) -> None:
        """Free a cached block."""
        vision = self.in_vision(block)
        if block not in self._cached[vision]:
            raise RuntimeError(
                f"block {block} is not cached; only an unreferenced cached block can be evicted"
            )
        del self._cached[vision][block]
        self._in_prefix_cache.discard(block)
        self._free[vision].append(block)
        if self.on_evict is not None:
            self.on_evict(block)

    @property
    def eviction_order(self) -> tuple[int, ...]:
        """The cached blocks, in each pool the next to be evicted first."""
        return (*self._cached[0], *self._cached[1])

    def check(self) -> None:
        """Raise if any block is in no state, in two, or has a count that contradicts its state."""
        free, cached = {*self._free[0], *self._free[1]}, {*self._cached[0], *self._cached[1]}
        used = {block for block, refs in enumerate(self._ref_counts) if refs}
        faults = []
        if len(free) != self.free:
            faults.append("a block is free twice")
        if any(refs < 0 for refs in self._ref_counts):
            faults.append("a reference count is negative")
        if free & cached or free & used or cached & used:
            faults.append("a block is in two states")
        if free | cached | used != set(range(self.count)):
            faults.append("a block is in no state")
        if not cached <= self._in_prefix_cache or self._in_prefix_cache & free:
            faults.append("the prefix cache knows a free block, or does not know a cached one")
        for vision in (False, True):
            if any(self.in_vision(block) != vision for block in (*self._free[vision], *self._cached[vision])):
                faults.append("a block is in the other pool")
            if self.counts(vision=vision).used != sum(self.in_vision(block) == vision for block in used):
                faults.append("a count is wrong")
        if (self.used, self.cached, self.free) != (len(used), len(cached), len(free)):
            faults.append("a count is wrong")
        if self.shared_refs != sum(self._ref_counts) - len(used):
            faults.append("the shared references are miscounted")
        if faults:
            raise RuntimeError("block pool: " + "; ".join(faults))
