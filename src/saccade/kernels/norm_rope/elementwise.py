"""Elementwise kernels of a layer: residual add with the norm that follows it, SwiGLU.

Residual add and norm, in one pass:

    total = residual + x                                            rounded to x's dtype
    rms:    y = w * cast(total / sqrt(mean(total^2) + eps))         the fraction in float32
    layer:  y = cast((total - mean) / sqrt(var + eps) * w + b)      all in float32

Without a residual the total is x. Both y and the total are returned.

Bytes: 4 * width * itemsize per token (32 KiB at 4,096 in bf16); 8,192 tokens move 268 MB, 63 us at the copy
ceiling. The reference takes six launches and moves four times as much.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.gemm.quantize import QuantizedRows, empty_rows, quantize_rows, store_quantized
from saccade.kernels.jit import jit, pdl_options, power_of_two, tl, up, wait_for_previous

BLOCK = 1024  # elements of one program: 16 bytes a thread in 16 bits at four warps


@jit
def silu(x):
    """float32 in and out."""
    return x / (1.0 + tl.exp(-x))


@jit
def _silu_mul_kernel(x, out, inner, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    wait_for_previous(PDL)
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0)
    over = tl.load(x + row * stride + inner + column, mask=inside, other=0.0)
    bent = silu(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * inner + column, (bent * over.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(x: Tensor, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """[T, 2 * inner] to [T, inner]."""
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"silu_mul takes dense [T, 2 * inner], not {tuple(x.shape)} of strides {x.stride()}")
    if use_triton("silu_mul", x, mode):
        return silu_mul_triton(x, pdl=mode.pdl)
    return silu_mul_reference(x)


def silu_mul_triton(x: Tensor, block: int = BLOCK, pdl: bool = False) -> Tensor:
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    if rows:
        _silu_mul_kernel[(rows, up(inner, block))](
            x, out, inner, x.stride(0), BLOCK=block, num_warps=4, **pdl_options(pdl)
        )
    return out


def silu_mul_reference(x: Tensor) -> Tensor:
    gate, over = x.chunk(2, dim=-1)
    return F.silu(gate) * over


WIDEST = 16384  # one program holds a whole line in its registers


@jit
def scaled_by_rms(total, weight, column, width, eps, kind: tl.constexpr, BLOCK: tl.constexpr):
    """total [BLOCK] float32, zero past `width`; in `kind`, rounded before the weight."""
    factor = tl.rsqrt(tl.sum(total * total, 0) / width + eps)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    return ((total * factor).to(kind).to(tl.float32) * w).to(kind)


@jit
def _silu_mul_quantized_kernel(x, out, scales, inner, stride, BLOCK: tl.constexpr,
                               PDL: tl.constexpr):  # fmt: skip
    """A whole row by one program, as its scale is that of its largest value."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    wait_for_previous(PDL)
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0)
    over = tl.load(x + row * stride + inner + column, mask=inside, other=0.0)
    bent = silu(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    y = (bent * over.to(tl.float32)).to(gate.dtype).to(tl.float32)
    store_quantized(y, out, scales, row, column, inner)


def silu_mul_quantized(x: Tensor, dtype: torch.dtype, mode: KernelMode) -> QuantizedRows:
    """`silu_mul` into rows of 8 bits."""
    rows, inner = x.shape[0], x.shape[1] // 2
    if not use_triton("silu_mul", x, mode) or inner > WIDEST or not rows:
        return quantize_rows(silu_mul(x, mode), dtype, mode)
    result = empty_rows(rows, inner, dtype, x.device)
    block = power_of_two(inner)
    _silu_mul_quantized_kernel[(rows,)](
        x, result.values, result.scale, inner, x.stride(0), BLOCK=block,
        num_warps=max(1, min(16, block // 512)), **pdl_options(mode.pdl),
    )  # fmt: skip
    return result


@jit
def _add_norm_kernel(x, residual, weight, bias, out, scales, total_out, width, x_stride, residual_stride, eps,
                     ADD: tl.constexpr, LAYER: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
                     PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = x.dtype.element_ty
    wait_for_previous(PDL)
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_out + row * width + column, total.to(kind), mask=inside)
        total = total.to(kind).to(tl.float32)
    if LAYER:
        mean = tl.sum(total, 0) / width
        centred = tl.where(inside, total - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        y = (centred * factor * w + b).to(kind)
    else:
        y = scaled_by_rms(total, weight, column, width, eps, kind, BLOCK)
    if QUANTIZE:
        store_quantized(y.to(tl.float32), out, scales, row, column, width)
    else:
        tl.store(out + row * width + column, y, mask=inside)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,  # None: RMS norm; else layer norm
    eps: float,
    mode: KernelMode = DEFAULT_MODE,
) -> tuple[Tensor, Tensor]:
    """Of x and residual [T, width]: the normalised sum, and the sum."""
    _check(x, residual, weight, bias)
    if use_triton("add_norm", x, mode):
        return add_norm_triton(x, residual, weight, bias, eps, pdl=mode.pdl)
    return add_norm_reference(x, residual, weight, bias, eps)


def add_norm_quantized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    mode: KernelMode,
) -> tuple[QuantizedRows, Tensor]:
    """`add_norm` into rows of 8 bits."""
    _check(x, residual, weight, bias)
    if use_triton("add_norm", x, mode):
        rows = empty_rows(x.shape[0], x.shape[1], dtype, x.device)
        return rows, add_norm_triton(x, residual, weight, bias, eps, pdl=mode.pdl, quantized=rows)[1]
    normed, total = add_norm(x, residual, weight, bias, eps, mode)
    return quantize_rows(normed, dtype, mode), total


def add_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else residual + x
    if bias is None:
        return rms_norm_reference(total, weight, eps), total
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of the last axis of x [..., d]; the weight is [d], or [heads, d]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_norm_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    warps: int | None = None,  # None: 8 elements a thread
    pdl: bool = False,
    quantized: QuantizedRows | None = None,  # receives the result instead
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    if width > WIDEST:
        raise ValueError(f"a line of {width} does not fit one program; the widest is {WIDEST}")
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if quantized is None else quantized.values
    total = x if residual is None else torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    if rows:
        _add_norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, weight if bias is None else bias, out,
            x if quantized is None else quantized.scale, total, width, x.stride(0),
            0 if residual is None else residual.stride(0), eps, ADD=residual is not None,
            LAYER=bias is not None, QUANTIZE=quantized is not None, BLOCK=block,
            num_warps=warps or max(1, min(16, block // 256)), **pdl_options(pdl),
        )  # fmt: skip
    return out, total


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.stride(1) != 1:
        raise ValueError(f"a norm of {tuple(x.shape)} cannot be scaled by {tuple(weight.shape)}")
    if x.dtype != weight.dtype:
        raise ValueError(f"a norm of {x.dtype} with a weight of {weight.dtype}; they must be the same")
    if bias is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        raise ValueError(f"a weight of {tuple(weight.shape)} with a bias of {tuple(bias.shape)}")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1
    ):
        raise ValueError(
            f"the residual is {tuple(residual.shape)} {residual.dtype}, not {tuple(x.shape)} {x.dtype}"
        )
