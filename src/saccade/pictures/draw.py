"""Scenes to pixels on the CPU, bit for bit the same everywhere.

Only +, -, *, /, sqrt, min, max and floor of float32 arrays are used, which IEEE 754 fixes to the last bit.
The kernel of training/raster.py draws the same marks on a GPU; this is its twin and the meaning of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import atlas
from .scene import BOX, COLUMNS, COS, SECTOR, SIN, SPRITE, Run, Scene

_COS, _SIN = np.array(COS, np.float32), np.array(SIN, np.float32)
F32 = np.float32


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of several scenes, padded to the same count (kind -1)."""

    rows: NDArray[np.float32]  # [scenes, marks, COLUMNS]
    labels: NDArray[np.int16]  # [scenes, marks, 3]: character (0 none, 1..94), shape, colour (0 none)
    counts: NDArray[np.int32]  # [scenes]
    ground: NDArray[np.int32]  # [scenes, 8]: first RGB, second RGB, grain, grain seed


def glyph_rows(
    runs: Sequence[Run], of: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int16], NDArray[np.int64]]:
    """Runs to one row per visible character; `of[i]` is the scene of run i. Gives rows, characters, scene
    of each."""
    lengths = np.array([len(run.text) for run in runs])
    codes = np.frombuffer(b"".join([run.text for run in runs]), np.uint8).astype(np.int64)
    index = np.repeat(np.arange(len(runs)), lengths)
    table = np.array([(r.x, r.y, r.size, r.font, *r.colour, r.degrees) for r in runs], np.float32)[index]
    font, degrees = table[:, 3].astype(np.int64), table[:, 7].astype(np.int64)
    advance = atlas.ADVANCES[font, codes].astype(np.float64)
    total = np.cumsum(advance)
    start = np.concatenate([[0.0], total])[
        np.cumsum(lengths) - lengths
    ]  # pen before each run's first character
    along = ((total - advance / 2 - start[index]) * table[:, 2]).astype(np.float32)
    cos, sin = _COS[degrees], _SIN[degrees]
    rows = np.zeros((len(codes), COLUMNS), np.float32)
    rows[:, 0] = SPRITE
    rows[:, 1], rows[:, 2] = table[:, 0] + along * cos, table[:, 1] + along * sin
    rows[:, 3], rows[:, 4] = cos, sin
    rows[:, 5] = F32(atlas.EM) / table[:, 2]
    rows[:, 6] = font * atlas.GLYPHS + codes - 33
    rows[:, 10:13] = table[:, 4:7]
    rows[:, 13] = 1.0
    seen = (codes >= 33) & (codes < 127)
    return rows[seen], (codes[seen] - 32).astype(np.int16), of[index][seen]


def pack(scenes: Sequence[Scene]) -> Marks:
    """Marks of scenes as arrays, drawn in order: shapes, then text."""
    runs = [run for scene in scenes for run in scene.runs]
    of = np.repeat(np.arange(len(scenes)), [len(scene.runs) for scene in scenes])
    if runs:
        glyphs, characters, owner = glyph_rows(runs, of)
    else:
        glyphs, characters, owner = np.zeros((0, COLUMNS), F32), np.zeros(0, np.int16), np.zeros(0, np.int64)
    marks = np.array([len(scene.marks) for scene in scenes])
    written = np.bincount(owner, minlength=len(scenes))
    counts = (marks + written).astype(np.int32)
    most = max(1, int(counts.max()))
    rows = np.full((len(scenes), most, COLUMNS), -1.0, np.float32)
    labels = np.zeros((len(scenes), most, 3), np.int16)
    first = np.cumsum(written) - written
    for i, scene in enumerate(scenes):
        m, t, f = int(marks[i]), int(counts[i]), int(first[i])
        if m:
            table = np.array(scene.marks, np.float32)
            rows[i, :m] = table[:, :COLUMNS]
            labels[i, :m, 1:] = table[:, COLUMNS:]
        rows[i, m:t] = glyphs[f : f + t - m]
        labels[i, m:t, 0] = characters[f : f + t - m]
    ground = np.array([(*s.first, *s.second, s.grain, s.grain_seed) for s in scenes], np.int32)
    return Marks(rows, labels, counts, ground)


def _ground(ground: NDArray[np.int32], width: int, height: int) -> NDArray[np.float32]:
    """The graded, grainy background. The grain is an integer hash of the pixel's number and the seed."""
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


def _reach(row: NDArray[np.float32]) -> float:
    """Half the side of a square that surely holds the mark."""
    kind = int(row[0])
    if kind == BOX:
        return float(row[5] + row[6]) + 1.5 if row[4] != 0 else max(float(row[5]), float(row[6])) + 1.5
    if kind == SPRITE:
        return 33.0 / float(row[5]) + 1.5
    return float(row[5]) + 1.5


def _sample(cell: NDArray[np.uint8], u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bilinear reading of an atlas cell; outside it the distance is that of its border."""
    u = np.minimum(np.maximum(u, F32(0)), F32(atlas.CELL_W - 1.001))
    v = np.minimum(np.maximum(v, F32(0)), F32(atlas.CELL_H - 1.001))
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
    """How much of each pixel the mark covers: its signed distance (inside positive) plus one half,
    clipped."""
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
            u = lx * row[5] + F32(atlas.CELL_W / 2 - 0.5)
            v = ly * row[5] + F32(atlas.CELL_H / 2 - 0.5)
            d = (_sample(atlas.CELLS[int(row[6])], u, v) - F32(128)) / (F32(16) * row[5])
    out = np.minimum(np.maximum(d + F32(0.5), F32(0)), F32(1)) * row[13]
    return out


def paint(rows: NDArray[np.float32], ground: NDArray[np.int32], width: int, height: int) -> NDArray[np.uint8]:
    """One picture, [height, width, 3]."""
    image = _ground(ground, width, height)
    for row in rows:
        if row[0] < 0:
            break
        reach = _reach(row)
        x0, x1 = max(0, int(row[1] - reach)), min(width, int(row[1] + reach) + 2)
        y0, y1 = max(0, int(row[2] - reach)), min(height, int(row[2] + reach) + 2)
        if x0 >= x1 or y0 >= y1:
            continue
        x = (np.arange(x0, x1, dtype=F32) + F32(0.5))[None, :]
        y = (np.arange(y0, y1, dtype=F32) + F32(0.5))[:, None]
        cover = _coverage(row, x, y)[..., None]
        part = image[y0:y1, x0:x1]
        image[y0:y1, x0:x1] = part + (row[10:13] - part) * cover
    whole: NDArray[np.float32] = np.minimum(np.maximum(np.floor(image + F32(0.5)), F32(0)), F32(255))
    return whole.astype(np.uint8)
