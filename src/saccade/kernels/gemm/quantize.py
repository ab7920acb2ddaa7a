"""Rows of activations in 8 bits, each with a scale of its own: the left side of a W8A8 product."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.dispatch import KernelMode, use_triton
from saccade.kernels.jit import jit, pdl_options, power_of_two, tl, wait_for_previous

FP8 = torch.float8_e4m3fn
WIDEST = 16384  # columns that one program keeps in its registers
LARGEST = {FP8: 448.0, torch.int8: 127.5}  # scale = maximum / LARGEST, as compressed-tensors has it


class QuantizedRows(NamedTuple):
    """x[m, k] = values[m, k] * scale[m]."""

    values: Tensor  # [M, K], FP8 or int8
    scale: Tensor  # [M] float32

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scale[:, None]).to(dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype, mode: KernelMode) -> QuantizedRows:
    if use_triton("quantize_rows", x, mode):
        return quantize_rows_triton(x, dtype, mode)
    return quantize_rows_reference(x, dtype)


def quantize_rows_triton(x: Tensor, dtype: torch.dtype, mode: KernelMode) -> QuantizedRows:
    rows, width = x.shape
    result = empty_rows(rows, width, dtype, x.device)
    block = min(power_of_two(width), WIDEST)
    if rows:
        _quantize_rows_kernel[(rows,)](
            x, result.values, result.scale, width, x.stride(0), BLOCK=block, WHOLE=width <= block,
            num_warps=max(1, min(16, block // 512)), **pdl_options(mode.pdl),
        )  # fmt: skip
    return result


def empty_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> QuantizedRows:
    values = torch.empty(rows, width, dtype=dtype, device=device)
    return QuantizedRows(values, torch.empty(rows, dtype=torch.float32, device=device))


def quantize_rows_reference(x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    scale = x.float().abs().amax(1) / LARGEST[dtype]
    scale = torch.where(scale > 0, scale, torch.finfo(torch.float32).eps)
    return QuantizedRows(to_eight_bits(x.float() / scale[:, None], dtype), scale)


def to_eight_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the nearest value, ties to even; beyond the range the last one."""
    if dtype == torch.int8:
        return x.round().clamp(-128, 127).to(torch.int8)
    return x.clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8)


@jit
def row_scale(largest, kind: tl.constexpr):
    """The scale of a row with this largest magnitude."""
    scale = largest / (127.5 if kind == tl.int8 else 448.0)
    return tl.where(scale > 0, scale, 1.1920928955078125e-07)


@jit
def eight_bits(x, scale, kind: tl.constexpr):
    """x / scale in `kind`: FP8, or int8 rounded to nearest even."""
    y = x / scale
    if kind == tl.int8:
        y = tl.minimum(tl.maximum(y, -128.0), 127.0)
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: what lies behind the point does not fit
    else:
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    return y.to(kind)


@jit
def store_quantized(y, values, scales, row, column, width):
    """A whole row y, float32, 0 past `width`: in 8 bits, and its scale."""
    kind: tl.constexpr = values.dtype.element_ty
    scale = row_scale(tl.max(tl.abs(y), 0), kind)
    tl.store(values + row * width + column, eight_bits(y, scale, kind), mask=column < width)
    tl.store(scales + row, scale)


@jit
def _quantize_rows_kernel(x, values, scales, width, x_stride, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
                          PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    kind: tl.constexpr = values.dtype.element_ty
    wait_for_previous(PDL)
    line = x + row * x_stride
    if WHOLE:
        y = tl.load(line + column, mask=column < width, other=0.0).to(tl.float32)
        store_quantized(y, values, scales, row, column, width)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            at = first + column
            largest = tl.maximum(
                largest, tl.abs(tl.load(line + at, mask=at < width, other=0.0).to(tl.float32))
            )
        scale = row_scale(tl.max(largest, 0), kind)
        for first in range(0, width, BLOCK):
            at = first + column
            y = tl.load(line + at, mask=at < width, other=0.0).to(tl.float32)
            tl.store(values + row * width + at, eight_bits(y, scale, kind), mask=at < width)
        tl.store(scales + row, scale)
