"""The K and V storage."""

import pytest
import torch

from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kernels.attention.quantized_kv import FORMATS
from saccade.kv_cache.groups import KVCacheGroup, full_attention
from saccade.kv_cache.pages import Paged, Pages


def group(block_size: int, dtype: str = "float32") -> KVCacheGroup:
    return full_attention(3, 2, 4, dtype, block_size)[0]


def test_pages_take_exactly_the_bytes_they_announce() -> None:
    for dtype in ("float32", "bfloat16"):
        pages = Pages.allocate(group(16, dtype), 7, "cpu")
        assert pages.k.shape == pages.v.shape == (3, 7, 16, 2, 4)
        assert pages.nbytes == 7 * Pages.bytes_per_block(group(16, dtype))
        assert (pages.group, pages.blocks, pages.block_size) == (group(16, dtype), 7, 16)


def test_copied_blocks_equal_their_sources_in_every_layer_and_others_stay() -> None:
    pages = Pages.allocate(group(2), 6, "cpu")
    for tensor in (pages.k, pages.v):
        tensor.copy_(torch.rand_like(tensor))
    before = pages.k.clone(), pages.v.clone()
    # 1 is read for 4 although 1 itself is overwritten in the same call.
    pages.copy_blocks(torch.tensor([1, 0]), torch.tensor([4, 1]))
    for tensor, old in zip((pages.k, pages.v), before, strict=True):
        assert torch.equal(tensor[:, 4], old[:, 1])
        assert torch.equal(tensor[:, 1], old[:, 0])
        assert torch.equal(tensor[:, [0, 2, 3, 5]], old[:, [0, 2, 3, 5]])


def test_copying_nothing_is_allowed_and_uneven_pairs_are_not() -> None:
    pages = Pages.allocate(group(2), 2, "cpu")
    pages.copy_blocks(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(2,\) sources with \(1,\) targets"):
        pages.copy_blocks(torch.tensor([0, 1]), torch.tensor([0]))


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
@pytest.mark.parametrize("compact", [3, 7])
def test_quantized_pages_take_the_bytes_they_announce_and_a_padding_block_of_each_kind(
    form: torch.dtype, compact: int
) -> None:
    pages = Pages.allocate(group(16, "bfloat16"), 7, "cpu", compact, form)
    assert (pages.blocks, pages.block_size, pages.border) == (7, 16, 7 - compact)
    plain = Pages.bytes_per_block(group(16, "bfloat16"))
    small = Pages.bytes_per_block(group(16, "bfloat16"), form)
    assert small == 2 * 3 * 16 * 2 * (4 + 4)
    spare = 1 if compact < 7 else 0
    assert pages.nbytes == (7 - compact + spare) * plain + (compact + spare) * small


@pytest.mark.parametrize("compact", [0, 3, 7])
def test_every_block_is_whole_in_one_storage(compact: int) -> None:
    dtype = torch.int8 if compact else None
    pages = Pages.allocate(group(2), 7, "cpu", compact, dtype, side_width=5)
    parts = pages.parts()
    assert [block for part in parts for block in range(part.first, part.first + part.blocks)] == list(
        range(7)
    )
    assert pages.side is not None
    for value, part in enumerate(parts, 1):
        part.tensors[-1].fill_(value)  # what stands beside K and V
    assert pages.side[0, :, 0, 0].tolist() == [1] * (7 - compact) + [len(parts)] * compact


@pytest.mark.parametrize("together", [True, False])
def test_every_byte_of_a_block_is_copied_whatever_its_kind(together: bool) -> None:
    pages = Pages.allocate(group(2), 8, "cpu", 4, torch.float8_e4m3fn)
    tensors = [tensor for part in pages.parts() for tensor in part.tensors]
    assert len(tensors) == 6
    for tensor in tensors:
        tensor.copy_(torch.randint(1, 100, tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    pairs, plain = pages.in_order([(5, 7), (0, 3), (6, 4)])
    assert (pairs, plain) == ([(0, 3), (5, 7), (6, 4)], 1)
    if together:
        sources, targets = (torch.tensor(side) for side in zip(*pairs, strict=True))
        pages.copy_blocks(sources, targets, plain)
    else:
        for pair in pairs:
            pages.copy_block(*pair)
    for tensor, old in zip(tensors[:2], before[:2], strict=True):
        assert torch.equal(tensor[:, 3], old[:, 0])
        assert torch.equal(tensor[:, [0, 1, 2, 4]], old[:, [0, 1, 2, 4]])
    for tensor, old in zip(tensors[2:], before[2:], strict=True):
        assert torch.equal(tensor[:, [3, 0]], old[:, [1, 2]])
        assert torch.equal(tensor[:, [1, 2, 4]], old[:, [1, 2, 4]])


def test_a_block_is_never_copied_into_one_of_the_other_kind() -> None:
    pages = Pages.allocate(group(2), 4, "cpu", 2, torch.int8)
    with pytest.raises(ValueError, match="between plain and compact"):
        pages.in_order([(0, 3)])
    with pytest.raises(ValueError, match="two kinds"):
        pages.copy_blocks(torch.tensor([0]), torch.tensor([1]))
    for pair in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="of another kind"):
            pages.copy_block(*pair)


def test_no_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        Pages.allocate(group(16), 0, "cpu")


def test_rows_that_do_not_match_are_refused() -> None:
    pages = Pages.allocate(group(2), 2, "cpu")

    def paged(slots: int = 2, decodes: int = 0) -> Paged:
        rows = AttentionMetadata(
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            seq_lens=torch.tensor([2], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
            query_lens=(2,),
            seq_lens_cpu=(2,),
            num_decodes=decodes,
            block_size=2,
        )
        return Paged(pages, torch.zeros(slots, dtype=torch.int64), rows)

    assert paged().rows.num_tokens == 2
    with pytest.raises(ValueError, match=r"2 tokens need as many slots, not \(3,\)"):
        paged(slots=3)
    with pytest.raises(ValueError, match="one token each"):
        paged(decodes=1)
