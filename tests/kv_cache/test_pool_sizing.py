"""A KV budget becomes blocks."""

import pytest

from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import VISION_SCOPES, KVCacheOptions, PoolSizes


@pytest.mark.parametrize(
    ("wish", "shares"),
    [
        (KVCacheOptions(), PoolSizes(100, 0, 0)),
        (KVCacheOptions(cache_dtype="int8"), PoolSizes(200, 0, 200)),
        (KVCacheOptions(vision_share=0.25), PoolSizes(75, 25, 0)),
        (KVCacheOptions(vision_views="global"), PoolSizes(50, 50, 0)),
        (KVCacheOptions(vision_dtype="fp8"), PoolSizes(49, 99, 99)),  # one block of each kind is nobody's
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
