"""The pool of KV blocks: who holds each one, which ones may be written, which ones may be taken.

takes   requests for blocks; word from the prefix cache that a block's content is worth finding again
gives   block numbers, and the three gauges: used, kept, free
owns    the reference counts, the free lists, the order in which kept blocks are given up
never   knows what a block contains

Every block is in exactly one state:

    used   held by at least one sequence
    kept   held by nobody, but sealed: the prefix cache can still hand it out; given up when space is needed
    free   held by nobody, content worthless

A block may be written only by its single holder, and only while it is not sealed.

The last `vision` blocks can be a pool of their own, for blocks that hold nothing but views of certain roles
(kv_cache/vision_blocks.py): then neither kind ever takes the other's place.
"""

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import NamedTuple

from saccade.step_plan import Role


class BlockCounts(NamedTuple):
    used: int
    kept: int
    free: int


class BlockPool:
    def __init__(self, count: int, vision: int = 0, roles: Set[Role] = frozenset()) -> None:
        if not 0 <= vision < max(count, 1):
            raise ValueError(f"{vision} of {count} blocks are to be for views; others need some too")
        self.count = count
        self.vision = vision
        self.roles = roles if vision else frozenset[Role]()  # of the views that pool is for
        self.on_evict: Callable[[int], None] | None = None  # told of every sealed block that is given up
        self.shared_refs = 0  # holders beyond the first, of all blocks together
        self._border = count - vision
        self._holders = [0] * count
        self._sealed: set[int] = set()
        self._free = (list(reversed(range(self._border))), list(reversed(range(self._border, count))))
        # In order of release: the first is given up first. Finding the first of a plain dict takes a walk
        # over all that were deleted before it.
        self._kept: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())

    @property
    def has_vision_pool(self) -> bool:
        return self.vision > 0

    def in_vision(self, block: int) -> bool:
        return block >= self._border

    def size(self, *, vision: bool) -> int:
        return self.vision if vision else self._border

    def counts(self, *, vision: bool) -> BlockCounts:
        free, kept = len(self._free[vision]), len(self._kept[vision])
        return BlockCounts(self.size(vision=vision) - kept - free, kept, free)

    @property
    def used(self) -> int:
        return self.count - self.cached - self.free

    @property
    def cached(self) -> int:
        return len(self._kept[0]) + len(self._kept[1])

    @property
    def free(self) -> int:
        return len(self._free[0]) + len(self._free[1])

    @property
    def available(self) -> int:
        """Blocks that nobody holds, of both kinds together."""
        return self.cached + self.free

    def num_available(self, *, vision: bool = False) -> int:
        """How many times `allocate` of that kind succeeds from here."""
        return len(self._free[vision]) + len(self._kept[vision])

    def ref_count(self, block: int) -> int:
        return self._holders[block]

    def is_cached(self, block: int) -> bool:
        return block in self._sealed

    def is_writable(self, block: int) -> bool:
        return self._holders[block] == 1 and block not in self._sealed

    def allocate(self, *, vision: bool = False) -> int:
        """A block for the caller alone: a free one, else the kept one released longest ago."""
        free, kept = self._free[vision], self._kept[vision]
        if not free and not kept:
            size = self.size(vision=vision)
            raise RuntimeError(f"all {size} KV blocks are held; look at `num_available` before taking")
        if not free:
            self.evict(next(iter(kept)))
        block = free.pop()
        self._holders[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more holder, of a block that is used or kept."""
        kept = self._kept[self.in_vision(block)]
        if not self._holders[block] and block not in kept:
            raise RuntimeError(f"block {block} is free; there is nothing in it to share")
        kept.pop(block, None)
        self.shared_refs += self._holders[block] > 0
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder fewer. Sequences release their last block first, so that of a chain of kept blocks
        the end is given up before what it stands on."""
        if not self._holders[block]:
            raise RuntimeError(f"block {block} is held by nobody; it cannot be released")
        self._holders[block] -= 1
        if self._holders[block]:
            self.shared_refs -= 1
            return
        if block in self._sealed:
            self._kept[self.in_vision(block)][block] = None
        else:
            self._free[self.in_vision(block)].append(block)

    def mark_cached(self, block: int) -> None:
        """The block's content is final from here on: it may be found again, and never be written."""
        if not self._holders[block]:
            raise RuntimeError(f"block {block} is held by nobody; only a held block can be sealed")
        self._sealed.add(block)

    def evict(self, block: int) -> None:
        """A kept block's content is worth nothing any more: the block is free."""
        kind = self.in_vision(block)
        if block not in self._kept[kind]:
            raise RuntimeError(f"block {block} is not kept; only a kept block can be given up")
        del self._kept[kind][block]
        self._sealed.discard(block)
        self._free[kind].append(block)
        if self.on_evict is not None:
            self.on_evict(block)

    @property
    def eviction_order(self) -> tuple[int, ...]:
        """The kept blocks, of each kind the next to be given up first."""
        return (*self._kept[0], *self._kept[1])

    def check(self) -> None:
        """Raise if any block is in no state, in two, or has a count that contradicts its state."""
        free, kept = {*self._free[0], *self._free[1]}, {*self._kept[0], *self._kept[1]}
        used = {block for block, holders in enumerate(self._holders) if holders}
        faults = []
        if len(free) != self.free:
            faults.append("a block is free twice")
        if any(holders < 0 for holders in self._holders):
            faults.append("a block has fewer than no holders")
        if free & kept or free & used or kept & used:
            faults.append("a block is in two states")
        if free | kept | used != set(range(self.count)):
            faults.append("a block is in no state")
        if not kept <= self._sealed or self._sealed & free:
            faults.append("kept blocks are sealed and free ones are not")
        for kind in (False, True):
            if any(self.in_vision(block) != kind for block in (*self._free[kind], *self._kept[kind])):
                faults.append("a block is in the other kind's pool")
            mine = sum(self.in_vision(block) == kind for block in used)
            if self.counts(vision=kind).used != mine:
                faults.append("a gauge is wrong")
        if (self.used, self.cached, self.free) != (len(used), len(kept), len(free)):
            faults.append("a gauge is wrong")
        if self.shared_refs != sum(self._holders) - len(used):
            faults.append("the holders beyond the first are miscounted")
        if faults:
            raise RuntimeError("block pool: " + "; ".join(faults))
