"""Paged attention against the formula, spelled out in float64 token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from saccade.kernels.attention.metadata import MOST_GATHERED, SHORT, AttentionMetadata, group_by_width
from saccade.kernels.attention.paged import paged_attention, sdpa_any_shape

CASES = {
    "one decode of one token": ([(1, 1)], 1),
    "decodes of very different lengths": ([(1, 1), (1, 17), (1, 64), (1, 5), (1, 130)], 5),
    "long and short decodes apart": ([(1, 3), (1, 1400), (1, 40), (1, 300), (1, 900), (5, 12)], 5),
    "a whole prompt": ([(40, 40)], 0),
    "a piece of a prompt": ([(7, 33)], 0),
    "one token on the chunk path": ([(1, 20)], 0),
    "a query behind 64 others": ([(65, 80), (65, 65)], 0),
    "everything together": ([(1, 9), (1, 48), (13, 13), (7, 50), (1, 1), (16, 16), (3, 19)], 2),
}


def make_rows(
    work: list[tuple[int, int]], decodes: int, block_size: int, generator: torch.Generator
) -> tuple[AttentionMetadata, int, list[list[int]]]:
    """AttentionMetadata with blocks in random order, and the slots of each row's tokens."""
    needed = [-(-context // block_size) for _, context in work]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=generator).tolist()
    tables = torch.full((len(work), max(needed) + 2), 2**30, dtype=torch.int32)  # past the end: nowhere
    slots = []
    for row, (_, context) in enumerate(work):
        mine = [order.pop() for _ in range(needed[row])]
        tables[row, : needed[row]] = torch.tensor(mine, dtype=torch.int32)
        slots.append(
            [mine[place // block_size] * block_size + place % block_size for place in range(context)]
        )
    counts = tuple(count for count, _ in work)
    contexts = tuple(context for _, context in work)
    offsets = torch.tensor((0, *counts)).cumsum(0).int()
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return AttentionMetadata(tables, lengths, offsets, counts, contexts, decodes, block_size), blocks, slots


def plain_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: AttentionMetadata,
    slots: list[list[int]],
    window: int | None,
) -> Tensor:
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k_pages.shape[2]
    keys, values = k_pages.double().flatten(0, 1), v_pages.double().flatten(0, 1)
    token = 0
    for row, (count, context) in enumerate(zip(rows.query_lens, rows.seq_lens_cpu, strict=True)):
        for place in range(context - count, context):
            low = 0 if window is None else max(0, place - window + 1)
            seen = torch.tensor(slots[row][low : place + 1])
            for head in range(q.shape[1]):
                k, v = keys[seen, head // group], values[seen, head // group]
                weights = (k @ q[token, head].double() * q.shape[2] ** -0.5).softmax(0)
                out[token, head] = weights @ v
            token += 1
    return out


@given(st.lists(st.integers(1, 70_000), max_size=40))
def test_decode_rows_are_grouped_with_little_padding(widths: list[int]) -> None:
    groups = group_by_width(widths)
    assert sorted(row for group in groups for row in group) == list(range(len(widths)))
    for group in groups:
        widest = max(max(widths[row], SHORT) for row in group)
        assert all(2 * max(widths[row], SHORT) >= widest for row in group)
        assert len(group) == 1 or len(group) * widest <= MOST_GATHERED


def test_one_long_context_does_not_pad_the_others() -> None:
    assert group_by_width([100] * 50) == [list(range(50))]
    assert group_by_width([100, 4000, 200]) == [[1], [0, 2]]


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 8), (3, 3, 32)])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_its_formula(case: str, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    work, decodes = CASES[case]
    generator = torch.Generator().manual_seed(heads * dim)
    for block_size in (1, 4, 16):
        rows, blocks, slots = make_rows(work, decodes, block_size, generator)
        shape = (blocks, block_size, kv_heads, dim)
        # What no row owns is not a number: one stray read spoils the answer.
        k_pages, v_pages = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        owned = torch.tensor([slot for mine in slots for slot in mine])
        for pages in (k_pages, v_pages):
            pages.view(-1, kv_heads, dim)[owned] = torch.randn(len(owned), kv_heads, dim, generator=generator)
        q = torch.randn(rows.num_tokens, heads, dim, generator=generator)
        out = paged_attention(q, k_pages, v_pages, rows, dim**-0.5, window)
        expected = plain_attention(q, k_pages, v_pages, rows, slots, window)
        assert out.dtype == q.dtype
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("case", CASES)
def test_attention_on_cuda_is_its_formula(case: str, window: int | None, dtype: torch.dtype) -> None:
    work, decodes = CASES[case]
    generator = torch.Generator().manual_seed(0)
    rows, blocks, slots = make_rows(work, decodes, 16, generator)
    k_pages, v_pages = torch.randn(2, blocks, 16, 2, 64, generator=generator).to(dtype)
    q = torch.randn(rows.num_tokens, 8, 64, generator=generator).to(dtype)
    there = AttentionMetadata(
        rows.block_tables.cuda(),
        rows.seq_lens.cuda(),
        rows.query_start_loc.cuda(),
        rows.query_lens,
        rows.seq_lens_cpu,
        rows.num_decodes,
        rows.block_size,
    )
    with sdpa_any_shape(there.block_tables.device):
        out = paged_attention(q.cuda(), k_pages.cuda(), v_pages.cuda(), there, 0.125, window)
    expected = plain_attention(q, k_pages, v_pages, rows, slots, window)
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), expected, rtol=close, atol=close)


