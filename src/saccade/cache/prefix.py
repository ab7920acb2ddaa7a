"""The prefix cache: full blocks of computed KV, found again by what they were computed from.

takes   chains of block keys (one per sequence), and blocks that have become full
gives   the longest run of blocks that already holds a sequence's beginning
owns    which key names which block
never   holds a block itself: it only knows those that sequences hold or the pool still keeps

A block's key is a hash of everything its KV depends on: the tenant's salt, every token before it (through
the key of the block before), its own tokens, and for each view that reaches into it the view's key and
where in the view the block begins. Two pictures of equal size fill equal placeholder ids; only the view's
key tells them apart.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from saccade.cache.blocks import BlockPool
from saccade.plan import Span


def overlapping(spans: Sequence[Span], start: int, stop: int) -> Sequence[Span]:
    """The spans with a token in start .. stop; spans are in order and disjoint."""
    first = bisect_right(spans, start, key=lambda span: span.stop)
    last = bisect_left(spans, stop, key=lambda span: span.start)
    return spans[first:last]


class Chain:
    """The keys of one sequence's full blocks, first to last; grows with its known tokens, never rehashes."""

    def __init__(self, salt: bytes, spans: Sequence[Span], block_size: int) -> None:
        self.keys: list[bytes] = []
        self._spans = spans
        self._block_size = block_size
        self._root = blake3(salt, derive_key_context="saccade prefix cache: root of a tenant").digest()

    def before(self, index: int) -> bytes:
        """The key of the block before block `index`; the tenant's root before the first."""
        return self.keys[index - 1] if index else self._root

    def grow(self, tokens: Sequence[int]) -> None:
        """Add the keys of the blocks that `tokens`, all known tokens of the sequence, have filled."""
        size = self._block_size
        for index in range(len(self.keys), len(tokens) // size):
            start = index * size
            content = bytearray(array("i", tokens[start : start + size]).tobytes())
            for span in overlapping(self._spans, start, start + size):
                # A negative offset: the view begins inside this block.
                content += len(span.key).to_bytes(8, "little") + span.key
                content += (start - span.start).to_bytes(8, "little", signed=True)
            self.keys.append(blake3(content, key=self.before(index)).digest())


class _Entry(NamedTuple):
    key: bytes
    parent: bytes
    root: bool  # nothing stands before it


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        pool.forget = self._forget

    def chain(self, salt: bytes, spans: Sequence[Span]) -> Chain:
        """The still empty chain of a sequence with these views."""
        return Chain(salt, spans, self._block_size)

    def match(self, chain: Chain) -> list[int]:
        """The blocks that hold the beginning of the chain, as many as there are. The caller shares them."""
        found: list[int] = []
        for key in chain.keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def seal(self, chain: Chain, index: int, block: int) -> int:
        """Register `block` as the content of the chain's block `index`; gives the block registered for it.

        That is an older one if the same content was sealed before: the caller moves over to it. So whoever
        holds a sealed block also holds the sealed blocks before it, parents are released after their
        children, and the pool's order of giving up never cuts a chain in the middle.
        """
        key = chain.keys[index]
        known = self._blocks.get(key)
        if known is not None:
            return known
        self._pool.seal(block)
        self._blocks[key] = block
        self._entries[block] = _Entry(key, chain.before(index), root=index == 0)
        return block

    def _forget(self, block: int) -> None:
        del self._blocks[self._entries.pop(block).key]

    def check(self) -> None:
        """Raise unless keys and sealed blocks match one to one and no block outlives the one before it."""
        faults = []
        if {entry.key: block for block, entry in self._entries.items()} != self._blocks:
            faults.append("keys and blocks do not match one to one")
        sealed = {block for block in range(self._pool.count) if self._pool.sealed(block)}
        if sealed != set(self._entries):
            faults.append("sealed blocks and registered ones differ")
        order = {block: place for place, block in enumerate(self._pool.kept_order)}
        for block, entry in self._entries.items():
            if entry.root:
                continue
            parent = self._blocks.get(entry.parent)
            if parent is None:
                faults.append(f"block {block} cannot be reached: the one before it was given up")
                continue
            if self._pool.holders(parent) < self._pool.holders(block):
                faults.append(f"block {block} has more holders than block {parent} before it")
            if parent in order and order[parent] < order.get(block, -1):
                faults.append(f"block {parent} would be given up before block {block} that follows it")
        if faults:
            raise RuntimeError("prefix cache: " + "; ".join(faults))
