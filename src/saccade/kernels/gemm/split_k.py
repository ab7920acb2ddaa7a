"""The two kernels of `skinny`: multiply a split of K, and add the splits up with the epilogue."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.gemm.quantize import store_quantized
from saccade.kernels.jit import (
    jit,
    jit_unspecialized,
    pdl_options,
    power_of_two,
    prefetch_l2,
    tl,
    up,
    wait_for_previous,
)
from saccade.kernels.norm_rope.elementwise import WIDEST, scaled_by_rms, silu

REDUCE_BLOCK = 1024  # columns of one program that adds partial sums


class Norm(NamedTuple):
    """An RMS norm behind a product; `quantized`: into rows of these 8 bits."""

    weight: Tensor  # [N]
    eps: float
    quantized: torch.dtype | None = None


class Epilogue(NamedTuple):
    """What follows a product: + bias; silu(gate) * up; residual + y and the norm of that sum."""

    bias: Tensor | None = None
    gated: bool = False  # the caller quantises the result, if it wants that
    residual: Tensor | None = None
    norm: Norm | None = None


class SplitKPartials(NamedTuple):
    """A product whose splits of K are not added up yet: y = cast(sums[0] + sums[1] + ... + bias)."""

    sums: Tensor  # [splits, M, N] float32
    bias: Tensor | None
    dtype: torch.dtype  # of y

    @property
    def shape(self) -> torch.Size:
        return self.sums.shape[1:]

    def reduce(self) -> Tensor:
        total = self.sums[0]
        for part in self.sums[1:]:
            total = total + part
        return (total if self.bias is None else total + self.bias.float()).to(self.dtype)


@jit
def _multiply(x, w, acc, k, n, m, rows, columns, depth, x_stride, MODE: tl.constexpr, LINES: tl.constexpr,
              DEPTH: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """acc + x[:, k ..] W[n, k ..]^T for one piece of K; acc [lines, n], [n, lines] or [n, depth] by MODE."""
    at = k + tl.arange(0, DEPTH)
    here = n < columns
    w_at = w + n.to(tl.int64)[:, None] * depth + at[None, :]
    if EVEN:
        weights = tl.load(w_at, mask=here[:, None], other=0.0, eviction_policy="evict_first")
    else:
        weights = tl.load(w_at, mask=here[:, None] & (at < depth)[None, :], other=0.0)
    if MODE == "fma":
        values = tl.load(x + at, mask=at < depth, other=0.0)
        acc += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    else:
        real = (m < rows)[:, None] & (at < depth)[None, :]
        values = tl.load(x + m.to(tl.int64)[:, None] * x_stride + at[None, :], mask=real, other=0.0)
        if MODE == "swap":
            acc = tl.dot(weights, tl.trans(values), acc, input_precision="ieee")
        else:
            acc = tl.dot(values, tl.trans(weights), acc, input_precision="ieee")
    return acc


@jit
def _settled(acc, MODE: tl.constexpr):
    """The sums as [lines, columns]."""
    if MODE == "fma":
        sums = tl.sum(acc, 1)[None, :]
    elif MODE == "swap":
        sums = tl.trans(acc)
    else:
        sums = acc
    return sums


@jit_unspecialized("rows", "steps")
def skinny_kernel(x, w, bias, out, rows, columns, depth, steps, x_stride, LINES: tl.constexpr,
                  COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MODE: tl.constexpr, GATED: tl.constexpr,
                  BIAS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
                  AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`steps` pieces of K for COLUMNS outputs; into `out` [rows, columns], or its sums as a part."""
    split = tl.program_id(1)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(2) * LINES + tl.arange(0, LINES)
    start = split * steps * DEPTH
    stop = tl.minimum(start + steps * DEPTH, depth)
    total = columns * (2 if GATED else 1)  # rows of W
    if PDL and AHEAD > 0:
        prefetch_l2(w + n.to(tl.int64) * depth + start, n < columns, stop - start, AHEAD)
    wait_for_previous(PDL)
    A: tl.constexpr = LINES if MODE == "dot" else COLUMNS
    B: tl.constexpr = COLUMNS if MODE == "dot" else (LINES if MODE == "swap" else DEPTH)
    acc = tl.zeros([A, B], tl.float32)
    over = tl.zeros([A, B], tl.float32)
    for k in tl.range(start, stop, DEPTH, num_stages=STAGES):
        acc = _multiply(x, w, acc, k, n, m, rows, columns, depth, x_stride, MODE, LINES, DEPTH, EVEN)
        if GATED:
            over = _multiply(x, w, over, k, n + columns, m, rows, total, depth, x_stride, MODE, LINES, DEPTH,
                             EVEN)  # fmt: skip
    y = _settled(acc, MODE)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    if PARTS:
        at = (split * rows + m).to(tl.int64)[:, None] * total + n[None, :]
        tl.store(out + at, y, mask=inside)
        if GATED:
            tl.store(out + at + columns, _settled(over, MODE), mask=inside)
    else:
        kind = out.dtype.element_ty
        if BIAS:
            y += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        if GATED:
            bent = silu(y.to(kind).to(tl.float32)).to(kind).to(tl.float32)
            y = bent * _settled(over, MODE).to(kind).to(tl.float32)
        tl.store(out + m.to(tl.int64)[:, None] * columns + n[None, :], y.to(kind), mask=inside)


