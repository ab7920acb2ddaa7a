"""The Triton forms over blocks of two kinds against the references, in the interpreter or on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.kernels.attention.decode import DecodeTuning, decode_attention_triton
from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kernels.attention.paged import paged_attention_reference, sdpa_any_shape
from saccade.kernels.attention.prefill import PrefillTuning, prefill_attention_triton
from saccade.kernels.attention.quantized_kv import FORMATS, Compact
from saccade.kernels.norm_rope.qk_norm_rope import (
    HeadNorm,
    QkNormRopeTuning,
    kv_write_reference,
    qk_norm_rope_reference,
    qk_norm_rope_triton,
)
from saccade.kv_cache.groups import full_attention
from saccade.kv_cache.pages import Pages
from tests.kernels.buffers import CUDA, EXACT, PLACES, Place, assert_near, poison
from tests.kernels.test_attention import make_rows
from tests.kernels.test_triton_attention import on

interpreter = pytest.importorskip("triton.runtime.interpreter")
tl = pytest.importorskip("triton.language")
FORM = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
BLOCK = 16


def make_pages(
    place: Place, blocks: int, compact: int, form: torch.dtype, kv_heads: int, dim: int, slots: list[int]
) -> tuple[Tensor, Tensor, Compact]:
    """Written where a row owns the slot; elsewhere no numbers, or scales that are none."""
    dtype = str(place.dtype).removeprefix("torch.")
    (group,) = full_attention(1, kv_heads, dim, dtype, BLOCK)
    pages = Pages.allocate(group, blocks, place.device, compact, form)
    small = pages.layer(0)
    assert small is not None
    for tensor in (pages.k, pages.v, small.k_scale, small.v_scale):
        tensor.fill_(torch.nan)
    owned = torch.tensor(slots, device=place.device)
    k, v = (place.randn(len(slots), kv_heads, dim, seed=seed) for seed in (1, 2))
    kv_write_reference(k, v, pages.k[0], pages.v[0], owned, small)
    return pages.k[0], pages.v[0], small


def clean(k: Tensor, v: Tensor, small: Compact) -> tuple[Tensor, Tensor, Compact]:
    """The reference's padding may touch any slot."""
    k_scale, v_scale = small.k_scale.nan_to_num(), small.v_scale.nan_to_num()
    return k.nan_to_num(), v.nan_to_num(), small._replace(k_scale=k_scale, v_scale=v_scale)


