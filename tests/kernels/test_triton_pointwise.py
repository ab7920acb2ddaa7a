"""The Triton forms of norms, rotation, cache writes and activations against their references."""

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention.paged import copy_block, copy_block_reference, copy_block_triton
from saccade.kernels.gemm.skinny import SkinnyTuning, skinny_partials, skinny_triton
from saccade.kernels.norm_rope.elementwise import (
    add_norm,
    add_norm_reference,
    add_norm_triton,
    silu_mul,
    silu_mul_reference,
    silu_mul_triton,
)
from saccade.kernels.norm_rope.qk_norm_rope import (
    HeadNorm,
    QkNormRopeTuning,
    qk_norm_rope,
    qk_norm_rope_reference,
    qk_norm_rope_triton,
)
from saccade.kernels.norm_rope.rope import (
    apply_rotary_reference,
    apply_rotary_triton,
    interleaved_axes,
    rotary_angles_reference,
    rotary_angles_triton,
)
from tests.kernels.buffers import EXACT, PLACES, Place, assert_near, poison


def strided(place: Place, rows: int, width: int, seed: int = 0) -> Tensor:
    """Lines further apart than they are wide."""
    return place.randn(rows, width + 24, seed=seed)[:, 8 : width + 8]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [64, 72, 1000])