@jit_unspecialized("rows")
def reduce_kernel(parts, bias, residual, weight, out, scales, stream, rows, columns, residual_stride, eps,
                  SPLITS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
                  QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add the parts of BLOCK columns of one row in their order, then the epilogue. NORM: residual and norm,
    QUANTIZE: into 8 bits with a scale per row; both of the whole row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    inside = n < columns
    total = columns * (2 if GATED else 1)
    kind = stream.dtype.element_ty
    y = tl.zeros([BLOCK], tl.float32)
    over = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (split * rows + row) * total + n
        y += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        if GATED:
            over += tl.load(at + columns, mask=inside, other=0.0, cache_modifier=".cg")
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    y = y.to(kind).to(tl.float32)
    if GATED:
        y = silu(y).to(kind).to(tl.float32) * over.to(kind).to(tl.float32)
    if NORM:
        y += tl.load(residual + row * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(stream + row * columns + n, y.to(kind), mask=inside)
        y = scaled_by_rms(y.to(kind).to(tl.float32), weight, n, columns, eps, kind, BLOCK)
    if QUANTIZE:
        store_quantized(y.to(kind).to(tl.float32), out, scales, row, n, columns)
    else:
        tl.store(out + row * columns + n, y.to(kind), mask=inside)


class Reduced(NamedTuple):
    """The sums of a product with their epilogue."""

    out: Tensor  # [M, N]
    scale: Tensor | None  # [M] if the norm quantises
    total: Tensor  # [M, N]: before the norm; `out` without one


def reduce_parts(parts: Tensor, dtype: torch.dtype, epilogue: Epilogue, pdl: bool) -> Reduced:
    """Of parts [splits, M, N], or [splits, M, 2 * N] of a gated product."""
    bias, gated, residual, norm = epilogue
    rows, columns = parts.shape[1], parts.shape[2] // (2 if gated else 1)
    if (norm is None) != (residual is None):
        raise ValueError("a residual is added with the norm that follows it; give both or neither")
    if norm is not None and (norm.weight.shape != (columns,) or columns > WIDEST):
        raise ValueError(f"{columns} columns (at most {WIDEST}) with a norm of {tuple(norm.weight.shape)}")
    total = torch.empty(rows, columns, dtype=dtype, device=parts.device)
    out, scale, block = total, None, REDUCE_BLOCK
    if norm is not None:
        block = power_of_two(columns)
        out = torch.empty_like(total, dtype=norm.quantized or dtype)
        scale = torch.empty(rows, device=parts.device) if norm.quantized else None
    reduce_kernel[(rows, up(columns, block))](
        parts, parts if bias is None else bias, parts if residual is None else residual,
        norm.weight if norm else parts, out, parts if scale is None else scale, total, rows, columns,
        0 if residual is None else residual.stride(0), norm.eps if norm else 0.0,
        SPLITS=parts.shape[0], GATED=gated, BIAS=bias is not None, NORM=norm is not None,
        QUANTIZE=scale is not None, BLOCK=block, num_warps=max(1, min(16, block // 256)), **pdl_options(pdl),
    )  # fmt: skip
    return Reduced(out, scale, total)
