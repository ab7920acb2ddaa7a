"""Rows of a CUDA graph: padded, in any slot, their lengths known to the device alone."""

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention import decode as paged_decode
from saccade.kernels.attention.metadata import AttentionMetadata, PaddedAttentionMetadata
from saccade.kernels.attention.paged import paged_attention, paged_attention_reference
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.norm_rope.qk_norm_rope import kv_write_reference
from saccade.kernels.sampling.slot_state import (
    SlotState,
    advance_slots,
    advance_slots_reference,
    advance_slots_triton,
    gather_slots,
    gather_slots_reference,
    gather_slots_triton,
)
from tests.kernels.buffers import EXACT, PLACES, Place, assert_near, needs_triton, poison
from tests.kernels.test_attention import make_rows
from tests.kernels.test_triton_attention import make_pages, on


def scattered(
    rows: AttentionMetadata, decodes: int, chunks: int, spare: int
) -> tuple[PaddedAttentionMetadata, Tensor]:
    """The rows among padding, with tables in shuffled lines; and where their queries stand now."""
    count, device = len(rows.query_lens), rows.block_tables.device
    lines = torch.randperm(count + 5, generator=torch.Generator().manual_seed(3))[:count].to(device)
    tables = torch.full((count + 5, rows.block_tables.shape[1]), 2**30, dtype=torch.int32, device=device)
    tables[lines] = rows.block_tables
    index = torch.full((decodes + chunks,), -1, dtype=torch.int32, device=device)
    lengths = torch.zeros(decodes + chunks, dtype=torch.int32, device=device)
    longer = count - rows.num_decodes
    for here, there, size in ((0, 0, rows.num_decodes), (decodes, rows.num_decodes, longer)):
        index[here : here + size] = lines[there : there + size].int()
        lengths[here : here + size] = rows.seq_lens[there : there + size]
    ends = [decodes]
    for row in range(chunks):
        ends.append(ends[-1] + (rows.query_lens[rows.num_decodes + row] if row < longer else 0))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device) if chunks else None
    queries = [*range(rows.num_decodes), *range(decodes, ends[-1])]
    fixed = PaddedAttentionMetadata(
        tables, index, lengths, offsets, decodes, ends[-1] + spare, 200, rows.block_size
    )
    return fixed, torch.tensor(queries, device=device)


@pytest.mark.parametrize(
    ("work", "decodes", "padded", "chunks", "spare"),
    [
        ([(1, 9), (1, 130), (1, 16)], 3, 5, 0, 0),
        ([(1, 40), (7, 7), (20, 50)], 1, 2, 3, 6),
        ([(5, 21)], 0, 0, 1, 3),
    ],
    ids=["decodes", "mixed", "prompt"],
)
@pytest.mark.parametrize(
    ("kernels", "last_rows"),
    [
        ("torch", 0),
        pytest.param("triton", 0, marks=needs_triton),
        pytest.param("triton", 8, marks=needs_triton),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_padded_metadata_gives_the_same_attention(
    place: Place,
    kernels: str,
    last_rows: int,
    work: list[tuple[int, int]],
    decodes: int,
    padded: int,
    chunks: int,
    spare: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if place.device == "cuda" and kernels == "torch":
        pytest.skip("the reference of padded rows reads lengths back: for the CPU alone")
    if place.device == "cuda" and place.dtype == torch.float32:
        pytest.skip("matrix kernels run in 16 bits on CUDA")
    rows, blocks, slots = make_rows(work, decodes, 16, torch.Generator().manual_seed(7))
    rows = on(rows, place.device)
    k_pages, v_pages = make_pages(place, blocks, 16, 2, 32, slots)
    fixed, queries = scattered(rows, padded, chunks, spare)
    q = place.randn(fixed.num_tokens, 4, 32)
    clean = [torch.nan_to_num(pages) for pages in (k_pages, v_pages)]
    expected = paged_attention_reference(q[queries], clean[0], clean[1], rows, 0.2, None)
    poison(monkeypatch)
    pages = clean if kernels == "torch" else [k_pages, v_pages]  # the reference's padding may touch any slot
    monkeypatch.setattr(paged_decode, "LAST_ROWS", last_rows)
    counters = torch.zeros(64, dtype=torch.int32, device=place.device)
    out = paged_attention(q, pages[0], pages[1], fixed, 0.2, mode=KernelMode(kernels, counters=counters))
    assert not counters.any()
    assert_near(out[queries], expected, place.dtype)


def state(place: Place, rows: int) -> SlotState:
    generator = torch.Generator().manual_seed(rows)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (rows + 1, *shape), generator=generator)

    made = SlotState(
        numbers(90, 6).int(), numbers(500), numbers(23).int(), numbers(70).float(), numbers(9).int()
    )
    return SlotState(*(part.to(place.device) for part in made))


@pytest.mark.parametrize("step", [[0], [3, -1, 1, 0, -1], [-1, -1], [*range(6, -1, -1), -1]], ids=str)
@pytest.mark.parametrize("place", EXACT)
def test_gather_and_advance_equal_the_reference(
    place: Place, step: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reference = state(place, 7), state(place, 7)
    step_rows = torch.tensor(step, dtype=torch.int32, device=place.device)
    poison(monkeypatch)
    expected = gather_slots_reference(step_rows, reference, 4)
    for mine, theirs in zip(gather_slots_triton(step_rows, made, 4), expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    tokens = torch.arange(100, 100 + len(step), device=place.device)
    advance_slots_triton(step_rows, tokens, made)
    advance_slots_reference(step_rows, tokens, reference)
    for mine, theirs in zip(made, reference, strict=True):
        assert torch.equal(mine[:7], theirs[:7])


def test_a_step_reads_and_advances_its_slots_only() -> None:
    before = state(Place("cpu", torch.float32), 7)
    after = SlotState(*(part.clone() for part in before))
    step_rows = torch.tensor([5, -1, 2], dtype=torch.int32)
    got = gather_slots(step_rows, after, 4)
    length = int(before.lengths[5])
    assert got.tokens.tolist() == [int(before.last[5]), 0, int(before.last[2])]
    assert got.contexts.tolist() == [length + 1, 0, int(before.lengths[2]) + 1]
    assert got.slots.tolist()[:2] == [int(before.tables[5, length // 4]) * 4 + length % 4, -1]
    advance_slots(step_rows, torch.tensor([11, 12, 13]), after)
    assert after.last.tolist()[:7] == [
        *before.last[:2].tolist(),
        13,
        *before.last[3:5].tolist(),
        11,
        int(before.last[6]),
    ]
    for old, new in zip(before[2:], after[2:], strict=True):
        assert (new - old)[:7].tolist() == [0, 0, 1, 0, 0, 1, 0]


def test_tokens_without_a_slot_are_not_written() -> None:
    pages = torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 2)
    new = torch.ones(3, 1, 2)
    kv_write_reference(new, new, *pages, torch.tensor([-1, 5, -1]))
    for part in pages:
        assert part.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


def test_what_does_not_fit_is_refused() -> None:
    made = state(Place("cpu", torch.float32), 3)
    with pytest.raises(ValueError, match="int64"):
        gather_slots(torch.zeros(2, dtype=torch.int64), made, 4)
    with pytest.raises(ValueError, match="tokens"):
        advance_slots(torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), made)
    index = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="offsets"):
        PaddedAttentionMetadata(made.tables, index, index, None, 2, 3, 9, 4)
