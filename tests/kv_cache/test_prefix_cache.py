"""The prefix cache: what is found was computed from exactly the same things."""

import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.prefix_cache import HashChain, PrefixCache, overlapping_spans
from saccade.request import View
from saccade.step_plan import Span

TEXT = list(range(10, 22))


def span(start: int, name: int, tokens: int = 4) -> Span:
    view = View(name.to_bytes(16, "little"), (0, 0, 8, 8), (2, 2 * tokens), 2, b"test")
    return Span(start, view, view.key)


def keys(tokens: list[int], *spans: Span, salt: bytes = b"", size: int = 4) -> list[bytes]:
    chain = HashChain(salt, spans, size)
    chain.extend(tokens)
    return chain.keys


def common(one: list[bytes], other: list[bytes]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def filled(cache: PrefixCache, pool: BlockPool, tokens: list[int], *spans: Span) -> list[int]:
    """Seal a sequence's blocks and release them, as a sequence that ends does."""
    chain = cache.new_chain(b"", spans)
    chain.extend(tokens)
    blocks = []
    for index in range(len(chain.keys)):
        own = pool.allocate()
        block = cache.insert(chain, index, own)
        if block != own:
            pool.acquire(block)
            pool.release(own)
        blocks.append(block)
        cache.check()
    for block in reversed(blocks):
        pool.release(block)
    cache.check()
    return blocks


def found(cache: PrefixCache, tokens: list[int], *spans: Span, salt: bytes = b"") -> list[int]:
    chain = cache.new_chain(salt, spans)
    chain.extend(tokens)
    return cache.match(chain)


def next_part(cache: PrefixCache, tokens: list[int], *spans: Span, salt: bytes = b"") -> tuple[int, int]:
    """The block that holds most of what follows the whole blocks found, and how much; nothing is (0, 0)."""
    chain = cache.new_chain(salt, spans)
    chain.extend(tokens)
    part = cache.match_partial(chain, len(cache.match(chain)), tokens)
    return (part.block, part.tokens) if part else (0, 0)


# Keys


def test_views_added_later_have_the_image_version_of_their_sequences_arrival() -> None:
    cache = PrefixCache(BlockPool(8), 4)
    views = span(0, 1, 2), span(6, 1, 3)
    before = cache.new_chain(b"", views)
    cache.image_versions.delete(views[0].view.content)
    whole, slow = cache.new_chain(b"", views), cache.new_chain(b"", views[:1])
    cache.image_versions.delete(views[0].view.content)
    slow.extend(TEXT[:3])
    slow.set_spans(views)
    for chain in (before, whole, slow):
        chain.extend(TEXT)
    assert slow.keys == whole.keys
    assert common(slow.keys, before.keys) == 0


def test_a_chain_extended_token_by_token_equals_one_extended_at_once() -> None:
    slow = HashChain(b"x", (span(2, 1, 6),), 4)
    for count in range(len(TEXT) + 1):
        slow.extend(TEXT[:count])
        assert len(slow.keys) == count // 4
    assert slow.keys == keys(TEXT, span(2, 1, 6), salt=b"x")


def test_a_changed_token_changes_its_block_and_all_behind_it() -> None:
    for index in range(len(TEXT)):
        changed = [*TEXT[:index], 99, *TEXT[index + 1 :]]
        assert common(keys(TEXT), keys(changed)) == index // 4


def test_another_image_in_the_same_place_changes_every_block_it_reaches() -> None:
    assert common(keys(TEXT, span(5, 1)), keys(TEXT, span(5, 2))) == 1
    assert common(keys(TEXT, span(8, 1)), keys(TEXT, span(8, 2))) == 2
    assert common(keys(TEXT, span(3, 1, 1)), keys(TEXT, span(3, 2, 1))) == 0


def test_an_image_is_not_its_placeholder_typed_as_text() -> None:
    assert common(keys(TEXT), keys(TEXT, span(4, 1))) == 1


def test_the_offset_inside_the_image_is_part_of_the_key() -> None:
    placeholders = [0] * 12
    assert common(keys(placeholders, span(0, 1, 12)), keys(placeholders, span(0, 1, 8))) == 0
    one, other = keys(placeholders, span(1, 1, 8)), keys(placeholders, span(2, 1, 8))
    assert common(one, other) == 0


def test_tenants_have_no_key_in_common() -> None:
    assert not set(keys(TEXT, salt=b"a")) & set(keys(TEXT, salt=b"b"))


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    assert len(set(keys([5] * 12))) == 3


@given(starts=st.lists(st.integers(0, 5), max_size=5), start=st.integers(0, 40), count=st.integers(1, 20))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_overlapping_finds_exactly_the_spans_with_a_token_inside(
    starts: list[int], start: int, count: int
) -> None:
    spans, place = [], 0
    for gap in starts:
        spans.append(span(place + gap, 1, 3))
        place += gap + 3
    inside = [s for s in spans if any(start <= token < start + count for token in range(s.start, s.stop))]
    assert list(overlapping_spans(spans, start, start + count)) == inside


# Finding


def test_the_longest_cached_prefix_is_found() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    blocks = filled(cache, pool, TEXT)
    assert found(cache, TEXT) == blocks
    assert found(cache, [*TEXT[:9], 99, 99, 99]) == blocks[:2]
    assert found(cache, TEXT[:7]) == blocks[:1]
    assert found(cache, TEXT[1:]) == []
    assert found(cache, TEXT, salt=b"other") == []
    assert found(cache, TEXT, span(4, 1)) == blocks[:1]


def test_the_longest_partial_hit_in_the_next_block_is_found() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    blocks = filled(cache, pool, TEXT)
    other = filled(cache, pool, [*TEXT[:6], 7, 7])[1]
    assert next_part(cache, [*TEXT[:7], 99]) == (blocks[1], 3)
    assert next_part(cache, [*TEXT[:6], 7, 99, 99]) == (other, 3)
    assert next_part(cache, TEXT[:6])[1] == 2  # fewer tokens than a block
    assert next_part(cache, [*TEXT[:4], 99]) == (0, 0)
    assert next_part(cache, TEXT) == (0, 0)  # nothing follows
    assert next_part(cache, [*TEXT[:7], 99], salt=b"other") == (0, 0)


def test_a_partial_hit_inside_an_image_needs_the_same_offset_of_the_same_image() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 8)
    tokens = [1, 2, 0, 0, 0, 0, 5, 6]
    (block,) = filled(cache, pool, tokens, span(2, 1))
    assert next_part(cache, [*tokens[:6], 9, 9], span(2, 1)) == (block, 6)
    assert next_part(cache, tokens, span(2, 2)) == (block, 2)  # another image
    assert next_part(cache, tokens) == (block, 2)  # its placeholders typed as text
    assert next_part(cache, [1, 2, *[0] * 6], span(2, 1, 6)) == (block, 2)  # a larger one of the same content
    assert next_part(cache, [1, 0, 0, 0, 0, 5, 6, 7], span(1, 1)) == (block, 1)  # a place further to the left


