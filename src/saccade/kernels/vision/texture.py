"""The texture of an image in five launches, and means of it over token grids; the reference takes some sixty.

    shrink   colour[c, y, x] = mean of the image's pixels in the window of (y, x), over 255
    shade    L* and a* of every colour, the position of every pixel
    edge     Sobel of L*; means over cells of 4 x 4 pixels: how near L* is to each of 8 shades, squared edges
    around   means of those over 5 x 5 cells: entropy, and likeness to text
    spread   these two, interpolated between the centres of cells, at every pixel
    means    of some channels over the windows of a grid

The reference is `lod.texture`, which defines the numbers and makes the tables. Windows are those of an
adaptive mean: from floor(i * n / m) to ceil((i + 1) * n / m). In shades and edges products are rounded before
they are added, as in the reference: otherwise a colour on the border of two steps of a table would take the
other one.

A 1024 x 1024 image, whose texture is 768 x 768, takes 0.26 ms with its maps as one CUDA graph, the reference
1.10; 2048 x 2048 pixels 0.25 and 1.81 (H200, `python -m bench.lod --part stages`).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.jit import constant, jit, jit_unspecialized, tl, up

CHANNELS = 13
CELL = 4  # pixels along a cell
WINDOW = 5  # cells along the neighbourhood of one
LEAST = WINDOW * CELL  # pixels along the shorter side; below, the neighbourhoods are smaller
MOST_CHOSEN = 7  # channels that `means` takes at once

_CELL = constant(CELL)
_EVEN = constant(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to a whole number


class Shades(NamedTuple):
    """What the channels are made with."""

    light: Tensor  # [256] float32: linear light of the shades of sRGB
    root: Tensor  # [steps + 1] float32: CIELAB's root
    x: tuple[float, float, float]  # of linear red, green, blue
    y: tuple[float, float, float]
    bins: int  # of L*, for the entropy
    faint: float  # squared edge that is half of `text`


class TextureTuning(NamedTuple):
    block: int = 256  # pixels of a line
    warps: int = 4
    cells: int = 64


@jit
def _window(i, have, want):
    """Where the i-th of `want` windows over `have` places begins, and ends."""
    return i * have // want, ((i + 1) * have + want - 1) // want


@jit_unspecialized(
    "source_height", "source_width", "height", "width", "long", "y_stride", "x_stride", "c_stride"
)
def _shrink_kernel(image, colour, source_height, source_width, height, width, long, y_stride, x_stride,
                   c_stride, BLOCK: tl.constexpr):  # fmt: skip
    """A stretch of one line of one colour; no window is wider than `long`."""
    y, c = tl.program_id(0), tl.program_id(2)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < width
    top, below = _window(y, source_height, height)
    left, right = _window(x, source_width, width)
    total = tl.zeros([BLOCK], tl.int32)
    line = image + top.to(tl.int64) * y_stride + c * c_stride
    for _ in range(top, below):
        for place in range(long):
            real = inside & (left + place < right)
            total += tl.load(line + (left + place).to(tl.int64) * x_stride, mask=real, other=0).to(tl.int32)
        line += y_stride
    mean = total.to(tl.float32) / ((below - top) * (right - left)).to(tl.float32) / 255.0
    tl.store(colour + (c * height + y) * width + x, mean, mask=inside)


@jit
def _whole(value):
    """Rounded, halves to the even one, as torch does."""
    return (value + _EVEN - _EVEN).to(tl.int32)


@jit
def _place(i, count):
    """The i-th of `count` places, two or more, from -1 to 1."""
    step = 2.0 / (count - 1).to(tl.float32)
    return tl.where(
        i < count // 2, i.to(tl.float32) * step - 1.0, 1.0 - (count - 1 - i).to(tl.float32) * step
    )


@jit_unspecialized("height", "width", "steps")
def _shade_kernel(colour, light, root, out, height, width, steps, XR, XG, XB, YR, YG, YB,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Channels 0 to 4 and 8 to 10 of a stretch of one line."""
    y = tl.program_id(0)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < width
    plane = height * width
    at = y * width + x
    red = tl.load(colour + at, mask=inside, other=0.0)
    green = tl.load(colour + plane + at, mask=inside, other=0.0)
    blue = tl.load(colour + 2 * plane + at, mask=inside, other=0.0)
    r = tl.load(light + _whole(red * 255.0), mask=inside, other=0.0)
    g = tl.load(light + _whole(green * 255.0), mask=inside, other=0.0)
    b = tl.load(light + _whole(blue * 255.0), mask=inside, other=0.0)
    toned = XR * r + XG * g + XB * b
    bright = YR * r + YG * g + YB * b
    fx = tl.load(root + tl.minimum(_whole(toned * steps), steps), mask=inside, other=0.0)
    fy = tl.load(root + tl.minimum(_whole(bright * steps), steps), mask=inside, other=0.0)
    down, across = _place(y, height), _place(x, width)
    out += at
    tl.store(out, red, mask=inside)
    tl.store(out + plane, green, mask=inside)
    tl.store(out + 2 * plane, blue, mask=inside)
    tl.store(out + 3 * plane, 1.16 * fy - 0.16, mask=inside)
    tl.store(out + 4 * plane, 5.0 * (fx - fy), mask=inside)
    tl.store(out + 8 * plane, tl.zeros([BLOCK], tl.float32) + down, mask=inside)
    tl.store(out + 9 * plane, across, mask=inside)
    tl.store(out + 10 * plane, tl.sqrt((down * down + across * across) / 2.0), mask=inside)


