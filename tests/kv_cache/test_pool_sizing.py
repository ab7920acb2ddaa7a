"""A KV budget becomes blocks."""

import pytest

from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import KVWish, Shares
from saccade.kv_cache.vision_blocks import SCOPES


@pytest.mark.parametrize(
    ("wish", "shares"),
    [
        (KVWish(), Shares(100, 0, 0)),
        (KVWish(cache_dtype="int8"), Shares(200, 0, 200)),
        (KVWish(vision_share=0.25), Shares(75, 25, 0)),
        (KVWish(vision_views="global"), Shares(50, 50, 0)),
        (KVWish(vision_dtype="fp8"), Shares(49, 99, 99)),  # one block of each kind is nobody's
        (KVWish(vision_dtype="fp8", vision_share=0.75), Shares(24, 149, 149)),
        (KVWish(cache_dtype="fp8", vision_share=0.5), Shares(100, 100, 200)),
    ],
)
def test_bytes_are_divided_by_share_and_precision_and_never_exceeded(wish: KVWish, shares: Shares) -> None:
    assert wish.divide_bytes(1000, plain=10, small=5) == shares
    plain, small = shares.blocks - shares.compact, shares.compact
    spare = 15 if plain and small else 0
    assert plain * 10 + small * 5 + spare <= 1000


def test_blocks_are_divided_by_share() -> None:
    assert KVWish().divide_blocks(64) == Shares(64, 0, 0)
    assert KVWish(vision_share=0.25).divide_blocks(64) == Shares(48, 16, 0)
    assert KVWish(vision_dtype="int8").divide_blocks(3) == Shares(1, 2, 2)
    with pytest.raises(ConfigError, match="1 blocks for text and 0 for views"):
        KVWish(vision_dtype="int8").divide_blocks(1)
    with pytest.raises(ConfigError, match="0 blocks for text"):
        KVWish(vision_share=0.99).divide_bytes(20, plain=10, small=5)
    with pytest.raises(ConfigError, match="no room for a single block"):
        KVWish().divide_bytes(9, plain=10, small=5)


def test_the_vision_pool_is_for_the_views_asked_for_and_there_only_when_asked_for() -> None:
    assert KVWish().roles == KVWish(cache_dtype="fp8").roles == frozenset()
    assert KVWish(vision_share=0.5).roles == KVWish(vision_dtype="fp8").roles == SCOPES["all"]
    assert KVWish(vision_dtype="fp8", vision_views="global").roles == SCOPES["global"]