def make(place: Place, work: list[tuple[int, int]], decodes: int, kv_heads: int, dim: int, form: torch.dtype,
         all_compact: bool) -> tuple[AttentionMetadata, Tensor, Tensor, Compact]:  # fmt: skip
    rows, blocks, slots = make_rows(work, decodes, BLOCK, torch.Generator().manual_seed(7))
    owned = [slot for mine in slots for slot in mine]
    # Block numbers are shuffled: about half of any row's blocks are of either kind.
    parts = make_pages(place, blocks, blocks if all_compact else blocks // 2, form, kv_heads, dim, owned)
    return on(rows, place.device), *parts


def round_as_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's float32 to E4M3 neither carries into the exponent nor rounds small values."""
    if CUDA:
        return
    plain = interpreter._convert_float

    def convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return plain(value, source, target, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(value).view(np.float32))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(value.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@FORM
@pytest.mark.parametrize("all_compact", [False, True])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, 37)])
@pytest.mark.parametrize("place", PLACES)
def test_decode_reads_both_kinds_as_the_reference_does(
    place: Place, splits: int, window: int | None, all_compact: bool, form: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    heads, kv_heads, dim, lengths = 4, 2, 64, [1, 150, 33]
    work = [(1, length) for length in lengths]
    rows, k, v, small = make(place, work, 3, kv_heads, dim, form, all_compact)
    q = place.randn(len(work), heads, dim)
    poison(monkeypatch)
    tuning = DecodeTuning(tile=32, chunk=32, splits=splits)
    out = decode_attention_triton(
        q, k, v, rows.block_tables, rows.seq_lens, dim**-0.5, window, max(lengths), tuning, compact=small
    )
    k, v, small = clean(k, v, small)
    with sdpa_any_shape(q.device):
        expected = paged_attention_reference(q, k, v, rows, dim**-0.5, window, small)
    assert_near(out, expected, place.dtype)


@FORM
@pytest.mark.parametrize("all_compact", [False, True])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("place", PLACES)
def test_prefill_reads_both_kinds_as_the_reference_does(
    place: Place, window: int | None, all_compact: bool, form: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, dim = 4, 2, 32
    work = [(19, 90), (40, 40), (3, 65)]
    rows, k, v, small = make(place, work, 0, kv_heads, dim, form, all_compact)
    tokens = sum(count for count, _ in work)
    q = place.randn(tokens, heads, dim)
    out = torch.empty_like(q)
    poison(monkeypatch)
    prefill_attention_triton(
        q, k, v, rows.block_tables, rows.seq_lens, rows.query_start_loc, tokens, out, dim**-0.5, window,
        PrefillTuning(lines=32, tile=32, warps=4, stages=2), compact=small,
    )  # fmt: skip
    k, v, small = clean(k, v, small)
    with sdpa_any_shape(q.device):
        expected = paged_attention_reference(q, k, v, rows, dim**-0.5, window, small)
    assert_near(out, expected, place.dtype)


@FORM
@pytest.mark.parametrize("compact_blocks", [2, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 72), (5, 5, 16)])
@pytest.mark.parametrize("place", PLACES)
def test_qk_norm_rope_writes_each_token_in_the_format_of_its_block(
    place: Place, heads: int, kv_heads: int, dim: int, compact_blocks: int, form: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slots = torch.tensor([3, 1 * BLOCK + 5, 2 * BLOCK, 4 * BLOCK - 1], device=place.device)
    qkv = place.randn(4, (heads + 2 * kv_heads) * dim)
    qkv[2, heads * dim : (heads + 1) * dim] = 0  # a key of zeros
    angles = torch.rand(4, dim, generator=torch.Generator().manual_seed(1)).to(place.device)
    cos, sin = angles.cos().to(place.dtype), angles.sin().to(place.dtype)
    norm = HeadNorm(place.randn(dim, seed=3), place.randn(dim, seed=4), 1e-6) if dim != 64 else None
    made = make_pages(place, 4, compact_blocks, form, kv_heads, dim, [0])
    wanted = make_pages(place, 4, compact_blocks, form, kv_heads, dim, [0])
    expected = qk_norm_rope_reference(qkv, heads, norm, cos, sin, slots, wanted[0], wanted[1], wanted[2])
    poison(monkeypatch)
    round_as_a_chip(monkeypatch)
    q = qk_norm_rope_triton(
        qkv, heads, norm, cos, sin, slots, made[0], made[1], QkNormRopeTuning(heads=4), made[2]
    )
    assert_near(q, expected, place.dtype)
    spare = 0 if compact_blocks == 4 else 1  # what the reference writes there is nobody's
    for part, target in zip(made[:2], wanted[:2], strict=True):
        count = part.shape[0] - spare
        assert torch.equal(part[:count].isnan(), target[:count].isnan())
        assert_near(part[:count].nan_to_num(), target[:count].nan_to_num(), place.dtype)
    for index in (0, 1):
        value, right = (parts[2][:2][index][:compact_blocks].float() for parts in (made, wanted))
        scale, true = (parts[2][2:4][index][:compact_blocks] for parts in (made, wanted))
        assert torch.equal(scale.isnan(), true.isnan())
        assert_near(scale.nan_to_num(), true.nan_to_num(), place.dtype)
        # A key may be the last bit apart before it is rounded: then it may fall to the neighbour.
        differ = (value - right).abs()
        assert float(differ.max()) <= (1 if form == torch.int8 else 32)
        assert float((differ > 0).float().mean()) < (0.001 if place.dtype == torch.float32 else 0.02)


@FORM
@pytest.mark.parametrize("place", EXACT)
def test_nan_is_not_hidden_by_rounding(place: Place, form: torch.dtype) -> None:
    k, v, small = make_pages(place, 1, 1, form, 1, 16, [0])
    qkv = place.randn(2, 3 * 16)
    qkv[0, 20], qkv[1, 40] = torch.nan, torch.inf
    ones = torch.ones(2, 16, device=place.device)
    slots = torch.tensor([4, 5], device=place.device)
    qk_norm_rope_triton(qkv, 1, None, ones, ones * 0, slots, k, v, compact=small)
    k_back = small.k.float()[0, :, 0] * small.k_scale[0, 0, :, None]
    v_back = small.v.float()[0, :, 0] * small.v_scale[0, 0, :, None]
    assert not bool(k_back[4].isfinite().any())
    assert not bool(v_back[5].isfinite().any())
    assert bool(k_back[5].isfinite().all())


@pytest.mark.parametrize("place", EXACT)
def test_a_padding_token_writes_neither_kind(place: Place) -> None:
    k, v, small = make_pages(place, 4, 2, torch.int8, 1, 16, [0])
    before = [tensor.clone() for tensor in (k, v, *small[:4])]
    ones = torch.ones(1, 16, device=place.device)
    slots = torch.tensor([-1], device=place.device)
    qk_norm_rope_triton(place.randn(1, 3 * 16), 1, None, ones, ones, slots, k, v, compact=small)
    for tensor, old in zip((k, v, *small[:4]), before, strict=True):
        assert torch.equal(tensor.nan_to_num() if tensor.is_floating_point() else tensor,
                           old.nan_to_num() if old.is_floating_point() else old)  # fmt: skip
