"""KV pools: sizes by share and precision, and which blocks of a sequence are in the vision pool."""

from collections.abc import Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import VISION_SCOPES, KVCacheOptions, PoolSizes, VisionBlocks
from saccade.request import Media, Request, View
from saccade.step_plan import Role, Span
from tests.scheduler.simulated_device import image


@pytest.mark.parametrize(
    ("wish", "shares"),
    [
        (KVCacheOptions(), PoolSizes(100, 0, 0)),
        (KVCacheOptions(cache_dtype="int8"), PoolSizes(200, 0, 200)),
        (KVCacheOptions(vision_share=0.25), PoolSizes(75, 25, 0)),
        (KVCacheOptions(vision_views="global"), PoolSizes(50, 50, 0)),
        (KVCacheOptions(vision_dtype="fp8"), PoolSizes(49, 99, 99)),  # one block of each kind is no one's
        (KVCacheOptions(vision_dtype="fp8", vision_share=0.75), PoolSizes(24, 149, 149)),
        (KVCacheOptions(cache_dtype="fp8", vision_share=0.5), PoolSizes(100, 100, 200)),
    ],
)
def test_bytes_are_divided_by_share_and_precision_and_never_exceeded(
    wish: KVCacheOptions, shares: PoolSizes
) -> None:
    assert wish.divide_bytes(1000, plain=10, small=5) == shares
    plain, small = shares.blocks - shares.compact, shares.compact
    spare = 15 if plain and small else 0
    assert plain * 10 + small * 5 + spare <= 1000


def test_blocks_are_divided_by_share() -> None:
    assert KVCacheOptions().divide_blocks(64) == PoolSizes(64, 0, 0)
    assert KVCacheOptions(vision_share=0.25).divide_blocks(64) == PoolSizes(48, 16, 0)
    assert KVCacheOptions(vision_dtype="int8").divide_blocks(3) == PoolSizes(1, 2, 2)
    with pytest.raises(ConfigError, match="1 blocks for text and 0 for views"):
        KVCacheOptions(vision_dtype="int8").divide_blocks(1)
    with pytest.raises(ConfigError, match="0 blocks for text"):
        KVCacheOptions(vision_share=0.99).divide_bytes(20, plain=10, small=5)
    with pytest.raises(ConfigError, match="no room for a single block"):
        KVCacheOptions().divide_bytes(9, plain=10, small=5)


def test_the_vision_pool_is_for_the_views_asked_for_and_there_only_when_asked_for() -> None:
    assert KVCacheOptions().roles == KVCacheOptions(cache_dtype="fp8").roles == frozenset()
    assert (
        KVCacheOptions(vision_share=0.5).roles
        == KVCacheOptions(vision_dtype="fp8").roles
        == VISION_SCOPES["all"]
    )
    assert KVCacheOptions(vision_dtype="fp8", vision_views="global").roles == VISION_SCOPES["global"]


def span(start: int, tokens: int, role: Role) -> Span:
    view = View(b"0" * 16, (0, 0, 1, 1), (1, tokens), 1, b"")
    return Span(start, view, view.key, role=role)


pieces = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from(["whole", "global", "zoom"])), max_size=6
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pieces=pieces, size=st.integers(1, 5), roles=st.sampled_from(sorted(VISION_SCOPES.values(), key=len)))
def test_a_vision_block_holds_nothing_but_views_of_the_roles(
    pieces: list[tuple[int, int, Role]], size: int, roles: Set[Role]
) -> None:
    spans, end = [], 0
    for gap, tokens, role in pieces:
        spans.append(span(end + gap, tokens, role))
        end = spans[-1].stop
    tokens_of = {token for one in spans if one.role in roles for token in range(one.start, one.stop)}
    kinds = VisionBlocks(spans, size, roles)
    blocks = end // size + 3
    visual = [tokens_of.issuperset(range(index * size, (index + 1) * size)) for index in range(blocks)]
    assert [index in kinds for index in range(blocks)] == visual
    for start in range(blocks):
        for stop in range(start, blocks):
            assert kinds.among(start, stop) == sum(visual[start:stop])
    assert kinds.among(2, 1) == 0


@pytest.mark.parametrize(
    ("media", "role"),
    [
        (image(1, 0, 2, 3), "whole"),
        (image(1, 0, 2, 3, frame=(2, 3)), "whole"),
        (image(1, 0, 2, 3, frame=(4, 6)), "global"),
    ],
)
def test_an_image_at_less_than_full_detail_is_a_global_view(media: Media, role: Role) -> None:
    assert lay_out_prompt(Request(id="r", prompt=(0, 1), media=(media,))).spans[0].role == role


def test_a_part_of_an_image_is_a_zoomed_view() -> None:
    whole = image(1, 0)
    part = Media(2, image(1, 2).view, whole.pixels, origin=0)
    layout = lay_out_prompt(Request(id="r", prompt=(0, 1, 0, 1), media=(whole, part)))
    assert [one.role for one in layout.spans] == ["whole", "zoom"]
