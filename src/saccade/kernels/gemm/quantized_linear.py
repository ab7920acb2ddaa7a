"""Products with quantised weights: up to 256 rows by our kernels, beyond by the library's."""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import QuantizedRows
from saccade.kernels.gemm.quantized import eight_bit_kernel, four_bit_kernel
from saccade.kernels.gemm.split_k import Epilogue, Reduced, SplitKPartials, reduce_parts
from saccade.kernels.gemm.tuning_model import Product, ProductTuning
from saccade.kernels.jit import INTERPRETED, pdl_options, up

MOST_ROWS = 256
PROGRAMS = 256  # that keep 132 multiprocessors reading: two each
SLICE = 128  # int16 values in a run of 4-bit weights
BLOCK = 128  # columns of W in a block that has a scale of its own


class EightBit(NamedTuple):
    """W [N, K] in FP8 or int8 with its scales: [N], or [ceil(N / 128), ceil(K / 128)]."""

    values: Tensor
    scale: Tensor


class FourBit(NamedTuple):
    """W in nibbles; see `FourBitWeight`."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int
    columns: int


def eight_bit_tuning(rows: int, w: EightBit, gated: bool, mode: KernelMode) -> ProductTuning:
    """One tuning for all numbers of rows in the deterministic mode."""
    total, depth = w.values.shape
    product = Product("int8" if w.values.dtype == torch.int8 else "fp8", rows, total, depth, gated)
    t = fixed_tuning(product) if mode.deterministic else _by_table(product, mode)
    return t._replace(depth=min(t.depth, BLOCK)) if w.scale.dim() == 2 else t


def four_bit_tuning(rows: int, w: FourBit, gated: bool, mode: KernelMode) -> ProductTuning:
    product = Product("int4", rows, w.packed.shape[0], w.columns, gated)
    t = fixed_tuning(product) if mode.deterministic else _by_table(product, mode)
    return t._replace(depth=min(t.depth, SLICE, w.group & -w.group))


def _by_table(product: Product, mode: KernelMode) -> ProductTuning:
    return mode.tunings.choose(product) or fixed_tuning(product)


def fixed_tuning(product: Product) -> ProductTuning:
    """For every number of rows: each row's sums are then in one order whatever the batch."""
    four = product.format == "int4"
    piece, lines = (64, 64) if four else (128, 128 if product.columns >= PROGRAMS * 64 else 64)
    tiles = up(product.columns, piece) * up(MOST_ROWS, lines)
    splits = max(1, min(4, up(PROGRAMS, tiles), product.depth // 1024))
    return ProductTuning(piece, lines, 64 if four else 128, splits, 3 if four else 6, 4 if four else 8)


def eight_bit_product(
    x: QuantizedRows,
    w: EightBit,
    dtype: torch.dtype,
    epilogue: Epilogue,
    mode: KernelMode,
    tuning: ProductTuning | None = None,
) -> Reduced:
    """y [M, N] in `dtype`, for 1 to MOST_ROWS rows; any number in the deterministic mode."""
    t = tuning or eight_bit_tuning(x.values.shape[0], w, epilogue.gated, mode)
    parts = _eight_bit_parts(x, w, dtype, epilogue, t, mode)
    return _finish(parts, dtype, epilogue, mode)


def eight_bit_partials(
    x: QuantizedRows,
    w: EightBit,
    bias: Tensor | None,
    dtype: torch.dtype,
    mode: KernelMode,
    tuning: ProductTuning | None = None,
) -> Tensor | SplitKPartials:
    """For a next kernel that can add the splits up."""
    t = tuning or eight_bit_tuning(x.values.shape[0], w, False, mode)
    parts = _eight_bit_parts(x, w, dtype, Epilogue(bias), t, mode)
    return SplitKPartials(parts, bias, dtype) if parts.dim() == 3 else parts


def four_bit_product(
    x: Tensor, w: FourBit, epilogue: Epilogue, mode: KernelMode, tuning: ProductTuning | None = None
) -> Reduced:
    t = tuning or four_bit_tuning(x.shape[0], w, epilogue.gated, mode)
    return _finish(_four_bit_parts(x, w, epilogue, t, mode), x.dtype, epilogue, mode)


def four_bit_partials(
    x: Tensor, w: FourBit, bias: Tensor | None, mode: KernelMode, tuning: ProductTuning | None = None
) -> Tensor | SplitKPartials:
    t = tuning or four_bit_tuning(x.shape[0], w, False, mode)
    parts = _four_bit_parts(x, w, Epilogue(bias), t, mode)
    return SplitKPartials(parts, bias, x.dtype) if parts.dim() == 3 else parts


def _finish(parts: Tensor, dtype: torch.dtype, epilogue: Epilogue, mode: KernelMode) -> Reduced:
    if parts.dim() == 2:
        return Reduced(parts, None, parts)
    return reduce_parts(parts, dtype, epilogue, mode.pdl)


def _output(rows: int, total: int, steps: int, splits: int, dtype: torch.dtype, device: torch.device,
            epilogue: Epilogue) -> tuple[Tensor, int]:  # fmt: skip
    """The result [rows, columns], or parts [splits, rows, total] that a second kernel adds up; and the steps
    of a split: none is empty."""
    each = up(steps, splits)
    splits = up(steps, each)
    if splits == 1 and epilogue.norm is None:
        columns = total // (2 if epilogue.gated else 1)
        return torch.empty(rows, columns, dtype=dtype, device=device), each
    return torch.empty(splits, rows, total, dtype=torch.float32, device=device), each


def _eight_bit_parts(
    x: QuantizedRows,
    w: EightBit,
    dtype: torch.dtype,
    epilogue: Epilogue,
    t: ProductTuning,
    mode: KernelMode,
) -> Tensor:
    (rows, depth), total = x.values.shape, w.values.shape[0]
    out, steps = _output(rows, total, up(depth, t.depth), t.splits, dtype, x.scale.device, epilogue)
    splits, bias = (out.shape[0] if out.dim() == 3 else 1), epilogue.bias
    eight_bit_kernel[(up(rows, t.lines), up(total, t.piece), splits)](
        x.values, w.values, x.scale, w.scale, x.scale if bias is None else bias, out, rows,
        total // (2 if epilogue.gated else 1), depth, steps, x.values.stride(0),
        w.scale.stride(0) if w.scale.dim() == 2 else 0, PIECE=t.piece, LINES=t.lines, DEPTH=t.depth,
        GATED=epilogue.gated, BLOCKED=w.scale.dim() == 2, BIAS=bias is not None and out.dim() == 2,
        PARTS=out.dim() == 3, EVEN=depth % t.depth == 0, STAGES=t.stages, AHEAD=t.ahead, num_warps=t.warps,
        **pdl_options(mode.pdl),
    )  # fmt: skip
    return out


def _four_bit_parts(x: Tensor, w: FourBit, epilogue: Epilogue, t: ProductTuning, mode: KernelMode) -> Tensor:
    rows, (total, width) = x.shape[0], w.packed.shape
    out, steps = _output(rows, total, width // t.depth, t.splits, x.dtype, x.device, epilogue)
    splits, bias = (out.shape[0] if out.dim() == 3 else 1), epilogue.bias
    four_bit_kernel[(up(rows, t.lines), up(total, t.piece), splits)](
        x, w.packed, w.scale, x if w.zero is None else w.zero, x if bias is None else bias, out, rows,
        total // (2 if epilogue.gated else 1), w.columns, width, steps, w.group, x.stride(0), PIECE=t.piece,
        LINES=t.lines, DEPTH=t.depth, SLICE=SLICE, GATED=epilogue.gated, ZERO=w.zero is not None,
        BIAS=bias is not None and out.dim() == 2, PARTS=out.dim() == 3, EVEN=w.columns == 4 * width,
        ASM=x.dtype == torch.bfloat16 and not INTERPRETED, STAGES=t.stages, AHEAD=t.ahead, num_warps=t.warps,
        **pdl_options(mode.pdl),
    )  # fmt: skip
    return out


def scaled_matmul(x: QuantizedRows, w: EightBit, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The library's product, for many rows. Weights with a scale per row only."""
    if w.values.dtype == torch.int8:
        sums = torch._int_mm(x.values, w.values.t()).float()
        y = sums * x.scale[:, None] * w.scale
        return (y if bias is None else y + bias.float()).to(dtype)
    return torch._scaled_mm(
        x.values,
        w.values.t(),
        x.scale[:, None],
        w.scale[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )
