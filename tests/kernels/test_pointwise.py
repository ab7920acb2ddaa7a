"""Norm, rotary positions and cache writes against their formulas in float64."""

import math

import pytest
import torch

from saccade.kernels.norm_rope.elementwise import add_norm, rms_norm_reference
from saccade.kernels.norm_rope.qk_norm_rope import kv_write_reference, qk_norm_rope
from saccade.kernels.norm_rope.rope import apply_rotary, interleaved_axes, rotary_angles


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 4, 16), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_its_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (30 * torch.randn(shape, generator=generator)).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    out = rms_norm_reference(x, weight, 1e-3)
    assert out.dtype == dtype
    close = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


def test_rms_norm_rounds_before_the_weight() -> None:
    """In bfloat16 the order of rounding and scaling shows; checkpoints were trained with this one."""
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.full((64,), 1.3).bfloat16()
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(rms_norm_reference(x, weight, 1e-6), weight * normed)


def test_rms_norm_takes_a_weight_per_head() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 3, 16, generator=generator), torch.randn(3, 16, generator=generator)
    each = [rms_norm_reference(x[:, head], weight[head], 1e-6) for head in range(3)]
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-6), torch.stack(each, dim=1))


def test_rms_norm_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(7,\)"):
        add_norm(torch.zeros(2, 8), None, torch.zeros(7), None, 1e-6)
    with pytest.raises(ValueError, match="bfloat16"):
        add_norm(torch.zeros(2, 8), None, torch.zeros(8).bfloat16(), None, 1e-6)


@pytest.mark.parametrize(("section", "half"), [((4, 2, 2), 8), ((24, 20, 20), 64), ((8, 0, 0), 8)])
def test_interleaved_axes_give_each_axis_its_share(section: tuple[int, int, int], half: int) -> None:
    axes = interleaved_axes(section, half)
    assert tuple(axes.count(axis) for axis in range(3)) == section
    assert all(axes[index] == index % 3 for index in range(3 * min(section)))


def test_interleaved_axes_refuse_shares_that_do_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"\[4, 2, 3\].*8"):
        interleaved_axes((4, 2, 3), 8)


def test_rotation_is_its_formula_on_three_axes() -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 3000, (3, 9), generator=generator)
    frequencies = 10000.0 ** -(torch.arange(8) / 8)
    axes = torch.tensor(interleaved_axes((4, 2, 2), 8))
    x = torch.randn(9, 2, 16, generator=generator)
    cos, sin = rotary_angles(positions, frequencies, axes, torch.float32)
    out = apply_rotary(x, cos, sin)
    for token in range(9):
        for j in range(8):
            angle = float(positions[axes[j], token]) * float(frequencies[j])
            first, second = x[token, :, j].double(), x[token, :, j + 8].double()
            # float32 angles of some thousand radians are good to about 1e-4
            torch.testing.assert_close(
                out[token, :, j].double(),
                first * math.cos(angle) - second * math.sin(angle),
                atol=2e-3,
                rtol=0,
            )
            torch.testing.assert_close(
                out[token, :, j + 8].double(),
                second * math.cos(angle) + first * math.sin(angle),
                atol=2e-3,
                rtol=0,
            )


def test_text_positions_rotate_alike_with_one_axis_and_with_three() -> None:
    positions = torch.arange(20).expand(3, -1)
    frequencies = 10000.0 ** -(torch.arange(8) / 8)
    axes = torch.tensor(interleaved_axes((4, 2, 2), 8))
    one = rotary_angles(positions, frequencies, None, torch.float32)
    three = rotary_angles(positions, frequencies, axes, torch.float32)
    assert torch.equal(one[0], three[0])
    assert torch.equal(one[1], three[1])


def test_rotation_keeps_dtype_and_computes_in_the_angles_precision() -> None:
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = torch.rand(4, 8)
    out = apply_rotary(x, angles.cos(), angles.sin())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rotary(x.float(), angles.cos(), angles.sin()).bfloat16())


def test_rotation_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="even dim"):
        apply_rotary(torch.zeros(2, 1, 7), torch.zeros(2, 7), torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"\(2, 1, 8\) with angles \(3, 8\)"):
        apply_rotary(torch.zeros(2, 1, 8), torch.zeros(3, 8), torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"\[3, T\]"):
        rotary_angles(torch.zeros(2, 4), torch.ones(4), None, torch.float32)


@pytest.mark.parametrize("tokens", [1, 5, 24])
def test_kv_write_puts_each_token_in_its_slot_and_touches_nothing_else(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(tokens, 6, 16, generator=generator)
    k, v = fused[:, 2:4], fused[:, 4:]  # strided, as they come
    k_pages, v_pages = torch.full((2, 7, 4, 2, 16), torch.nan)
    slots = torch.randperm(28, generator=generator)[:tokens]
    kv_write_reference(k, v, k_pages, v_pages, slots)
    others = torch.ones(28, dtype=torch.bool)
    others[slots] = False
    for new, pages in ((k, k_pages), (v, v_pages)):
        flat = pages.view(28, 2, 16)
        assert torch.equal(flat[slots], new)
        assert flat[others].isnan().all()


def test_the_kv_write_of_qk_norm_rope_refuses_what_does_not_fit() -> None:
    pages, slots = torch.zeros(7, 4, 2, 16), torch.zeros(3, dtype=torch.int64)
    qkv, cos = torch.zeros(3, 5 * 16), torch.zeros(3, 16)
    with pytest.raises(ValueError, match=r"need \[T, 80\], not \(3, 72\)"):
        qk_norm_rope(qkv[:, :72], 1, None, cos, cos, slots, pages, pages)
    with pytest.raises(ValueError, match="3 tokens with slots"):
        qk_norm_rope(qkv, 1, None, cos, cos, slots[:2], pages, pages)
    with pytest.raises(ValueError, match="int32"):
        qk_norm_rope(qkv, 1, None, cos, cos, slots.int(), pages, pages)
    sliced = torch.zeros(7, 4, 2, 32)[..., :16]
    with pytest.raises(ValueError, match="contiguous"):
        qk_norm_rope(qkv, 1, None, cos, cos, slots, sliced, sliced)
