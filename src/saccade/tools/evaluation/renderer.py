"""Draws an image from primitives (boxes, glyphs, shapes, pie slices), bit for bit the same on every machine.

It uses only +, -, *, /, sqrt, min, max and floor of float32 arrays: IEEE 754 fixes their results to the last
bit. It is the reference implementation of the GPU kernel in training/raster.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]
Primitives = NDArray[np.float32]  # [count, COLUMNS]

BOX, SPRITE, SECTOR = 0, 1, 2
COLUMNS = 14  # kind, cx, cy, cos, sin, five parameters, r, g, b, opacity
# Cosine and sine of whole degrees, rounded so that every platform has the same bits.
COS = [round(math.cos(math.radians(d)) * 65536) / 65536 for d in range(360)]
SIN = [round(math.sin(math.radians(d)) * 65536) / 65536 for d in range(360)]
_COS, _SIN = np.array(COS, np.float32), np.array(SIN, np.float32)
F32 = np.float32

# Signed-distance cells of glyphs and shapes, made by training/atlas.py. Evaluation fonts come last.
ATLAS = Path(__file__).parent / "data" / "atlas.npz"
EM, CELL_W, CELL_H = 36, 44, 48  # atlas pixels: font size, cell width and height
SHAPE_SIDE = 36  # atlas pixels across a shape
GLYPHS = 94  # printable ASCII without the space, per font
with np.load(ATLAS) as _file:
    FONT_NAMES: tuple[str, ...] = tuple(str(name) for name in _file["fonts"])
    SHAPES: tuple[str, ...] = tuple(str(name) for name in _file["shape_names"])
    TRAIN_FONTS = int(_file["train"])
    # [cells, CELL_H, CELL_W], 128 + 16 x distance in atlas pixels
    CELLS: NDArray[np.uint8] = np.concatenate([_file["glyphs"], _file["shapes"]])
    _advances: NDArray[np.float32] = _file["advances"]  # [fonts, 95], in em; the space is last
FIRST_SHAPE = len(FONT_NAMES) * GLYPHS
# [fonts, 256]: pen advance in em; bytes outside printable ASCII advance like a space
ADVANCES = np.repeat(_advances[:, 94:], 256, axis=1)
ADVANCES[:, 33:127] = _advances[:, :94]


@dataclass(frozen=True, slots=True)
class TextRun:
    """A line of text: left end and middle height, size in pixels per em, whole degrees of rotation."""

    x: float
    y: float
    size: float
    font: int
    colour: Colour
    degrees: int
    text: bytes


def glyph_primitives(
    runs: Sequence[TextRun], owners: NDArray[np.int64]
) -> tuple[Primitives, NDArray[np.int16], NDArray[np.int64]]:
    """One primitive per visible character; `owners[i]` is the scene of run i.

    Returns primitives, characters (1 to 94) and the scene of each."""
    lengths = np.array([len(run.text) for run in runs])
    codes = np.frombuffer(b"".join([run.text for run in runs]), np.uint8).astype(np.int64)
    index = np.repeat(np.arange(len(runs)), lengths)
    table = np.array([(r.x, r.y, r.size, r.font, *r.colour, r.degrees) for r in runs], np.float32)[index]
    font, degrees = table[:, 3].astype(np.int64), table[:, 7].astype(np.int64)
    advance = ADVANCES[font, codes].astype(np.float64)
    total = np.cumsum(advance)
    start = np.concatenate([[0.0], total])[np.cumsum(lengths) - lengths]  # pen before each run's first glyph
    along = ((total - advance / 2 - start[index]) * table[:, 2]).astype(np.float32)
    cos, sin = _COS[degrees], _SIN[degrees]
    rows = np.zeros((len(codes), COLUMNS), np.float32)
    rows[:, 0] = SPRITE
    rows[:, 1], rows[:, 2] = table[:, 0] + along * cos, table[:, 1] + along * sin
    rows[:, 3], rows[:, 4] = cos, sin
    rows[:, 5] = F32(EM) / table[:, 2]
    rows[:, 6] = font * GLYPHS + codes - 33
    rows[:, 10:13] = table[:, 4:7]
    rows[:, 13] = 1.0
    visible = (codes >= 33) & (codes < 127)
    return rows[visible], (codes[visible] - 32).astype(np.int16), owners[index][visible]


def _background(ground: NDArray[np.int32], width: int, height: int) -> NDArray[np.float32]:
    """A gradient with noise. The noise is an integer hash of the pixel's index and the seed."""
    y, x = np.mgrid[0:height, 0:width]
    blend = ((x + y).astype(F32) / F32(width + height - 2))[..., None]
    first, second = ground[0:3].astype(F32), ground[3:6].astype(F32)
    image: NDArray[np.float32] = first + (second - first) * blend
    if ground[6] > 0:
        with np.errstate(over="ignore"):
            h = (y * width + x).astype(np.uint32) * np.uint32(2654435761) + np.uint32(ground[7])
            h = (h ^ (h >> np.uint32(15))) * np.uint32(2246822519)
            h = (h ^ (h >> np.uint32(13))) * np.uint32(3266489917)
            h ^= h >> np.uint32(16)
        noise = ((h & np.uint32(255)).astype(F32) - F32(127.5)) * F32(int(ground[6])) / F32(127.5)
        image = image + noise[..., None]
    return image


