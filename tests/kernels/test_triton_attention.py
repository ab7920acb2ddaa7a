"""The Triton forms of paged attention against the reference, in the interpreter or on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention import decode as paged_decode
from saccade.kernels.attention.decode import (
    DecodeTuning,
    decode_attention_triton,
    default_splits,
    default_tuning,
)
from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kernels.attention.paged import paged_attention_reference, sdpa_any_shape
from saccade.kernels.attention.prefill import PrefillTuning, prefill_attention_triton
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from tests.kernels.buffers import EXACT, PLACES, Place, assert_near, poison
from tests.kernels.test_attention import make_rows

SHAPES = [(4, 2, 64), (4, 1, 72), (8, 8, 80), (7, 1, 96), (8, 2, 128), (2, 1, 8), (20, 1, 32)]


def on(rows: AttentionMetadata, device: str) -> AttentionMetadata:
    return AttentionMetadata(
        rows.block_tables.to(device),
        rows.seq_lens.to(device),
        rows.query_start_loc.to(device),
        rows.query_lens,
        rows.seq_lens_cpu,
        rows.num_decodes,
        rows.block_size,
    )


def make_pages(
    place: Place, blocks: int, block_size: int, kv_heads: int, dim: int, slots: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Random where some row owns the slot, NaN elsewhere: one stray read spoils the answer."""
    owned = torch.tensor([slot for mine in slots for slot in mine])
    pages = []
    for seed in (1, 2):
        flat = torch.full((blocks * block_size, kv_heads, dim), torch.nan)
        flat[owned] = torch.randn(len(owned), kv_heads, dim, generator=torch.Generator().manual_seed(seed))
        pages.append(flat.view(blocks, block_size, kv_heads, dim).to(place.device, place.dtype))
    return pages[0], pages[1]


def run_decode(
    place: Place,
    lengths: list[int],
    shape: tuple[int, int, int],
    block_size: int,
    window: int | None,
    tuning: DecodeTuning,
    mode: KernelMode = DEFAULT_MODE,
) -> tuple[Tensor, Tensor]:
    heads, kv_heads, dim = shape
    work = [(1, length) for length in lengths]
    rows, blocks, slots = make_rows(work, len(work), block_size, torch.Generator().manual_seed(7))
    there = on(rows, place.device)
    k_pages, v_pages = make_pages(place, blocks, block_size, kv_heads, dim, slots)
    fused = place.randn(len(work), heads + 3, dim)
    q = fused[:, 1 : heads + 1]  # rows further apart than their heads, as cut from a fused projection
    out = decode_attention_triton(
        q,
        k_pages,
        v_pages,
        there.block_tables,
        there.seq_lens,
        dim**-0.5,
        window,
        max(lengths),
        tuning,
        mode=mode,
    )
    clean = [torch.nan_to_num(pages) for pages in (k_pages, v_pages)]  # padding may touch any slot
    with sdpa_any_shape(q.device):
        expected = paged_attention_reference(q, clean[0], clean[1], there, dim**-0.5, window)
    return out, expected


