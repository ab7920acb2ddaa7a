"""The prefix cache: full KV blocks, found again by a hash chain over everything their content depends on.

A block's key hashes the key of the block before it (the tenant's salt before the first), its token ids and,
for every view that reaches into it, the view's key and the offset in the view. Two images of equal size have
equal placeholder ids; only the view's key tells them apart.

Where the run of whole blocks ends, the first tokens of a cached block that follows may still agree
(`match_partial`): copying it saves less than a block of tokens, but often the features of an image, whose end
shares a block with the question behind it.

Only full blocks are cached: half-filled last blocks would evict full blocks of others.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from saccade.kv_cache.block_pool import BlockPool
from saccade.step_plan import Role, Span

MAX_VERSIONS = 1 << 16  # deleted images distinguished; beyond, one deletion hides the KV of all images
ID_BYTES = array("i").itemsize
_INVERTED = bytes(range(255, -1, -1))


class ImageVersions:
    """Counts deletions of images. The version is part of the keys, so KV computed before a deletion is never
    found again; its blocks are evicted in their turn."""

    def __init__(self) -> None:
        self._epoch = 0
        self._deletions: dict[bytes, int] = {}  # content -> how often

    def delete(self, content: bytes) -> None:
        self._deletions[content] = self._deletions.get(content, 0) + 1
        if len(self._deletions) > MAX_VERSIONS:
            self._epoch += 1
            self._deletions.clear()

    def of(self, spans: Sequence[Span]) -> dict[bytes, bytes]:
        """Versions of the spans' images by content; images never deleted have none."""
        if not self._deletions and not self._epoch:
            return {}
        times = {span.view.content: self._deletions.get(span.view.content, 0) for span in spans}
        return {
            content: f" edition {self._epoch}.{count}".encode()
            for content, count in times.items()
            if count or self._epoch
        }


def overlapping_spans(spans: Sequence[Span], start: int, stop: int) -> Sequence[Span]:
    """The spans with a token in start .. stop; spans are in order and disjoint."""
    first = bisect_right(spans, start, key=lambda span: span.stop)
    last = bisect_left(spans, stop, key=lambda span: span.start)
    return spans[first:last]