def _radius(row: NDArray[np.float32]) -> float:
    """Half the side of a square that contains the primitive."""
    kind = int(row[0])
    if kind == BOX:
        return float(row[5] + row[6]) + 1.5 if row[4] != 0 else max(float(row[5]), float(row[6])) + 1.5
    if kind == SPRITE:
        return 33.0 / float(row[5]) + 1.5
    return float(row[5]) + 1.5


def _sample(cell: NDArray[np.uint8], u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bilinear sample of an atlas cell, clamped at its border."""
    u = np.minimum(np.maximum(u, F32(0)), F32(CELL_W - 1.001))
    v = np.minimum(np.maximum(v, F32(0)), F32(CELL_H - 1.001))
    i, j = v.astype(np.int32), u.astype(np.int32)
    fu, fv = u - j.astype(F32), v - i.astype(F32)
    a, b = cell[i, j].astype(F32), cell[i, j + 1].astype(F32)
    c, d = cell[i + 1, j].astype(F32), cell[i + 1, j + 1].astype(F32)
    top, low = a + (b - a) * fu, c + (d - c) * fu
    out: NDArray[np.float32] = top + (low - top) * fv
    return out


def _coverage(
    row: NDArray[np.float32], x: NDArray[np.float32], y: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Share of each pixel that the primitive covers: clip(signed distance + 1/2), inside positive."""
    kind = int(row[0])
    dx, dy = x - row[1], y - row[2]
    out: NDArray[np.float32]
    if kind == SECTOR:
        first = row[6] * dy - row[7] * dx
        last = row[9] * dx - row[8] * dy
        wedge = np.maximum(first, last) if row[3] > 0 else np.minimum(first, last)
        d = np.minimum(row[5] - np.sqrt(dx * dx + dy * dy), wedge)
    else:
        lx, ly = dx * row[3] + dy * row[4], dy * row[3] - dx * row[4]
        if kind == BOX:
            qx, qy = np.abs(lx) - row[5] + row[7], np.abs(ly) - row[6] + row[7]
            ox, oy = np.maximum(qx, F32(0)), np.maximum(qy, F32(0))
            d = row[7] - np.sqrt(ox * ox + oy * oy) - np.minimum(np.maximum(qx, qy), F32(0))
        else:
            u = lx * row[5] + F32(CELL_W / 2 - 0.5)
            v = ly * row[5] + F32(CELL_H / 2 - 0.5)
            d = (_sample(CELLS[int(row[6])], u, v) - F32(128)) / (F32(16) * row[5])
    out = np.minimum(np.maximum(d + F32(0.5), F32(0)), F32(1)) * row[13]
    return out


def paint(rows: Primitives, ground: NDArray[np.int32], width: int, height: int) -> NDArray[np.uint8]:
    """One image, [height, width, 3]; primitives are drawn in order, up to the first of kind -1 (padding).

    `ground`: the gradient's first and second RGB, the noise's amplitude and seed."""
    image = _background(ground, width, height)
    for row in rows:
        if row[0] < 0:
            break
        radius = _radius(row)
        x0, x1 = max(0, int(row[1] - radius)), min(width, int(row[1] + radius) + 2)
        y0, y1 = max(0, int(row[2] - radius)), min(height, int(row[2] + radius) + 2)
        if x0 >= x1 or y0 >= y1:
            continue
        x = (np.arange(x0, x1, dtype=F32) + F32(0.5))[None, :]
        y = (np.arange(y0, y1, dtype=F32) + F32(0.5))[:, None]
        cover = _coverage(row, x, y)[..., None]
        part = image[y0:y1, x0:x1]
        image[y0:y1, x0:x1] = part + (row[10:13] - part) * cover
    whole: NDArray[np.float32] = np.minimum(np.maximum(np.floor(image + F32(0.5)), F32(0)), F32(255))
    return whole.astype(np.uint8)
