"""The pool of KV blocks: who holds each one, which ones may be written, which ones may be taken.

takes   requests for blocks; word from the prefix cache that a block's content is worth finding again
gives   block numbers, and the three gauges: used, kept, free
owns    the reference counts, the free list, the order in which kept blocks are given up
never   knows what a block contains

Every block is in exactly one state:

    used   held by at least one sequence
    kept   held by nobody, but sealed: the prefix cache can still hand it out; given up when space is needed
    free   held by nobody, content worthless

A block may be written only by its single holder, and only while it is not sealed.
"""

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    def __init__(self, count: int) -> None:
        self.count = count
        self.forget: Callable[[int], None] | None = None  # told of every sealed block that is given up
        self._holders = [0] * count
        self._sealed: set[int] = set()
        self._free = list(reversed(range(count)))
        # In order of release: the first is given up first. Finding the first of a plain dict takes a walk
        # over all that were deleted before it.
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        return self.count - len(self._kept) - len(self._free)

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """How many times `take` succeeds from here."""
        return len(self._free) + len(self._kept)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def sealed(self, block: int) -> bool:
        return block in self._sealed

    def writable(self, block: int) -> bool:
        return self._holders[block] == 1 and block not in self._sealed

    def take(self) -> int:
        """A block for the caller alone: a free one, else the kept one released longest ago."""
        if not self.available:
            raise RuntimeError(f"all {self.count} KV blocks are held; look at `available` before taking")
        if not self._free:
            self._give_up(next(iter(self._kept)))
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder, of a block that is used or kept."""
        if not self._holders[block] and block not in self._kept:
            raise RuntimeError(f"block {block} is free; there is nothing in it to share")
        self._kept.pop(block, None)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder fewer. Sequences release their last block first, so that of a chain of kept blocks
        the end is given up before what it stands on."""
        if not self._holders[block]:
            raise RuntimeError(f"block {block} is held by nobody; it cannot be released")
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._sealed:
            self._kept[block] = None
        else:
            self._free.append(block)

    def seal(self, block: int) -> None:
        """The block's content is final from here on: it may be found again, and never be written."""
        if not self._holders[block]:
            raise RuntimeError(f"block {block} is held by nobody; only a held block can be sealed")
        self._sealed.add(block)

    def _give_up(self, block: int) -> None:
        del self._kept[block]
        self._sealed.discard(block)
        self._free.append(block)
        if self.forget is not None:
            self.forget(block)

    @property
    def kept_order(self) -> tuple[int, ...]:
        """The kept blocks, next to be given up first."""
        return tuple(self._kept)

    def check(self) -> None:
        """Raise if any block is in no state, in two, or has a count that contradicts its state."""
        free, kept = set(self._free), set(self._kept)
        used = {block for block, holders in enumerate(self._holders) if holders}
        faults = []
        if len(free) != len(self._free):
            faults.append("a block is free twice")
        if any(holders < 0 for holders in self._holders):
            faults.append("a block has fewer than no holders")
        if free & kept or free & used or kept & used:
            faults.append("a block is in two states")
        if free | kept | used != set(range(self.count)):
            faults.append("a block is in no state")
        if not kept <= self._sealed or self._sealed & free:
            faults.append("kept blocks are sealed and free ones are not")
        if (self.used, self.kept, self.free) != (len(used), len(kept), len(free)):
            faults.append("a gauge is wrong")
        if faults:
            raise RuntimeError("block pool: " + "; ".join(faults))