@st.composite
def written(draw: st.DrawFn) -> tuple[list[int], list[Span]]:
    """Texts over two words and images of two contents and sizes: beginnings agree often."""
    tokens: list[int] = []
    spans: list[Span] = []
    for piece in draw(st.lists(st.sampled_from([(1,), (1,), (2,), (1, 2), (2, 3), (1, 3)]), max_size=9)):
        if len(piece) == 1:
            tokens.append(piece[0])
        else:
            spans.append(span(len(tokens), *piece))
            tokens += [0] * piece[1]
    return tokens, spans


@given(known=st.lists(written(), max_size=8), asked=written(), size=st.sampled_from([1, 2, 3, 5]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_partial_hit_is_the_longest_there_is(
    known: list[tuple[list[int], list[Span]]], asked: tuple[list[int], list[Span]], size: int
) -> None:
    pool = BlockPool(200)
    cache = PrefixCache(pool, size)
    inside: dict[int, list[object]] = {}  # what each block stands for, and all before it
    for tokens, spans in known:
        for index, block in enumerate(filled(cache, pool, tokens, *spans)):
            inside[block] = meanings(tokens, spans)[: (index + 1) * size]
    wanted = meanings(*asked)
    whole = len(found(cache, asked[0], *asked[1])) * size
    block, count = next_part(cache, asked[0], *asked[1])
    best = 0
    for content in inside.values():
        if len(content) == whole + size and content[:whole] == wanted[:whole]:
            best = max(best, agreement(content[whole:], wanted[whole:]))
    assert count == best
    assert not count or inside[block][: whole + count] == wanted[: whole + count]


def meanings(tokens: list[int], spans: list[Span]) -> list[object]:
    """Of each token: its id, or which place of which view."""
    meant: list[object] = list(tokens)
    for one in spans:
        meant[one.start : one.stop] = [(one.key, offset) for offset in range(one.view.tokens)]
    return meant


def agreement(one: list[object], other: list[object]) -> int:
    both = list(zip(one, other, strict=False))
    return next((index for index, (a, b) in enumerate(both) if a != b), len(both))


def test_equal_content_keeps_the_block_that_was_cached_first() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    first = filled(cache, pool, TEXT)
    assert filled(cache, pool, [*TEXT, 1, 2, 3, 4])[:3] == first
    assert (pool.cached, pool.free) == (4, 4)


def test_a_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool, 4)
    blocks = filled(cache, pool, TEXT)
    for left in (2, 1, 0):
        pool.allocate()
        cache.check()
        assert found(cache, TEXT) == blocks[:left]


def test_the_most_recently_used_block_is_evicted_last() -> None:
    pool = BlockPool(6)
    cache = PrefixCache(pool, 4)
    old, new = filled(cache, pool, TEXT), filled(cache, pool, TEXT[::-1])
    for block in old:
        pool.acquire(block)
    for block in reversed(old):
        pool.release(block)
    for _ in range(3):
        pool.allocate()
    assert found(cache, TEXT) == old
    assert found(cache, TEXT[::-1]) == []
    assert len(new) == 3


def test_check_notices_a_block_whose_parent_is_gone() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 4)
    chain = cache.new_chain(b"", ())
    chain.extend(TEXT)
    blocks = [cache.insert(chain, index, pool.allocate()) for index in range(3)]
    for block in blocks:  # the wrong way round
        pool.release(block)
    with pytest.raises(RuntimeError, match="would be evicted before"):
        cache.check()


