"""From 8-bit pixels to the patches a vision tower reads: two resampling passes and one cut.

    resample   out[y, c, x] = clip((sum_t weights[x, t] * in[y, c, first[x] + t] + half) >> 22)     along x
               and the same along y; weights are integers of 22 fractional bits
    patchify   out[p, (c, frame, y, x)] = table[c, planes[frame, row, c, column]]    patches in merge order

All of it is exact: the sums fit 32 bits, and the normalisation, a function of 256 values per channel, is
looked up in a table made by the reference's arithmetic. The reference is `encoder.preprocess`, which gets the
same integers from float64 products. A 1920 x 1080 image moves 37 MB, 9 us at the copy ceiling.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.jit import jit_unspecialized, power_of_two, tl, up

WEIGHT_BITS = 22


class PatchTuning(NamedTuple):
    block: int = 256  # pixels of a line
    warps: int = 2


@jit_unspecialized("taps", "length")
def _resample_kernel(source, first, weights, out, taps, length, width, y_stride, c_stride, x_stride,
                     ALONG_X: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One stretch of one line of one channel; `length` is the source's along the resampled axis."""
    line = tl.program_id(0).to(tl.int64)
    y, c = line // 3, line % 3
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < width
    total = tl.full([BLOCK], 1 << (BITS - 1), tl.int32)
    if ALONG_X:
        begin = tl.load(first + x, mask=inside, other=0)
        base = source + y * y_stride + c * c_stride
        for tap in range(taps):
            weight = tl.load(weights + x * taps + tap, mask=inside, other=0)
            real = inside & (begin + tap < length)  # past the edge the weight is 0
            pixel = tl.load(base + (begin + tap).to(tl.int64) * x_stride, mask=real, other=0)
            total += weight * pixel.to(tl.int32)
    else:
        begin = tl.load(first + y)
        base = source + c * c_stride + x * x_stride
        for tap in range(taps):
            weight = tl.load(weights + y * taps + tap)
            real = x < tl.where(begin + tap < length, width, 0)
            pixel = tl.load(base + (begin + tap).to(tl.int64) * y_stride, mask=real, other=0)
            total += weight * pixel.to(tl.int32)
    value = tl.minimum(tl.maximum(total >> BITS, 0), 255)
    tl.store(out + line * width + x, value.to(tl.uint8), mask=inside)


@jit_unspecialized("frames", "columns")
def _patchify_kernel(planes, table, out, frames, columns, frame_stride, width, MERGE: tl.constexpr,
                     PATCH: tl.constexpr, TIME: tl.constexpr, SIZE: tl.constexpr,
                     SIZE_UP: tl.constexpr):  # fmt: skip
    """One patch: channel, frame, y, x; `columns` is the grid's width in patches."""
    patch = tl.program_id(0)
    inner = patch % (MERGE * MERGE)
    token = patch // (MERGE * MERGE)
    row = token // (columns // MERGE) * MERGE + inner // MERGE
    column = token % (columns // MERGE) * MERGE + inner % MERGE
    e = tl.arange(0, SIZE_UP)
    inside = e < SIZE
    x, y = e % PATCH, e // PATCH % PATCH
    frame = tl.minimum(e // (PATCH * PATCH) % TIME, frames - 1)  # a single frame is repeated
    c = e // (PATCH * PATCH * TIME)
    at = (
        frame.to(tl.int64) * frame_stride
        + ((row * PATCH + y) * 3 + c).to(tl.int64) * width
        + column * PATCH
        + x
    )
    pixel = tl.load(planes + at, mask=inside, other=0).to(tl.int32)
    value = tl.load(table + c * 256 + pixel, mask=inside, other=0.0)
    tl.store(out + patch.to(tl.int64) * SIZE + e, value.to(out.dtype.element_ty), mask=inside)


def resample_triton(
    source: Tensor,  # [height, 3, width] uint8 of any strides
    first: Tensor,  # [outputs] int32: the first source pixel of each output
    weights: Tensor,  # [outputs, taps] int32
    along: str,  # "x" or "y"
    tuning: PatchTuning = PatchTuning(),
) -> Tensor:
    """[height, 3, outputs] or [outputs, 3, width] uint8, contiguous."""
    if source.dim() != 3 or source.shape[1] != 3 or source.dtype != torch.uint8:
        raise ValueError(
            f"resampling takes [height, 3, width] uint8, not {tuple(source.shape)} {source.dtype}"
        )
    if (
        weights.dim() != 2
        or first.shape != weights.shape[:1]
        or not first.dtype == weights.dtype == torch.int32
    ):
        raise ValueError(
            f"first {tuple(first.shape)} and weights {tuple(weights.shape)} must be int32, alike"
        )
    if along not in ("x", "y") or not (first.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"resampling along {along!r}; 'x' and 'y' exist, with contiguous tables")
    outputs, taps = weights.shape
    height, width = (source.shape[0], outputs) if along == "x" else (outputs, source.shape[2])
    out = torch.empty(height, 3, width, dtype=torch.uint8, device=source.device)
    _resample_kernel[(3 * height, up(width, tuning.block))](
        source, first, weights, out, taps, source.shape[2 if along == "x" else 0], width, *source.stride(),
        ALONG_X=along == "x", BITS=WEIGHT_BITS, BLOCK=tuning.block, num_warps=tuning.warps,
    )  # fmt: skip
    return out


def patchify_triton(
    planes: Tensor,  # [frames, height, 3, width] uint8, contiguous
    table: Tensor,  # [3, 256] float32: the normalised value of each pixel value
    grid: tuple[int, int],
    merge: int,
    patch: int,
    frames: int,  # of a patch; one image is repeated over them
    dtype: torch.dtype,
) -> Tensor:
    """[grid_h * grid_w, 3 * frames * patch * patch] of dtype."""
    if planes.shape[1:] != (grid[0] * patch, 3, grid[1] * patch) or planes.dtype != torch.uint8:
        raise ValueError(
            f"a grid of {grid} patches of {patch} does not cut {tuple(planes.shape)} {planes.dtype}"
        )
    if planes.shape[0] not in (1, frames) or not planes.is_contiguous():
        raise ValueError(f"{planes.shape[0]} frames for patches of {frames}; 1 or all are needed, contiguous")
    if table.shape != (3, 256) or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(f"the table is [3, 256] float32, not {tuple(table.shape)} {table.dtype}")
    if grid[0] % merge or grid[1] % merge:
        raise ValueError(f"a grid of {grid} patches does not divide by {merge}")
    size = 3 * frames * patch * patch
    out = torch.empty(grid[0] * grid[1], size, dtype=dtype, device=planes.device)
    _patchify_kernel[(grid[0] * grid[1],)](
        planes, table, out, planes.shape[0], grid[1], planes.stride(0), planes.shape[3], MERGE=merge,
        PATCH=patch, TIME=frames, SIZE=size, SIZE_UP=power_of_two(size), num_warps=4,
    )  # fmt: skip
    return out