@contextmanager
def counted(place: Place, count: int) -> Iterator[KernelMode]:
    """With counters, which must be 0 again after every launch; one more than needed, which stays as it is."""
    counters = torch.zeros(count + 1, dtype=torch.int32, device=place.device)
    counters[-1] = 7
    yield KernelMode(counters=counters)
    assert counters.tolist() == [0] * count + [7]


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize(("splits", "last"), [(None, False), (1, False), (5, False), (5, True), (2, True)])
@pytest.mark.parametrize("place", PLACES)
def test_decode_is_the_reference_for_any_length(
    place: Place, splits: int | None, last: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    tuning = DecodeTuning(tile=32, chunk=32, splits=splits, last=last)
    with counted(place, 4 * 2) as mode:
        out, expected = run_decode(place, [1, 17, 150, 32], (4, 2, 64), 16, window, tuning, mode)
    assert_near(out, expected, place.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_decode_is_the_reference_for_any_head(
    place: Place, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    for last in (False, True):
        tuning = DecodeTuning(tile=32, chunk=32, splits=3, last=last)
        with counted(place, 2 * shape[1]) as mode:
            out, expected = run_decode(place, [5, 90], shape, 16, None, tuning, mode)
        assert_near(out, expected, place.dtype)


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("place", EXACT)
def test_decode_is_the_reference_at_any_block_size(place: Place, tile: int, block_size: int) -> None:
    out, expected = run_decode(place, [1, 100], (2, 1, 32), block_size, None, DecodeTuning(tile, tile))
    assert_near(out, expected, place.dtype)


@pytest.mark.parametrize("place", EXACT)
def test_padding_rows_give_zeros_and_read_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    pages = torch.full((2, 16, 1, 32), torch.nan, device=place.device)
    tables = torch.full((3, 4), 2**30, dtype=torch.int32, device=place.device)
    lengths = torch.zeros(3, dtype=torch.int32, device=place.device)
    for tuning in (DecodeTuning(splits=1), DecodeTuning(splits=4), DecodeTuning(splits=4, last=True)):
        with counted(place, 3) as mode:
            out = decode_attention_triton(
                place.randn(3, 2, 32), pages, pages, tables, lengths, 1.0, None, 64, tuning, mode=mode
            )
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("place", PLACES)
def test_a_row_does_not_depend_on_the_batch_when_chunks_cover_the_context(place: Place) -> None:
    tuning = DecodeTuning(tile=16, chunk=16, splits=8)
    alone, _ = run_decode(place, [100], (4, 2, 32), 16, None, tuning)
    heads, kv_heads, dim = 4, 2, 32
    rows, blocks, slots = make_rows([(1, 100)], 1, 16, torch.Generator().manual_seed(7))
    k_pages, v_pages = make_pages(place, blocks, 16, kv_heads, dim, slots)
    q = place.randn(1, heads + 3, dim)[:, 1 : heads + 1].repeat(3, 1, 1)
    tables = rows.block_tables.repeat(3, 1).to(place.device)
    lengths = torch.tensor([7, 100, 50], dtype=torch.int32, device=place.device)
    together = decode_attention_triton(q, k_pages, v_pages, tables, lengths, dim**-0.5, None, 128, tuning)
    assert torch.equal(together[1], alone[0])


@pytest.mark.parametrize("place", [EXACT[1]])
def test_decode_of_a_very_long_context(place: Place) -> None:
    out, expected = run_decode(place, [65536, 3], (8, 2, 128), 16, None, DecodeTuning())
    assert_near(out, expected, place.dtype, scale=10)


def test_one_launch_is_for_few_rows_and_where_there_are_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode, "LAST_ROWS", 8)
    assert not default_tuning(rows=8).last
    mode = KernelMode(counters=torch.zeros(64, dtype=torch.int32))
    assert default_tuning(rows=8, mode=mode).last
    assert not default_tuning(rows=9, mode=mode).last
    assert not default_tuning(rows=8, max_context=paged_decode.SHORT + 1, mode=mode).last


def test_splits_fill_the_chip_but_never_cut_below_a_chunk() -> None:
    assert default_splits(1, 8, 64, 64) == 1
    assert default_splits(1, 8, 1 << 16, 64) == paged_decode.MOST_SPLITS
    assert default_splits(256, 8, 2048, 64) == 1
    assert default_splits(256, 8, 1 << 16, 64) == 16


def test_decode_refuses_what_it_would_read_wrongly() -> None:
    q, pages = torch.zeros(2, 4, 32), torch.zeros(3, 16, 2, 32)
    tables, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="dense heads"):
        decode_attention_triton(q.transpose(0, 1), pages, pages, tables, lengths, 1.0, None, 16)
    with pytest.raises(ValueError, match="int64"):
        decode_attention_triton(q, pages, pages, tables.long(), lengths, 1.0, None, 16)
    with pytest.raises(ValueError, match="float16"):
        decode_attention_triton(q.half(), pages, pages, tables, lengths, 1.0, None, 16)
    few = KernelMode(counters=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"counts in 4 int32; there are 3"):
        decode_attention_triton(
            q, pages, pages, tables, lengths, 1.0, None, 16, DecodeTuning(splits=2, last=True), mode=few
        )
    with pytest.raises(ValueError, match="a tile of 24"):
        decode_attention_triton(q, pages, pages, tables, lengths, 1.0, None, 16, DecodeTuning(tile=24))


def run_prefill(
    place: Place,
    work: list[tuple[int, int]],
    decodes: int,
    shape: tuple[int, int, int],
    block_size: int,
    window: int | None,
    tuning: PrefillTuning,
) -> tuple[Tensor, Tensor]:
    """Rows past `decodes`, with (count, context) each; lines of the decodes must come back untouched."""
    heads, kv_heads, dim = shape
    rows, blocks, slots = make_rows(work, decodes, block_size, torch.Generator().manual_seed(7))
    there = on(rows, place.device)
    k_pages, v_pages = make_pages(place, blocks, block_size, kv_heads, dim, slots)
    q = place.randn(rows.num_tokens, heads + 3, dim)[:, 1 : heads + 1]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    prefill_attention_triton(
        q,
        k_pages,
        v_pages,
        there.block_tables[decodes:],
        there.seq_lens[decodes:],
        there.query_start_loc[decodes:],
        rows.num_tokens - decodes,
        out,
        dim**-0.5,
        window,
        tuning,
    )
    assert bool(out[:decodes].isnan().all())
    clean = [torch.nan_to_num(pages) for pages in (k_pages, v_pages)]
    with sdpa_any_shape(q.device):
        expected = paged_attention_reference(q, clean[0], clean[1], there, dim**-0.5, window)
    return out[decodes:], expected[decodes:]


MIXES = {
    "a whole prompt": ([(75, 75)], 0),
    "a piece of a prompt": ([(7, 133)], 0),
    "a single query": ([(1, 40)], 0),
    "everything together": ([(1, 9), (1, 48), (13, 13), (7, 50), (1, 1), (32, 32), (40, 99), (1, 70)], 2),
}


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("place", PLACES)
def test_prefill_is_the_reference_for_any_rows(place: Place, mix: str, window: int | None) -> None:
    work, decodes = MIXES[mix]
    out, expected = run_prefill(place, work, decodes, (4, 2, 64), 16, window, PrefillTuning(32, 32, 4, 2))
    assert_near(out, expected, place.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_prefill_is_the_reference_for_any_head(place: Place, shape: tuple[int, int, int]) -> None:
    work = [(11, 40), (5, 5)]
    out, expected = run_prefill(place, work, 0, shape, 8, None, PrefillTuning(32, 16, 4, 2))
    assert_near(out, expected, place.dtype)


@pytest.mark.parametrize("tuning", [PrefillTuning(), PrefillTuning(16, 16), PrefillTuning(64, 128, 4, 2)])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("place", EXACT)
def test_prefill_is_the_reference_at_any_tuning(
    place: Place, tuning: PrefillTuning, window: int | None
) -> None:
    work = [(70, 90), (3, 80)]
    out, expected = run_prefill(place, work, 0, (2, 2, 32), 16, window, tuning)
    assert_near(out, expected, place.dtype)


@pytest.mark.parametrize("place", [EXACT[1]])
def test_prefill_of_many_rows_and_a_long_one(place: Place) -> None:
    work = [(1 + 13 * row % 97, 200 + row) for row in range(300)] + [(2048, 20000)]
    out, expected = run_prefill(place, work, 0, (8, 2, 128), 16, None, PrefillTuning(32, 16, 8, 2))
    assert_near(out, expected, place.dtype, scale=10)


def test_prefill_refuses_what_it_would_read_wrongly() -> None:
    q, pages = torch.zeros(2, 4, 32), torch.zeros(3, 16, 2, 32)
    tables, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="offsets"):
        prefill_attention_triton(q, pages, pages, tables, lengths, offsets[:1], 2, q, 1.0, None)
    with pytest.raises(ValueError, match="a tile of 48 lines"):
        prefill_attention_triton(
            q,
            pages,
            pages,
            tables,
            lengths,
            offsets,
            2,
            torch.empty_like(q),
            1.0,
            None,
            PrefillTuning(lines=48),
        )
