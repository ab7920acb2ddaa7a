"""Blocks in host memory: what comes back is what went out, whatever the blocks were used for meanwhile."""

import pytest
import torch

from saccade.errors import ConfigError
from saccade.kv_cache.groups import KVCacheGroup, full_attention
from saccade.kv_cache.pages import Pages
from saccade.kv_cache.swap_copies import HostPages, bytes_of_block


def group(block_size: int, dtype: str = "float32") -> KVCacheGroup:
    return full_attention(3, 2, 8, dtype, block_size)[0]


def filled(compact: int, side: int = 0) -> Pages:
    """Twelve blocks of four tokens, the last `compact` of them in 8 bits, all of noise."""
    dtype = torch.int8 if compact else None
    pages = Pages.allocate(group(4, "bfloat16"), 12, "cpu", compact, dtype, side)
    for part in pages.parts():
        for tensor in part.tensors:
            noise = torch.randint(-100, 100, tensor.shape)
            tensor.copy_(noise.to(tensor.dtype))
    return pages


def content(pages: Pages, block: int) -> list[torch.Tensor]:
    return [
        tensor[:, block - part.first].clone()
        for part in pages.parts()
        if part.first <= block < part.first + part.blocks
        for tensor in part.tensors
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("side", [0, 6])
@pytest.mark.parametrize("compact", [0, 5, 12])
def test_blocks_come_back_bit_for_bit_to_other_blocks_of_their_kind(compact: int, side: int) -> None:
    pages = filled(compact, side)
    host = HostPages(pages, 9)
    plain = 12 - compact
    gone = [block for block in (1, 4, plain, plain + 3) if block < 12]
    before = {block: content(pages, block) for block in range(12)}
    host.swap([(block, slot) for slot, block in enumerate(gone, 3)], (), wait=False)
    for part in pages.parts():
        for tensor in part.tensors:
            tensor.zero_()
    target = {block: block + 1 for block in gone}
    host.swap((), [(slot, target[block]) for slot, block in enumerate(gone, 3)], wait=True)
    for block in gone:
        assert same(content(pages, target[block]), before[block])
    untouched = set(range(12)) - set(target.values())
    assert all(not tensor.any() for block in untouched for tensor in content(pages, block))


def test_a_step_swaps_out_before_it_swaps_in() -> None:
    pages = filled(0)
    host = HostPages(pages, 2)
    first, second = content(pages, 0), content(pages, 1)
    host.swap([(0, 0)], (), wait=False)
    host.swap([(1, 1)], [(0, 1)], wait=True)  # block 1 goes out, and block 0's content takes its place
    assert same(content(pages, 1), first)
    host.swap([(5, 0)], [(1, 5)], wait=True)
    assert same(content(pages, 5), second)
    host.swap([(5, 0)], [(0, 7)], wait=True)  # out and back in one step
    assert same(content(pages, 7), second)


def test_more_blocks_than_a_staging_buffer_holds() -> None:
    pages = Pages.allocate(group(4), 200, "cpu")
    pages.k.copy_(torch.randn_like(pages.k))
    pages.v.copy_(torch.randn_like(pages.v))
    k, v = pages.k.clone(), pages.v.clone()
    host = HostPages(pages, 100)
    host.swap([(block, block) for block in range(100)], (), wait=False)
    host.swap((), [(slot, 100 + slot) for slot in range(100)], wait=True)
    assert torch.equal(pages.k[:, 100:], k[:, :100])
    assert torch.equal(pages.v[:, 100:], v[:, :100])


def test_a_slot_has_the_size_of_the_largest_kind_of_block_and_the_rate_is_measured() -> None:
    pages = filled(5)
    assert bytes_of_block(pages) == Pages.bytes_per_block(group(4, "bfloat16"))
    before = [content(pages, block) for block in range(12)]
    assert HostPages(pages, 4).measure_rate() > 0
    assert all(same(content(pages, block), before[block]) for block in range(12))


def test_more_than_host_memory_has_is_refused_by_the_options_name() -> None:
    with pytest.raises(ConfigError, match="--swap-bytes"):
        HostPages(filled(0), 1 << 45)