@pytest.mark.parametrize("place", PLACES)
def test_residual_and_rms_norm_are_the_reference(
    place: Place, width: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    x, weight = strided(place, rows, width), place.randn(width, seed=2)
    for residual in (None, strided(place, rows, width, seed=1)):
        out, total = add_norm_triton(x, residual, weight, None, 1e-5)
        expected, stream = add_norm_reference(x, residual, weight, None, 1e-5)
        assert_near(out, expected, place.dtype)
        assert torch.equal(total, stream)


@pytest.mark.parametrize("width", [64, 72, 1152])
@pytest.mark.parametrize("place", PLACES)
def test_residual_and_layer_norm_are_the_reference(
    place: Place, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    x, weight, bias = strided(place, 3, width) + 5, place.randn(width, seed=2), place.randn(width, seed=3)
    for residual in (None, strided(place, 3, width, seed=1)):
        out, total = add_norm_triton(x, residual, weight, bias, 1e-6)
        expected, stream = add_norm_reference(x, residual, weight, bias, 1e-6)
        assert_near(out, expected, place.dtype)
        assert torch.equal(total, stream)


@pytest.mark.parametrize("inner", [8, 100, 300])
@pytest.mark.parametrize("place", PLACES)
def test_silu_mul_is_the_reference(place: Place, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = 8 * strided(place, 3, 2 * inner)
    assert_near(silu_mul_triton(x, 128), silu_mul_reference(x), place.dtype)


@pytest.mark.parametrize("dim", [64, 72])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_rotation_is_the_reference(
    place: Place, wide: bool, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    packed = place.randn(3, 9, dim)
    angles = torch.rand(3, dim, generator=torch.Generator().manual_seed(1)).to(place.device)
    cos, sin = (part if wide else part.to(place.dtype) for part in (angles.cos(), angles.sin()))
    expected = apply_rotary_reference(packed[:, :6], cos, sin)
    out = apply_rotary_triton(packed[:, :6], cos, sin, lines=4)
    assert_near(out, expected, place.dtype)


@pytest.mark.parametrize("section", [None, (24, 20, 20), (8, 5, 5)])
@pytest.mark.parametrize("place", EXACT)
def test_angles_are_the_reference(
    place: Place, section: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = 64 if section is None else sum(section)
    eighths = torch.randint(0, 40000, (3, 17), generator=torch.Generator().manual_seed(0))
    positions = (eighths / 8).to(place.device)  # registered positions are fractions
    frequencies = (5e6 ** -(torch.arange(half) / half)).to(place.device)
    axes = None if section is None else torch.tensor(interleaved_axes(section, half), device=place.device)
    expected = rotary_angles_reference(positions, frequencies, axes, place.dtype)
    poison(monkeypatch)
    made = rotary_angles_triton(positions, frequencies, axes, place.dtype)
    for part, wanted in zip(made, expected, strict=True):
        torch.testing.assert_close(part, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 72), (8, 8, 16), (5, 5, 96)])
@pytest.mark.parametrize("place", PLACES)
def test_qk_norm_rope_is_the_reference_and_touches_only_its_slots(
    place: Place, heads: int, kv_heads: int, dim: int, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, blocks, size = 2, 2, 8
    qkv = strided(place, tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(tokens, dim, generator=torch.Generator().manual_seed(1)).to(place.device)
    cos, sin = angles.cos().to(place.dtype), angles.sin().to(place.dtype)
    norm = HeadNorm(place.randn(dim, seed=3), place.randn(dim, seed=4), 1e-6) if normed else None
    slots = torch.randperm(blocks * size, generator=torch.Generator().manual_seed(2))[:tokens].to(
        place.device
    )
    shape = (blocks, size, kv_heads, dim)
    wanted = [torch.full(shape, torch.nan, dtype=place.dtype, device=place.device) for _ in "kv"]
    made = [part.clone() for part in wanted]
    expected = qk_norm_rope_reference(qkv, heads, norm, cos, sin, slots, wanted[0], wanted[1])
    poison(monkeypatch)
    q = qk_norm_rope_triton(qkv, heads, norm, cos, sin, slots, made[0], made[1], QkNormRopeTuning(heads=4))
    assert_near(q, expected, place.dtype)
    for part, target in zip(made, wanted, strict=True):
        mine, theirs = part.flatten(0, 1), target.flatten(0, 1)
        assert_near(mine[slots], theirs[slots], place.dtype)
        assert torch.equal(mine.isnan(), theirs.isnan())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "tokens", "splits"), [(4, 2, 64, 3, 2), (3, 1, 72, 1, 5)]
)
@pytest.mark.parametrize("place", PLACES)
def test_partial_sums_of_the_projection_give_the_bits_of_their_product(
    place: Place,
    heads: int,
    kv_heads: int,
    dim: int,
    tokens: int,
    splits: int,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: which way a step goes may not change its tokens."""
    poison(monkeypatch)
    width, depth = (heads + 2 * kv_heads) * dim, 160
    x, weight = place.randn(tokens, depth), place.randn(width, depth, seed=1) * depth**-0.5
    added = place.randn(width, seed=2) if bias else None
    tuning = SkinnyTuning(16, 32, splits)
    parts = skinny_partials(x, weight, added, tuning)
    assert parts.sums.shape == (splits if splits < 5 else 5, tokens, width)
    whole, _ = skinny_triton(x, weight, bias=added, tuning=tuning)
    assert torch.equal(parts.reduce(), whole)
    angles = torch.rand(tokens, dim, generator=torch.Generator().manual_seed(1)).to(place.device)
    rest = angles.cos().to(place.dtype), angles.sin().to(place.dtype)
    norm = HeadNorm(place.randn(dim, seed=3), place.randn(dim, seed=4), 1e-6)
    slots = torch.arange(3, 3 + tokens, device=place.device)
    pages = torch.zeros(2, 2, 2, 8, kv_heads, dim, dtype=place.dtype, device=place.device)
    apart = qk_norm_rope_triton(whole, heads, norm, *rest, slots, pages[0, 0], pages[0, 1])
    together = qk_norm_rope_triton(parts, heads, norm, *rest, slots, pages[1, 0], pages[1, 1])
    assert torch.equal(apart, together)
    assert torch.equal(pages[0], pages[1])
    assert bool(pages[0].any())
    reference = qk_norm_rope_reference(parts.reduce(), heads, norm, *rest, slots, pages[0, 0], pages[0, 1])
    assert_near(together, reference, place.dtype)


@pytest.mark.parametrize("place", EXACT)
def test_a_padding_token_writes_no_page(place: Place) -> None:
    pages = torch.full((2, 2, 8, 1, 16), torch.nan, device=place.device)
    slots = torch.tensor([-1, 3], device=place.device)
    angles = torch.ones(2, 16, device=place.device)
    qk_norm_rope_triton(place.randn(2, 4 * 16), 2, None, angles, angles, slots, pages[0], pages[1])
    written = ~pages.isnan().flatten(3).any(-1).flatten(1)
    assert written.nonzero().tolist() == [[0, 3], [1, 3]]


def test_wrappers_run_the_reference_on_the_cpu_and_refuse_what_does_not_fit() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(add_norm(x, x, weight, None, 1e-6)[1], x + x)
    assert torch.equal(add_norm(x, None, weight, weight, 1e-6)[1], x)
    assert torch.equal(silu_mul(x), silu_mul_reference(x))
    with pytest.raises(ValueError, match=r"\(7,\)"):
        add_norm(x, None, weight[:7], None, 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_norm(x, x[:2], weight, None, 1e-6)
    with pytest.raises(ValueError, match="2 \\* inner"):
        silu_mul(x[:, :7])
    pages, slots = torch.zeros(2, 8, 1, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"need \[T, 8\]"):
        qk_norm_rope(x[:, :6], 2, None, x[:, :2], x[:, :2], slots, pages, pages)
    angles = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="int32"):
        qk_norm_rope(x, 2, None, angles, angles, slots.int(), pages, pages)


@pytest.mark.parametrize("inner", [(16, 2, 64), (4, 8), (3, 5, 40), (16, 8, 128)], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_block_is_copied_in_all_layers_and_nothing_else_is_touched(
    place: Place, inner: tuple[int, ...]
) -> None:
    for kind in (place.dtype, torch.uint8):
        k, v = ((50 * place.randn(3, 5, *inner, seed=seed)).abs().to(kind) for seed in (0, 1))
        for source, target in ((0, 4), (3, 1), (2, 2)):
            expected = k.clone(), v.clone()
            copy_block_reference(*expected, source, target)
            copy_block_triton(k, v, source, target)
            assert torch.equal(k, expected[0])
            assert torch.equal(v, expected[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_block_is_copied_where_layers_are_further_apart_than_32_bits_count() -> None:
    k = torch.zeros(3, 70_000, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    k[:, 69_999], v[:, 69_999] = 1.0, 2.0
    copy_block(k, v, 69_999, 68_000)
    written = k.amax((2, 3, 4)).nonzero()[:, 1]
    assert written.tolist() == [68_000, 69_999] * 3
    assert torch.equal(k[:, 68_000], k[:, 69_999])
    assert torch.equal(v[:, 68_000], v[:, 69_999])


def test_an_impossible_block_copy_is_refused() -> None:
    k = torch.zeros(2, 3, 8)
    for source, target in ((0, 3), (-1, 0)):
        with pytest.raises(ValueError, match="there are 3"):
            copy_block(k, k, source, target)
    with pytest.raises(ValueError, match="alike"):
        copy_block(k, k[:, :, :4], 0, 1)
    with pytest.raises(ValueError, match="dense"):
        copy_block(k[:, :2], k[:, :2], 0, 1)