def test_attention_takes_strided_queries_and_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, blocks, slots = make_rows([(1, 30), (9, 21)], 1, 4, generator)
    k_pages, v_pages = torch.randn(2, blocks, 4, 2, 16, generator=generator).bfloat16()
    fused = torch.randn(rows.num_tokens, 8, 16, generator=generator).bfloat16()
    q = fused[:, 2:6]  # as cut from a fused projection
    out = paged_attention(q, k_pages, v_pages, rows, 0.25)
    expected = plain_attention(q, k_pages, v_pages, rows, slots, None)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_a_query_alone_in_a_block_is_computed_by_itself() -> None:
    work = [(1, 9), (65, 80), (64, 64), (129, 300), (33, 33), (1, 4)]
    rows, _, _ = make_rows(work, 1, 16, torch.Generator())
    for window in (None, 10):
        chunks = rows.reference_reads(window).chunks
        assert [chunk.stop - chunk.start for chunk in chunks] == [64, 1, 64, 128, 1, 32, 1, 1]
        assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
        assert all(chunk.mask is None for chunk in chunks if chunk.stop - chunk.start == 1)


def test_reference_reads_are_computed_once_per_window() -> None:
    rows, _, _ = make_rows([(1, 30), (9, 21)], 1, 4, torch.Generator().manual_seed(0))
    assert rows.reference_reads(None) is rows.reference_reads(None)
    assert rows.reference_reads(8) is not rows.reference_reads(None)


def test_wrong_shapes_are_refused_by_name() -> None:
    rows, blocks, _ = make_rows([(1, 30), (9, 21)], 1, 4, torch.Generator().manual_seed(0))
    pages = torch.zeros(blocks, 4, 2, 16)
    q = torch.zeros(10, 4, 16)
    with pytest.raises(ValueError, match=r"\[10, heads, dim\].*\(9, 4, 16\)"):
        paged_attention(q[:9], pages, pages, rows, 1.0)
    with pytest.raises(ValueError, match=r"\(10, 4, 16\) over pages \(\d+, 4, 2, 8\)"):
        paged_attention(q, pages[..., :8], pages[..., :8], rows, 1.0)
    with pytest.raises(ValueError, match="8 tokens a block, the rows say 4"):
        paged_attention(q, torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 16), rows, 1.0)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        paged_attention(q[:, :3], pages, pages, rows, 1.0)
    with pytest.raises(ValueError, match=r"float32 over pages of torch\.bfloat16"):
        paged_attention(q, pages.bfloat16(), pages.bfloat16(), rows, 1.0)
    turned = torch.zeros(blocks, 4, 16, 2).transpose(-1, -2)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(q, turned, turned, rows, 1.0)
    with pytest.raises(ValueError, match="window of 0"):
        paged_attention(q, pages, pages, rows, 1.0, window=0)


def test_rows_that_contradict_themselves_are_refused() -> None:
    tables = torch.zeros(1, 2, dtype=torch.int32)
    lengths = torch.tensor([8], dtype=torch.int32)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="9 tokens needs 3 table entries of 4 tokens; the tables have 2"):
        AttentionMetadata(tables, lengths, offsets, (1,), (9,), 1, 4)
    with pytest.raises(ValueError, match="computes 9 tokens of a sequence of 8"):
        AttentionMetadata(tables, lengths, offsets, (9,), (8,), 0, 4)
    with pytest.raises(ValueError, match="must have one token each"):
        AttentionMetadata(tables, lengths, offsets, (2,), (8,), 1, 4)
    with pytest.raises(ValueError, match="same rows"):
        AttentionMetadata(tables, lengths, offsets, (1, 1), (8, 8), 1, 4)
    with pytest.raises(ValueError, match="int32"):
        AttentionMetadata(tables.long(), lengths, offsets, (1,), (8,), 1, 4)