@jit
def _by_cell(values, CELLS: tl.constexpr):
    """Sums [CELLS] of values [CELL, CELLS * CELL]."""
    return tl.sum(tl.sum(tl.reshape(values, [_CELL, CELLS, _CELL]), 2), 0)


@jit_unspecialized("height", "width", "cells_down", "cells_across")
def _edge_kernel(texture, small, height, width, cells_down, cells_across, BINS: tl.constexpr,
                 CELLS: tl.constexpr):  # fmt: skip
    """Channels 5 to 7 of one row of cells, and what its cells say: shares of shades, then xx, yy, xy."""
    y = tl.program_id(0) * _CELL + tl.arange(0, _CELL)[:, None]
    x = tl.program_id(1) * (CELLS * _CELL) + tl.arange(0, CELLS * _CELL)[None, :]
    plane = height * width
    inside = (y < height) & (x < width)
    light = texture + 3 * plane
    above, below = tl.maximum(y - 1, 0) * width, tl.minimum(y + 1, height - 1) * width
    left, right, here = tl.maximum(x - 1, 0), tl.minimum(x + 1, width - 1), y * width
    a0 = tl.load(light + above + left, mask=inside, other=0.0)
    a1 = tl.load(light + above + x, mask=inside, other=0.0)
    a2 = tl.load(light + above + right, mask=inside, other=0.0)
    h0 = tl.load(light + here + left, mask=inside, other=0.0)
    h1 = tl.load(light + here + x, mask=inside, other=0.0)
    h2 = tl.load(light + here + right, mask=inside, other=0.0)
    b0 = tl.load(light + below + left, mask=inside, other=0.0)
    b1 = tl.load(light + below + x, mask=inside, other=0.0)
    b2 = tl.load(light + below + right, mask=inside, other=0.0)
    gx = ((a2 + 2.0 * h2 + b2) - (a0 + 2.0 * h0 + b0)) / 8.0
    gy = ((b0 + 2.0 * b1 + b2) - (a0 + 2.0 * a1 + a2)) / 8.0
    edges = texture + 5 * plane + here + x
    tl.store(edges, gx, mask=inside)
    tl.store(edges + plane, gy, mask=inside)
    tl.store(edges + 2 * plane, tl.sqrt(gx * gx + gy * gy), mask=inside)
    cell = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    kept = cell < cells_across
    small += tl.program_id(0) * cells_across + cell
    stride = cells_down * cells_across
    # Every other pixel of every other row is enough for the shades.
    sparse = (inside & (y % 2 == 0) & (x % 2 == 0)).to(tl.float32)
    seen = tl.maximum(_by_cell(sparse, CELLS), 1.0)
    level = tl.minimum(tl.maximum(h1 * BINS - 0.5, 0.0), BINS - 1.0)
    for shade in tl.static_range(BINS):
        near = tl.maximum(1.0 - tl.abs(level - shade), 0.0) * sparse
        tl.store(small + shade * stride, _by_cell(near, CELLS) / seen, mask=kept)
    count = tl.maximum(_by_cell(inside.to(tl.float32), CELLS), 1.0)
    tl.store(small + BINS * stride, _by_cell(gx * gx, CELLS) / count, mask=kept)
    tl.store(small + (BINS + 1) * stride, _by_cell(gy * gy, CELLS) / count, mask=kept)
    tl.store(small + (BINS + 2) * stride, _by_cell(gx * gy, CELLS) / count, mask=kept)


