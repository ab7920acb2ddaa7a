"""KV cache groups: sizes, block tables and prefix hits by group; what is not implemented is refused."""

from collections.abc import Sequence

import pytest
import torch

from saccade.errors import ConfigError
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.groups import GroupKind, KVCacheGroup, full_attention, resolve_groups, single_group
from saccade.kv_cache.pages import Pages
from saccade.kv_cache.prefix_cache import HashChain, PrefixCache, match_groups
from saccade.worker.input_batch import Slots

BLOCK = 4
WIDE = KVCacheGroup("wide", "full_attention", (0, 2, 3), kv_heads=2, head_dim=8, dtype="float32")
NARROW = KVCacheGroup("narrow", "full_attention", (1, 4), kv_heads=1, head_dim=16, dtype="bfloat16")
TOKENS = list(range(100, 100 + 5 * BLOCK))


def chain_of(tokens: Sequence[int]) -> HashChain:
    chain = HashChain(b"salt", (), BLOCK)
    chain.extend(tokens)
    return chain


def test_each_group_has_pages_of_its_own_shape_dtype_and_size() -> None:
    wide, narrow = (Pages.allocate(group, 6, "cpu") for group in resolve_groups((WIDE, NARROW), BLOCK))
    assert wide.k.shape == wide.v.shape == (3, 6, BLOCK, 2, 8)
    assert narrow.k.shape == narrow.v.shape == (2, 6, BLOCK, 1, 16)
    assert (wide.k.dtype, narrow.k.dtype) == (torch.float32, torch.bfloat16)
    sizes = [Pages.bytes_per_block(pages.group) for pages in (wide, narrow)]
    assert sizes == [2 * 3 * BLOCK * 2 * 8 * 4, 2 * 2 * BLOCK * 1 * 16 * 2]
    assert [wide.nbytes, narrow.nbytes] == [6 * size for size in sizes]


def test_block_table_entries_go_to_the_table_of_their_group() -> None:
    rows = Slots(count=2, blocks_per_seq=3, device=torch.device("cpu"), groups=2)
    entries = [(0, 0, 7, 0), (1, 2, 5, 0), (0, 0, 3, 1), (1, 2, 4, 1)]  # row, index, block, group
    places = [(group * rows.lines + row) * rows.blocks_per_seq + index for row, index, _, group in entries]
    rows.update_tables(torch.tensor(places), torch.tensor([entry[2] for entry in entries], dtype=torch.int32))
    assert rows.tables(0).tolist() == [[7, 0, 0], [0, 0, 5], [0, 0, 0]]
    assert rows.tables(1).tolist() == [[3, 0, 0], [0, 0, 4], [0, 0, 0]]
    assert rows.state.tables.data_ptr() == rows.tables(0).data_ptr()


def test_a_prefix_hit_is_as_long_as_the_shortest_of_the_groups() -> None:
    pools = BlockPool(5), BlockPool(8)
    caches = [PrefixCache(pool, BLOCK) for pool in pools]
    for pool, cache in zip(pools, caches, strict=True):
        chain = chain_of(TOKENS)
        blocks = [cache.insert(chain, index, pool.allocate()) for index in range(5)]
        for block in reversed(blocks):
            pool.release(block)
    assert [len(blocks) for blocks in match_groups(caches, chain_of(TOKENS))] == [5, 5]
    for _ in range(2):  # the first pool is full: it evicts the end of its chain, the second has free blocks
        for pool in pools:
            pool.allocate()
    found = match_groups(caches, chain_of(TOKENS))
    assert [len(blocks) for blocks in found] == [3, 3]
    assert len(caches[1].match(chain_of(TOKENS))) == 5
    for pool, cache, blocks in zip(pools, caches, found, strict=True):
        for block in blocks:
            pool.acquire(block)
        pool.check()
        cache.check()


def test_a_miss_in_one_group_is_a_miss() -> None:
    full, empty = PrefixCache(BlockPool(5), BLOCK), PrefixCache(BlockPool(5), BLOCK)
    chain = chain_of(TOKENS)
    full.insert(chain, 0, full._pool.allocate())
    assert match_groups([full, empty], chain) == [[], []]
    assert match_groups([full], chain) == [[0]]


@pytest.mark.parametrize("kind", ["sliding_window", "cross_attention", "recurrent"])
def test_kinds_that_are_not_implemented_are_refused_by_name(kind: GroupKind) -> None:
    group = KVCacheGroup("state", kind, (0,), 1, 8, "float32")
    with pytest.raises(ConfigError, match=f"'state' is {kind}; this engine implements full_attention"):
        resolve_groups((group,), BLOCK)


def test_groups_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="a layer is in two"):
        resolve_groups((WIDE, WIDE), BLOCK)
    with pytest.raises(ConfigError, match="--block-size 32"):
        resolve_groups(full_attention(2, 1, 8, "float32", block_size=32), BLOCK)
    with pytest.raises(ConfigError, match="no KV cache group"):
        resolve_groups((), BLOCK)


def test_the_engine_serves_models_of_one_group() -> None:
    assert single_group((WIDE,), BLOCK).block_size == BLOCK
    with pytest.raises(ConfigError, match=r"2 KV cache groups \(wide, narrow\)"):
        single_group((WIDE, NARROW), BLOCK)