@pytest.mark.parametrize("seed", range(8))
def test_a_hit_is_what_was_inserted_whatever_is_evicted(seed: int) -> None:
    """Many sequences that share beginnings, in a pool too small for them; contents are remembered beside."""
    draw = Random(seed)
    pool = BlockPool(12)
    cache = PrefixCache(pool, 2)
    contents: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    for _ in range(150):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(2, 17))]
        chain = cache.new_chain(b"", ())
        chain.extend(tokens)
        blocks = cache.match(chain)
        for index, block in enumerate(blocks):
            assert contents[block] == tuple(tokens[: 2 * index + 2])
            pool.acquire(block)
        for index in range(len(blocks), len(chain.keys)):
            block = pool.allocate()
            contents[block] = tuple(tokens[: 2 * index + 2])
            assert cache.insert(chain, index, block) == block
            blocks.append(block)
            cache.check()
        for block in reversed(blocks):
            pool.release(block)
        cache.check()
        pool.check()
    assert pool.used == 0


def test_children_in_the_other_pool_are_evicted_with_their_parent() -> None:
    pool = BlockPool(6, vision=2, roles=frozenset({"whole"}))
    cache = PrefixCache(pool, 4)
    chain = cache.new_chain(b"", [span(4, 1, tokens=8)])
    chain.extend([*TEXT[:4], *[0] * 8, *TEXT[4:]])  # text, two blocks of a image, two of text
    blocks = [pool.allocate(vision=index in (1, 2)) for index in range(5)]
    for index, block in enumerate(blocks):
        cache.insert(chain, index, block)
    for block in reversed(blocks):
        pool.release(block)
    cache.check()
    pool.release(pool.allocate(vision=True))  # the image's second block goes; what is behind it is text
    cache.check()
    assert cache.match(chain) == blocks[:2]
    assert pool.counts(vision=False) == (0, 1, 3)
    assert pool.counts(vision=True) == (0, 1, 1)


def test_a_view_in_the_vision_pool_has_keys_of_its_own() -> None:
    tokens, view = [0] * 8, span(0, 1, tokens=8)
    plain = keys(tokens, view)
    chain = HashChain(b"", [view], 4, frozenset({"whole"}))
    chain.extend(tokens)
    assert not set(plain) & set(chain.keys)
    other = HashChain(b"", [view], 4, frozenset({"global"}))
    other.extend(tokens)
    assert other.keys == plain


def written_out(tokens: list[int], spans: list[Span], start: int, stop: int) -> tuple[bytes, list[int]]:
    """A block's content as `HashChain.cells` says it is, token by token."""
    content, ends = b"", []
    for place in range(start, stop):
        inside = [one for one in spans if one.start <= place < one.stop]
        first = bool(inside) and place in (start, inside[0].start)
        content += (-1 - tokens[place] if first else tokens[place]).to_bytes(4, sys.byteorder, signed=True)
        if first:
            content += len(inside[0].key).to_bytes(8, "little") + inside[0].key
            content += (place - inside[0].start).to_bytes(8, "little")
        ends.append(len(content))
    return content, ends


@given(
    st.lists(st.integers(0, 1 << 20), max_size=60),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 24)), max_size=4),
    st.sampled_from((1, 4, 16)),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_blocks_are_encoded_alike_however_the_chain_is_extended(
    tokens: list[int], gaps: list[tuple[int, int]], size: int, cuts: list[int]
) -> None:
    spans: list[Span] = []
    for name, (gap, count) in enumerate(gaps):
        spans.append(span((spans[-1].stop if spans else 0) + gap, name, tokens=count))
    chain = HashChain(b"", spans, size)
    for cut in [*sorted(cuts), len(tokens)]:
        chain.extend(tokens[:cut])
    assert len(chain.contents) == len(chain.keys) == len(tokens) // size
    for index in range(len(tokens) // size + 1):
        stop = min((index + 1) * size, len(tokens))
        content, ends = chain.encode_block(tokens, index)
        assert (content, list(ends)) == written_out(tokens, spans, index * size, stop)
        assert chain.contents[index : index + 1] in ([], [content])