@jit
def _row(values, plane, number):
    """One row of values [planes, n]."""
    return tl.sum(tl.where(plane == number, values, 0.0), 0)


@jit_unspecialized("cells_down", "cells_across")
def _around_kernel(small, found, cells_down, cells_across, scale, faint, WINDOW: tl.constexpr,
                   BINS: tl.constexpr, PLANES: tl.constexpr, CELLS: tl.constexpr):  # fmt: skip
    """Entropy and likeness to text [2, cells] from means over the cells around."""
    stride = cells_down * cells_across
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)[None, :]
    inside = cell < stride
    row, column = cell // cells_across, cell % cells_across
    plane = tl.arange(0, PLANES)[:, None]
    total = tl.zeros([PLANES, CELLS], tl.float32)
    count = tl.zeros([1, CELLS], tl.float32)
    for step in tl.static_range(WINDOW * WINDOW):
        its_row = row + step // WINDOW - WINDOW // 2
        its_column = column + step % WINDOW - WINDOW // 2
        there = inside & (its_row >= 0) & (its_row < cells_down) & (its_column >= 0)
        there &= its_column < cells_across
        real = there & (plane < BINS + 3)
        total += tl.load(small + plane * stride + its_row * cells_across + its_column, mask=real, other=0.0)
        count += there.to(tl.float32)
    mean = total / tl.maximum(count, 1.0)
    entropy = tl.where(plane < BINS, mean * tl.log(tl.maximum(mean, 1e-9)), 0.0)
    xx, yy, xy = _row(mean, plane, BINS), _row(mean, plane, BINS + 1), _row(mean, plane, BINS + 2)
    energy = xx + yy
    one_way = tl.sqrt((xx - yy) * (xx - yy) + 4.0 * xy * xy) / (energy + 1e-9)
    text = tl.minimum(tl.maximum(1.0 - one_way, 0.0), 1.0) * energy / (energy + faint)
    at = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    tl.store(found + at, -tl.sum(entropy, 0) / scale, mask=at < stride)
    tl.store(found + stride + at, text, mask=at < stride)


@jit
def _between(i, have, want):
    """The two of `have` middles that the i-th of `want` lies between, and how near it is to the second."""
    at = tl.maximum((i.to(tl.float32) + 0.5) * (have.to(tl.float32) / want.to(tl.float32)) - 0.5, 0.0)
    first = tl.minimum(at.to(tl.int32), have - 1)
    return first, tl.minimum(first + 1, have - 1), at - first.to(tl.float32)


@jit_unspecialized("height", "width", "cells_down", "cells_across")
def _spread_kernel(found, out, height, width, cells_down, cells_across, BLOCK: tl.constexpr):
    """Channel 11 or 12 of a stretch of one line."""
    y, which = tl.program_id(0), tl.program_id(2)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < width
    top, below, down = _between(y, cells_down, height)
    left, right, across = _between(x, cells_across, width)
    found += which * cells_down * cells_across
    a0 = tl.load(found + top * cells_across + left, mask=inside, other=0.0)
    a1 = tl.load(found + top * cells_across + right, mask=inside, other=0.0)
    b0 = tl.load(found + below * cells_across + left, mask=inside, other=0.0)
    b1 = tl.load(found + below * cells_across + right, mask=inside, other=0.0)
    value = (1.0 - down) * ((1.0 - across) * a0 + across * a1) + down * ((1.0 - across) * b0 + across * b1)
    tl.store(out + ((11 + which) * height + y) * width + x, value, mask=inside)


@jit_unspecialized("height", "width", "rows", "columns", "chosen")
def _means_kernel(texture, out, height, width, rows, columns, chosen, TALL: tl.constexpr,
                  WIDE: tl.constexpr):  # fmt: skip
    """Over one window of one channel; `chosen` has the channels in four bits each."""
    row, column, number = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    channel = (chosen >> (4 * number)) & 15
    top, below = _window(row, height, rows)
    left, right = _window(column, width, columns)
    total = tl.zeros([TALL, WIDE], tl.float32)
    for y in range(top, below, TALL):
        down = y + tl.arange(0, TALL)[:, None]
        for x in range(left, right, WIDE):
            across = x + tl.arange(0, WIDE)[None, :]
            real = (down < below) & (across < right)
            total += tl.load(texture + (channel * height + down) * width + across, mask=real, other=0.0)
    mean = tl.sum(tl.sum(total, 1), 0) / ((below - top) * (right - left)).to(tl.float32)
    tl.store(out + (number * rows + row) * columns + column, mean)


