"""The K and V storage."""

import pytest
import torch

from saccade.cache.pages import KVShape, Paged, Pages

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=4)


def test_pages_take_exactly_the_bytes_they_announce() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pages = Pages.allocate(SHAPE, 7, 16, dtype, "cpu")
        assert pages.k.shape == pages.v.shape == (3, 7, 16, 2, 4)
        assert pages.nbytes == 7 * Pages.bytes_per_block(SHAPE, 16, dtype)
        assert (pages.shape, pages.blocks, pages.block_size) == (SHAPE, 7, 16)


def test_copied_blocks_equal_their_sources_in_every_layer_and_others_stay() -> None:
    pages = Pages.allocate(SHAPE, 6, 2, torch.float32, "cpu")
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
    pages = Pages.allocate(SHAPE, 2, 2, torch.float32, "cpu")
    pages.copy_blocks(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(2,\) sources with \(1,\) targets"):
        pages.copy_blocks(torch.tensor([0, 1]), torch.tensor([0]))


def test_no_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        Pages.allocate(SHAPE, 0, 16, torch.float32, "cpu")


def test_rows_that_do_not_match_are_refused() -> None:
    pages = Pages.allocate(SHAPE, 2, 2, torch.float32, "cpu")

    def paged(slots: int = 2, decodes: int = 0) -> Paged:
        return Paged(
            pages=pages,
            slots=torch.zeros(slots, dtype=torch.int64),
            tables=torch.zeros(1, 1, dtype=torch.int32),
            lengths=torch.tensor([2], dtype=torch.int32),
            offsets=torch.tensor([0, 2], dtype=torch.int32),
            counts=(2,),
            contexts=(2,),
            decodes=decodes,
        )

    assert paged().counts == (2,)
    with pytest.raises(ValueError, match=r"slots \[2\]"):
        paged(slots=3)
    with pytest.raises(ValueError, match="one token each"):
        paged(decodes=1)
