"""The prefix cache: full blocks of computed KV, found again by what they were computed from.

takes   chains of block keys (one per sequence), and blocks that have become full
gives   the longest run of blocks that already holds a sequence's beginning, and the block that holds most of
        what comes next, to be copied
owns    which key names which block, and which blocks follow which
never   holds a block itself, but for pinned ones

A block's key is a hash of everything its KV depends on: the tenant's salt, every token before it (through
the key of the block before), its own tokens, and for each view that reaches into it the view's key and
where in the view the block begins. Two pictures of equal size fill equal placeholder ids; only the view's
key tells them apart.

Where the run of whole blocks ends, the first tokens of some block that follows may still agree: its KV of
those is a copy away (`partial`). That spares less than a block of tokens, but often a picture: the end of
one shares a block with the question behind it, and who must compute that end needs the picture's features.

Only full blocks are known. The last, half-filled block of an ended sequence could be kept the same way; it
would hold eight tokens of sixteen on average, of which the next turn computes some more anyway, and take the
place of a full block of somebody else. It is not worth its place.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.pinned_prefixes import PinnedPrefixes
from saccade.step_plan import Role, Span

MOST = 1 << 16  # pictures told apart; beyond, one deletion hides the KV of all pictures


class ImageVersions:
    def __init__(self) -> None:
        self._era = 0
        self._deleted: dict[bytes, int] = {}  # content -> how often

    def delete(self, content: bytes) -> None:
        self._deleted[content] = self._deleted.get(content, 0) + 1
        if len(self._deleted) > MOST:
            self._era += 1
            self._deleted.clear()

    def marks(self, spans: Sequence[Span]) -> dict[bytes, bytes]:
        """By content; pictures without one are of the first edition."""
        if not self._deleted and not self._era:
            return {}
        marks = {span.view.content: self._edition(span.view.content) for span in spans}
        return {content: edition for content, edition in marks.items() if edition}

    def _edition(self, content: bytes) -> bytes:
        times = self._deleted.get(content, 0)
        return f" edition {self._era}.{times}".encode() if times or self._era else b""


ID_BYTES = array("i").itemsize
_INVERTED = bytes(range(255, -1, -1))


def overlapping_spans(spans: Sequence[Span], start: int, stop: int) -> Sequence[Span]:
    """The spans with a token in start .. stop; spans are in order and disjoint."""
    first = bisect_right(spans, start, key=lambda span: span.stop)
    last = bisect_left(spans, stop, key=lambda span: span.start)
    return spans[first:last]


class HashChain:
    """The keys of one sequence's full blocks, first to last; grows with its known tokens, never rehashes
    those that stand."""

    def __init__(
        self,
        salt: bytes,
        spans: Sequence[Span],
        block_size: int,
        roles: Set[Role] = frozenset(),
        marks: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []  # of the same blocks, as `cells` writes them
        self._marks = marks  # editions of its pictures when it came, by content
        self.set_spans(spans)
        self._block_size = block_size
        self._roles = roles  # of views whose blocks are kept apart, and perhaps in another precision
        self._root = blake3(salt, derive_key_context="saccade prefix cache: root of a tenant").digest()

    def set_spans(self, spans: Sequence[Span]) -> None:
        """All views of the sequence, now that those behind its tokens so far are known too."""
        marks = self._marks
        self._spans: Sequence[Span] = spans
        if marks:
            self._spans = [replace(one, place=one.place + marks.get(one.view.content, b"")) for one in spans]

    def parent_key(self, index: int) -> bytes:
        """The key of the block before block `index`; the tenant's root before the first."""
        return self.keys[index - 1] if index else self._root

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of the blocks that `tokens`, all known tokens of the sequence, have filled."""
        size, first, stop = self._block_size, len(self.keys), len(tokens) // self._block_size
        if first == stop:
            return
        packed = array("i", tokens[first * size : stop * size]).tobytes()
        width = size * ID_BYTES
        contents = [packed[place : place + width] for place in range(0, len(packed), width)]
        self._name_views(contents, first)
        key = self.parent_key(first)
        for content in contents:
            key = blake3(content, key=key).digest()
            self.keys.append(key)
        self.contents += contents

    def _name_views(self, contents: list[bytes], first: int) -> None:
        """Mark the views in the packed ids of blocks from `first` on. Blocks with nothing but one view in
        them, nearly all of a picture's, differ in one number."""
        size, stop = self._block_size, first + len(contents)
        shared: dict[int, list[tuple[int, bytes]]] = {}
        for span in overlapping_spans(self._spans, first * size, stop * size):
            framed = self._framed(span)
            inner = range(max(-(-span.start // size), first), min(span.stop // size, stop))
            ids = opening = rest = b""
            for index in inner:
                if contents[index - first] != ids:
                    ids = contents[index - first]
                    opening, rest = ids[:ID_BYTES].translate(_INVERTED) + framed, ids[ID_BYTES:]
                offset = index * size - span.start
                contents[index - first] = opening + offset.to_bytes(8, "little") + rest
            for index in {span.start // size, (span.stop - 1) // size}.difference(inner):
                if first <= index < stop:
                    shared.setdefault(index, []).append(_mark(span, framed, index, size))
        for index, marks in shared.items():
            contents[index - first] = _marked(contents[index - first], marks)

    def _framed(self, span: Span) -> bytes:
        """What names a view."""
        name = span.key + span.place + (b"apart" if span.role in self._roles else b"")
        return len(name).to_bytes(8, "little") + name

    def encode_block(self, tokens: Sequence[int], index: int) -> tuple[bytes, Sequence[int]]:
        """What block `index` is computed from, token by token, and where in it each token ends.

        A token is its id. The first of a view in the block is marked (a negative number) and followed by the
        view's key and the place in the view; that says the same of those behind it. So two blocks agree in
        their first tokens exactly if they agree in the bytes of those.
        """
        start = index * self._block_size
        inside = tokens[start : start + self._block_size]
        views = overlapping_spans(self._spans, start, start + len(inside)) if inside else ()
        marks = [_mark(span, self._framed(span), index, self._block_size) for span in views]
        ends = list(range(ID_BYTES, ID_BYTES * len(inside) + 1, ID_BYTES))
        for place, name in marks:
            ends[place:] = [end + len(name) for end in ends[place:]]
        return _marked(array("i", inside).tobytes(), marks), ends


def _mark(span: Span, framed: bytes, index: int, size: int) -> tuple[int, bytes]:
    """The place in block `index` where a view begins or goes on, and what names that part of it."""
    place = max(span.start, index * size)
    return place - index * size, framed + (place - span.start).to_bytes(8, "little")


def _marked(content: bytes, marks: Sequence[tuple[int, bytes]]) -> bytes:
    """Packed ids, those at the marked places inverted (-1 - id) and followed by what the marks say."""
    parts, done = [], 0
    for place, name in marks:
        start = place * ID_BYTES
        parts += [content[done:start], content[start : start + ID_BYTES].translate(_INVERTED), name]
        done = start + ID_BYTES
    return b"".join((*parts, content[done:]))


class _Entry(NamedTuple):
    key: bytes
    parent: bytes
    root: bool  # nothing stands before it
    content: bytes


class PartialHit(NamedTuple):
    """A block whose first tokens are those looked for."""

    block: int
    tokens: int


def _agreement(content: bytes, ends: Sequence[int], other: bytes) -> int:
    """How many of the first tokens of `content`, which end at `ends`, are those of `other` too."""
    return bisect_left(ends, True, key=lambda end: not other.startswith(content[:end]))


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int, pins: PinnedPrefixes | None = None) -> None:
        self.pinned = pins if pins is not None else PinnedPrefixes((), 0)
        self._pool = pool
        self._block_size = block_size
        self.image_versions = ImageVersions()
        self.version = 0  # blocks registered or given up so far: while it stands still, so does what is found
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        # By the key of the block before: what follows it, in order of content. In this order the block with
        # the longest common beginning stands next to where the content looked for would stand.
        self._following: dict[bytes, list[tuple[bytes, int]]] = {}
        pool.on_evict = self._forget
        self.on_evict: Callable[[bytes, int], None] | None = None  # told of every key whose block is given up

    def new_chain(self, salt: bytes, spans: Sequence[Span]) -> HashChain:
        """The still empty chain of a sequence with these views."""
        if self.pinned.prefixes and not self.pinned.knows(salt):
            self.pinned.admit(
                salt, [key for prefix in self.pinned.prefixes for key in self._keys(salt, prefix)]
            )
        return HashChain(salt, spans, self._block_size, self._pool.roles, self.image_versions.marks(spans))

    def _keys(self, salt: bytes, text: Sequence[int]) -> list[bytes]:
        chain = HashChain(salt, (), self._block_size)
        chain.extend(text)
        return chain.keys

    def contains(self, key: bytes) -> bool:
        """Whether a block is registered under it."""
        return key in self._blocks

    def match(self, chain: HashChain) -> list[int]:
        """The blocks that hold the beginning of the chain, as many as there are. The caller shares them."""
        found: list[int] = []
        for key in chain.keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def match_partial(self, chain: HashChain, index: int, tokens: Sequence[int]) -> PartialHit | None:
        """The block that holds most first tokens of the chain's block `index`, which is not here itself.
        `tokens` are all known ones of the sequence. The caller shares the block and copies it."""
        following = self._following.get(chain.parent_key(index))
        if not following:
            return None
        content, ends = chain.encode_block(tokens, index)
        place = bisect_left(following, (content,))
        best = PartialHit(0, 0)
        for other, block in following[max(place - 1, 0) : place + 1]:
            agree = _agreement(content, ends, other)
            best = max(best, PartialHit(block, agree), key=lambda part: part.tokens)
        return best if best.tokens else None

    def insert(self, chain: HashChain, index: int, block: int) -> int:
        """Register `block` as the content of the chain's block `index`; gives the block registered for it.

        That is an older one if the same content was sealed before: the caller moves over to it. So whoever
        holds a sealed block also holds the sealed blocks before it, parents are released after their
        children, and a pool's order of giving up never cuts a chain in the middle.
        """
        key = chain.keys[index]
        known = self._blocks.get(key)
        if known is not None:
            return known
        self._pool.mark_cached(block)
        self.version += 1
        self._blocks[key] = block
        entry = _Entry(key, chain.parent_key(index), index == 0, chain.contents[index])
        self._entries[block] = entry
        insort(self._following.setdefault(entry.parent, []), (entry.content, block))
        if self.pinned.claims(key, block):
            self._pool.acquire(block)
        return block

    def _forget(self, block: int) -> None:
        for follower in reversed(self._behind(self._entries[block].key)):
            self._pool.evict(follower)
        self.version += 1
        entry = self._entries.pop(block)
        del self._blocks[entry.key]
        following = self._following[entry.parent]
        del following[bisect_left(following, (entry.content, block))]
        if not following:
            del self._following[entry.parent]
        if self.on_evict is not None:
            self.on_evict(entry.key, block)

    def _behind(self, key: bytes) -> list[int]:
        """The blocks that stand on a given one, each behind what it stands on. With one pool there are none
        left when it is given up; with two, one pool may give up what the other's blocks stand on."""
        found: list[int] = []
        parents = [key]
        while parents:
            following = [block for _, block in self._following.get(parents.pop(), ())]
            found += following
            parents += [self._entries[block].key for block in following]
        return found

    def check(self) -> None:
        """Raise unless keys and sealed blocks match one to one and no block outlives the one before it."""
        faults = []
        if {entry.key: block for block, entry in self._entries.items()} != self._blocks:
            faults.append("keys and blocks do not match one to one")
        followers = sorted((e.parent, e.content, block) for block, e in self._entries.items())
        listed = [(key, *one) for key, blocks in sorted(self._following.items()) for one in blocks]
        if followers != listed:
            faults.append("the blocks that follow each other are not listed in order")
        sealed = {block for block in range(self._pool.count) if self._pool.is_cached(block)}
        if sealed != set(self._entries):
            faults.append("sealed blocks and registered ones differ")
        order = {block: place for place, block in enumerate(self._pool.eviction_order)}
        for block, entry in self._entries.items():
            if entry.root:
                continue
            parent = self._blocks.get(entry.parent)
            if parent is None:
                faults.append(f"block {block} cannot be reached: the one before it was given up")
                continue
            if self._pool.ref_count(parent) < self._pool.ref_count(block):
                faults.append(f"block {block} has more holders than block {parent} before it")
            alike = self._pool.in_vision(parent) == self._pool.in_vision(block)
            if alike and parent in order and order[parent] < order.get(block, -1):
                faults.append(f"block {parent} would be given up before block {block} that follows it")
        if faults:
            raise RuntimeError("prefix cache: " + "; ".join(faults))