def shrink_triton(image: Tensor, size: tuple[int, int], tuning: TextureTuning = TextureTuning()) -> Tensor:
    """Of an image uint8 [height, width, 3] of any strides: float32 [3, *size] in 0..1."""
    if image.dim() != 3 or image.shape[2] != 3 or image.dtype != torch.uint8:
        raise ValueError(f"an image is [height, width, 3] uint8, not {tuple(image.shape)} {image.dtype}")
    (height, width), (source_height, source_width) = size, image.shape[:2]
    if not (1 <= height <= source_height and 1 <= width <= source_width):
        raise ValueError(f"{source_height} x {source_width} pixels cannot be shrunk to {height} x {width}")
    colour = torch.empty(3, height, width, dtype=torch.float32, device=image.device)
    _shrink_kernel[(height, up(width, tuning.block), 3)](
        image, colour, source_height, source_width, height, width, up(source_width, width) + 1,
        *image.stride(), BLOCK=tuning.block, num_warps=tuning.warps,
    )  # fmt: skip
    return colour


def channels_triton(colour: Tensor, shades: Shades, tuning: TextureTuning = TextureTuning()) -> Tensor:
    """float32 [3, h, w], contiguous -> [13, h, w]; sides of at least LEAST."""
    _, height, width = colour.shape
    if colour.shape[0] != 3 or colour.dtype != torch.float32 or not colour.is_contiguous():
        raise ValueError(
            f"a colour is contiguous float32 [3, h, w], not {tuple(colour.shape)} {colour.dtype}"
        )
    if min(height, width) < LEAST:
        raise ValueError(f"the texture is {height} x {width}; the kernels take {LEAST} and more")
    device = colour.device
    texture = torch.empty(CHANNELS, height, width, dtype=torch.float32, device=device)
    lines, warps = (height, up(width, tuning.block)), tuning.warps
    _shade_kernel[lines](
        colour, shades.light, shades.root, texture, height, width, len(shades.root) - 1, *shades.x, *shades.y,
        BLOCK=tuning.block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    down, across, cells = up(height, CELL), up(width, CELL), tuning.cells
    small = torch.empty(shades.bins + 3, down, across, dtype=torch.float32, device=device)
    _edge_kernel[(down, up(across, cells))](
        texture, small, height, width, down, across, BINS=shades.bins, CELLS=cells, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    found = torch.empty(2, down, across, dtype=torch.float32, device=device)
    planes = 1 << (shades.bins + 2).bit_length()
    _around_kernel[(up(down * across, cells),)](
        small, found, down, across, math.log(shades.bins), shades.faint, WINDOW=WINDOW, BINS=shades.bins,
        PLANES=planes, CELLS=cells, num_warps=warps,
    )  # fmt: skip
    _spread_kernel[(*lines, 2)](
        found, texture, height, width, down, across, BLOCK=tuning.block, num_warps=warps
    )
    return texture


def means_triton(texture: Tensor, channels: Sequence[int], grid: tuple[int, int]) -> Tensor:
    """Of some channels [n, rows, columns], over the windows of a grid."""
    every, height, width = texture.shape
    if texture.dtype != torch.float32 or not texture.is_contiguous() or every > 16:
        raise ValueError(f"a texture is contiguous float32, not {tuple(texture.shape)} {texture.dtype}")
    if not 1 <= len(channels) <= MOST_CHOSEN or not all(0 <= one < every for one in channels):
        raise ValueError(f"channels {list(channels)} of {every}; 1 to {MOST_CHOSEN} may be chosen")
    rows, columns = grid
    out = torch.empty(len(channels), rows, columns, dtype=torch.float32, device=texture.device)
    chosen = sum(channel << (4 * place) for place, channel in enumerate(channels))
    wide = 16 if width // columns < 32 else 64
    _means_kernel[(columns, rows, len(channels))](
        texture, out, height, width, rows, columns, chosen, TALL=16, WIDE=wide, num_warps=4
    )
    return out