class HashChain:
    """The keys of a sequence's full blocks. It grows with the known tokens and never rehashes a block."""

    def __init__(
        self,
        salt: bytes,
        spans: Sequence[Span],
        block_size: int,
        roles: Set[Role] = frozenset(),
        versions: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []  # of the same blocks, as `encode_block` writes them
        self._versions = versions  # of its images when the sequence arrived, by content
        self.set_spans(spans)
        self._block_size = block_size
        self._roles = roles  # of views whose blocks are in the vision pool, perhaps in another precision
        self._root = blake3(salt, derive_key_context="saccade prefix cache: root of a tenant").digest()

    def set_spans(self, spans: Sequence[Span]) -> None:
        """All views of the sequence, including views after its tokens so far."""
        versions = self._versions
        self._spans: Sequence[Span] = spans
        if versions:
            self._spans = [
                replace(one, position_key=one.position_key + versions.get(one.view.content, b""))
                for one in spans
            ]

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
        self._mark_views(contents, first)
        key = self.parent_key(first)
        for content in contents:
            key = blake3(content, key=key).digest()
            self.keys.append(key)
        self.contents += contents

    def _mark_views(self, contents: list[bytes], first: int) -> None:
        """Mark the views in the packed ids of blocks from `first` on. Blocks inside one view, nearly all of
        an image's, differ only in the offset."""
        size, stop = self._block_size, first + len(contents)
        shared: dict[int, list[tuple[int, bytes]]] = {}
        for span in overlapping_spans(self._spans, first * size, stop * size):
            name = self._view_name(span)
            inner = range(max(-(-span.start // size), first), min(span.stop // size, stop))
            ids = opening = rest = b""
            for index in inner:
                if contents[index - first] != ids:
                    ids = contents[index - first]
                    opening, rest = ids[:ID_BYTES].translate(_INVERTED) + name, ids[ID_BYTES:]
                offset = index * size - span.start
                contents[index - first] = opening + offset.to_bytes(8, "little") + rest
            for index in {span.start // size, (span.stop - 1) // size}.difference(inner):
                if first <= index < stop:
                    shared.setdefault(index, []).append(_view_mark(span, name, index, size))
        for index, marks in shared.items():
            contents[index - first] = _insert_marks(contents[index - first], marks)

    def _view_name(self, span: Span) -> bytes:
        name = span.key + span.position_key + (b"apart" if span.role in self._roles else b"")
        return len(name).to_bytes(8, "little") + name

    def encode_block(self, tokens: Sequence[int], index: int) -> tuple[bytes, Sequence[int]]:
        """What block `index` is computed from, token by token, and where in it each token ends.

        A token is its id. The first token of a view in the block is marked (a negative number) and followed
        by the view's name and offset, which cover the tokens behind it. So two blocks agree in their first
        tokens exactly if they agree in the bytes of those.
        """
        start = index * self._block_size
        inside = tokens[start : start + self._block_size]
        views = overlapping_spans(self._spans, start, start + len(inside)) if inside else ()
        marks = [_view_mark(span, self._view_name(span), index, self._block_size) for span in views]
        ends = list(range(ID_BYTES, ID_BYTES * len(inside) + 1, ID_BYTES))
        for place, name in marks:
            ends[place:] = [end + len(name) for end in ends[place:]]
        return _insert_marks(array("i", inside).tobytes(), marks), ends


def _view_mark(span: Span, name: bytes, index: int, size: int) -> tuple[int, bytes]:
    """Where in block `index` a view begins or continues, and the name of that part of it."""
    place = max(span.start, index * size)
    return place - index * size, name + (place - span.start).to_bytes(8, "little")


def _insert_marks(content: bytes, marks: Sequence[tuple[int, bytes]]) -> bytes:
    """Packed ids; those at the marks are inverted (-1 - id) and followed by the mark."""
    parts, done = [], 0
    for place, name in marks:
        start = place * ID_BYTES
        parts += [content[done:start], content[start : start + ID_BYTES].translate(_INVERTED), name]
        done = start + ID_BYTES
    return b"".join((*parts, content[done:]))


class _CachedBlock(NamedTuple):
    key: bytes
    parent: bytes
    is_first: bool
    content: bytes


class PartialHit(NamedTuple):
    """A cached block whose first tokens are those wanted."""

    block: int
    tokens: int


def _common_tokens(content: bytes, ends: Sequence[int], other: bytes) -> int:
    """How many first tokens of `content`, which end at `ends`, are also those of `other`."""
    return bisect_left(ends, True, key=lambda end: not other.startswith(content[:end]))


class PinnedPrefixes:
    """KV blocks of the operator's system prompts, which are never evicted.

    Nothing is computed ahead: a tenant's first request computes its copy, since tenants share no blocks. All
    pins together leave room for a request of the longest context; further tenants have their prefixes cached
    like any others.
    """

    def __init__(self, prefixes: Sequence[Sequence[int]], capacity: int) -> None:
        self.prefixes = [tuple(prefix) for prefix in prefixes]
        self.capacity = capacity  # blocks of all tenants together
        self.refusals = 0  # sequences of tenants for whom there was no room
        self._tenants: set[bytes] = set()  # by salt
        self._blocks: dict[bytes, int | None] = {}  # key -> block, None until it is computed

    @property
    def blocks(self) -> list[int]:
        """The blocks pinned so far."""
        return [block for block in self._blocks.values() if block is not None]

    def knows(self, salt: bytes) -> bool:
        return salt in self._tenants

    def admit(self, salt: bytes, keys: Sequence[bytes]) -> None:
        """Reserve room for a tenant whose prefix blocks have these keys. A tenant without keys is not
        remembered, which bounds their number by `capacity`."""
        wanted = set(keys)
        if not wanted:
            return
        if len(self._blocks) + len(wanted) > self.capacity:
            self.refusals += 1
            return
        self._tenants.add(salt)
        self._blocks |= dict.fromkeys(wanted)

    def pin(self, key: bytes, block: int) -> bool:
        """Pin a block that has just been cached, if its key is one of a prefix; gives whether it is."""
        if key not in self._blocks or self._blocks[key] is not None:
            return False
        self._blocks[key] = block
        return True


class PrefixCache:
    """Cached blocks by key. It holds no references, except to pinned blocks."""

    def __init__(self, pool: BlockPool, block_size: int, pinned: PinnedPrefixes | None = None) -> None:
        self.pinned = pinned if pinned is not None else PinnedPrefixes((), 0)
        self._pool = pool
        self._block_size = block_size
        self.image_versions = ImageVersions()
        self.version = 0  # changes whenever a block is inserted or evicted
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _CachedBlock] = {}
        # Children by the key of their parent, in order of content: the child with the longest common
        # beginning is next to where the wanted content would be inserted.
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}
        pool.on_evict = self._remove
        self.on_evict: Callable[[bytes, int], None] | None = None  # called with evicted key and block

    def new_chain(self, salt: bytes, spans: Sequence[Span]) -> HashChain:
        """The empty chain of a sequence with these views."""
        if self.pinned.prefixes and not self.pinned.knows(salt):
            chains = [HashChain(salt, (), self._block_size) for _ in self.pinned.prefixes]
            for chain, prefix in zip(chains, self.pinned.prefixes, strict=True):
                chain.extend(prefix)
            self.pinned.admit(salt, [key for chain in chains for key in chain.keys])
        return HashChain(salt, spans, self._block_size, self._pool.roles, self.image_versions.of(spans))

    def contains(self, key: bytes) -> bool:
        return key in self._blocks

    def match(self, chain: HashChain) -> list[int]:
        """The cached blocks of the chain's beginning. The caller acquires them."""
        found: list[int] = []
        for key in chain.keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def match_partial(self, chain: HashChain, index: int, tokens: Sequence[int]) -> PartialHit | None:
        """The cached block with the most first tokens of the chain's block `index`, which is not cached
        itself. `tokens` are all known tokens of the sequence. The caller acquires the block and copies it."""
        children = self._children.get(chain.parent_key(index))
        if not children:
            return None
        content, ends = chain.encode_block(tokens, index)
        place = bisect_left(children, (content,))
        best = PartialHit(0, 0)
        for other, block in children[max(place - 1, 0) : place + 1]:
            hit = PartialHit(block, _common_tokens(content, ends, other))
            best = max(best, hit, key=lambda one: one.tokens)
        return best if best.tokens else None

    def insert(self, chain: HashChain, index: int, block: int) -> int:
        """Cache `block` as the chain's block `index`; gives the block cached under its key.

        That is an older one if the content was cached before: the caller switches to it. So a sequence that
        references a cached block references its cached parents too, parents are released after their
        children, and eviction never cuts a chain in the middle.
        """
        key = chain.keys[index]
        known = self._blocks.get(key)
        if known is not None:
            return known
        self._pool.mark_cached(block)
        self.version += 1
        self._blocks[key] = block
        entry = _CachedBlock(key, chain.parent_key(index), index == 0, chain.contents[index])
        self._entries[block] = entry
        insort(self._children.setdefault(entry.parent, []), (entry.content, block))
        if self.pinned.prefixes and self.pinned.pin(key, block):
            self._pool.acquire(block)
        return block

    def _remove(self, block: int) -> None:
        for descendant in reversed(self._descendants(self._entries[block].key)):
            self._pool.evict(descendant)
        self.version += 1
        entry = self._entries.pop(block)
        del self._blocks[entry.key]
        children = self._children[entry.parent]
        del children[bisect_left(children, (entry.content, block))]
        if not children:
            del self._children[entry.parent]
        if self.on_evict is not None:
            self.on_evict(entry.key, block)

    def _descendants(self, key: bytes) -> list[int]:
        """The cached blocks behind a key, parents first. With one pool an evicted block has none; with two,
        one pool may evict a parent of the other's blocks."""
        found: list[int] = []
        parents = [key]
        while parents:
            children = [block for _, block in self._children.get(parents.pop(), ())]
            found += children
            parents += [self._entries[block].key for block in children]
        return found

    def check(self) -> None:
        """Raise unless keys and cached blocks match one to one and no block outlives its parent."""
        faults = []
        if {entry.key: block for block, entry in self._entries.items()} != self._blocks:
            faults.append("keys and blocks do not match one to one")
        children = sorted((e.parent, e.content, block) for block, e in self._entries.items())
        listed = [(key, *one) for key, blocks in sorted(self._children.items()) for one in blocks]
        if children != listed:
            faults.append("the children of blocks are not listed in order")
        if {block for block in range(self._pool.count) if self._pool.is_cached(block)} != set(self._entries):
            faults.append("the pool and the prefix cache know different blocks")
        order = {block: place for place, block in enumerate(self._pool.eviction_order)}
        for block, entry in self._entries.items():
            if entry.is_first:
                continue
            parent = self._blocks.get(entry.parent)
            if parent is None:
                faults.append(f"block {block} cannot be reached: its parent was evicted")
                continue
            if self._pool.ref_count(parent) < self._pool.ref_count(block):
                faults.append(f"block {block} has more references than its parent {parent}")
            same_pool = self._pool.in_vision(parent) == self._pool.in_vision(block)
            if same_pool and parent in order and order[parent] < order.get(block, -1):
                faults.append(f"block {parent} would be evicted before its child {block}")
        if faults:
            raise RuntimeError("prefix cache: " + "; ".join(faults))


def match_groups(caches: Sequence[PrefixCache], chain: HashChain) -> list[list[int]]:
    """The cached blocks of a chain's beginning in each group: as many as the group with the fewest has."""
    found = [cache.match(chain) for cache in caches]
    shared = min(map(len, found))
    return [blocks[:shared] for blocks in found]
