"""Products with quantised weights equal the product with the dequantised ones."""

import pytest
import torch
from torch import Tensor

from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import (
    FP8,
    QuantizedRows,
    quantize_rows_reference,
    quantize_rows_triton,
)
from saccade.kernels.gemm.quantized_linear import eight_bit_product, four_bit_product
from saccade.kernels.gemm.split_k import Epilogue, Norm, Reduced
from saccade.kernels.norm_rope.elementwise import (
    add_norm_quantized,
    add_norm_triton,
    silu_mul_quantized,
    silu_mul_triton,
)
from saccade.quantization.weights import EightBitWeight, FourBitWeight, apply_epilogue
from tests.kernels.buffers import PLACES, Place, assert_near, needs_triton

MODE = KernelMode("triton")
REFERENCE = KernelMode("torch")
SIXTEEN_BIT = [PLACES[1], *PLACES[3:]]


def epilogues(place: Place, rows: int, columns: int) -> list[Epilogue]:
    residual, weight = place.randn(rows, columns, seed=5), place.randn(columns, seed=6)
    return [
        Epilogue(),
        Epilogue(place.randn(columns, seed=7)),
        Epilogue(gated=True),
        Epilogue(None, False, residual, Norm(weight, 1e-6)),
        Epilogue(None, False, residual, Norm(weight, 1e-6, torch.int8)),
    ]


def assert_same(made: Reduced, expected: Reduced, dtype: torch.dtype) -> None:
    assert_near(made.total, expected.total, dtype)
    if made.scale is None or expected.scale is None:
        assert made.scale is expected.scale
        assert_near(made.out, expected.out, dtype, scale=2)
        return
    rows, wanted = QuantizedRows(made.out, made.scale), QuantizedRows(expected.out, expected.scale)
    step = float(wanted.scale.max())
    assert (rows.dequantize(torch.float32) - wanted.dequantize(torch.float32)).abs().max() <= 1.1 * step


@needs_triton
@pytest.mark.parametrize("place", SIXTEEN_BIT)
@pytest.mark.parametrize("kind", [torch.int8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("width", [96, 20000])
def test_rows_are_quantised_as_by_the_reference(place: Place, kind: torch.dtype, width: int) -> None:
    if kind == FP8 and place.device == "cpu":
        pytest.skip("the interpreter does not round to FP8")
    x = place.randn(3, width)
    x[1] = 0
    made, expected = quantize_rows_triton(x, kind, MODE), quantize_rows_reference(x, kind)
    assert torch.allclose(made.scale, expected.scale, rtol=1e-6)
    gap = (made.values.float() - expected.values.float()).abs() * expected.scale[:, None]
    assert gap.max() <= x.abs().max() * (1 / 16 if kind == FP8 else 1 / 127)
    assert (gap > 0).float().mean() < 0.01  # where the quotient lies on a border


@needs_triton
@pytest.mark.parametrize("place", SIXTEEN_BIT)
@pytest.mark.parametrize("kind", [torch.int8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 136, 272), (20, 264, 1040), (150, 72, 128)])
def test_eight_bit_products_are_the_reference(
    place: Place, kind: torch.dtype, blocks: bool, rows: int, columns: int, depth: int
) -> None:
    if place.device == "cpu" and (kind == FP8 or rows > 100):
        pytest.skip("the interpreter does not multiply FP8, and takes a while")
    values = (place.randn(columns, depth, seed=1).float() * 40).clamp(-127, 127).to(torch.int8).to(kind)
    shape = (-(-columns // 128), -(-depth // 128)) if blocks else (columns,)
    scale = (place.randn(*shape, seed=2).float().abs() + 1) / 100 / depth**0.5
    weight = EightBitWeight(values, scale, "token", place.dtype)
    x = quantize_rows_reference(place.randn(rows, depth), kind)
    dense = x.dequantize(torch.float32) @ weight.dequantize(torch.float32).T
    for epilogue in epilogues(place, rows, columns):
        made = eight_bit_product(x, weight.kernel_weight, place.dtype, epilogue, MODE)
        assert_same(made, apply_epilogue(dense.to(place.dtype), epilogue, REFERENCE), place.dtype)


def four_bit(place: Place, rows: int, columns: int, group: int, zero: bool) -> FourBitWeight:
    generator = torch.Generator().manual_seed(3)
    groups = -(-columns // group)
    q = torch.randint(0, 16, (rows, columns), generator=generator)
    zeros: Tensor | None = None
    if zero:
        zeros = torch.randint(0, 16, (groups, rows), generator=generator).to(torch.uint8).to(place.device)
    scale = (place.randn(groups, rows, seed=2).abs() + 1) / 16 / columns**0.5
    return FourBitWeight.pack(q.to(place.device), scale, zeros, group)


@needs_triton
@pytest.mark.parametrize("place", SIXTEEN_BIT)
@pytest.mark.parametrize(("group", "zero"), [(128, False), (128, True), (32, False), (2048, True)])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 136, 640), (20, 264, 1024)])
def test_four_bit_products_are_the_reference(
    place: Place, group: int, zero: bool, rows: int, columns: int, depth: int
) -> None:
    weight = four_bit(place, columns, depth, group, zero)
    x = place.randn(rows, depth)
    dense = x.float() @ weight.dequantize(torch.float32).T
    for epilogue in epilogues(place, rows, columns):
        made = four_bit_product(x, weight.kernel_weight, epilogue, MODE)
        assert_same(made, apply_epilogue(dense.to(place.dtype), epilogue, REFERENCE), place.dtype)


def test_packed_nibbles_are_read_back() -> None:
    place = Place("cpu", torch.float32)
    for group, zero in ((128, True), (64, False)):
        weight = four_bit(place, 24, 600, group, zero)
        q = torch.randint(0, 16, (24, 600), generator=torch.Generator().manual_seed(3))
        assert torch.equal(weight.quantized(), q.to(torch.int32))


@needs_triton
@pytest.mark.parametrize("place", SIXTEEN_BIT)
def test_norm_and_swiglu_quantise_as_two_kernels_do(place: Place) -> None:
    x, residual, weight = place.randn(5, 272), place.randn(5, 272, seed=1), place.randn(272, seed=2)
    made, total = add_norm_quantized(x, residual, weight, None, 1e-6, torch.int8, MODE)
    normed, expected = add_norm_triton(x, residual, weight, None, 1e-6)
    assert torch.equal(total, expected)
    gated = silu_mul_quantized(x, torch.int8, MODE)
    for rows, plain in ((made, normed), (gated, silu_mul_triton(x))):
        wanted = quantize_rows_triton(plain, torch.int8, MODE)
        assert torch.equal(rows.values, wanted.values)
        assert torch.equal(rows.scale, wanted.scale)
