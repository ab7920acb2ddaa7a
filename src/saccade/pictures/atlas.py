"""The glyph and shape atlas: signed-distance cells made by training/atlas.py. Evaluation fonts come
last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .words import TRAIN

EM, CELL_W, CELL_H = 36, 44, 48  # atlas pixels: font size, cell width and height
SHAPE_SIDE = 36  # atlas pixels across a shape
GLYPHS = 94  # printable ASCII without the space, per font

with np.load(Path(__file__).with_name("atlas.npz")) as _file:
    FONT_NAMES: tuple[str, ...] = tuple(str(n) for n in _file["fonts"])
    SHAPES: tuple[str, ...] = tuple(str(n) for n in _file["shape_names"])
    TRAIN_FONTS = int(_file["train"])
    _glyphs: NDArray[np.uint8] = _file["glyphs"]
    CELLS: NDArray[np.uint8] = np.concatenate(
        [_glyphs, _file["shapes"]]
    )  # [cells, CELL_H, CELL_W], 128 + 16 d
    _advances: NDArray[np.float32] = _file["advances"]  # [fonts, 95], in em; the space is last

FIRST_SHAPE = len(FONT_NAMES) * GLYPHS
# ADVANCE[font][byte]: pen advance in em; bytes outside printable ASCII advance like a space
ADVANCE: list[list[float]] = [
    [float(row[byte - 33]) if 33 <= byte < 127 else float(row[94]) for byte in range(256)]
    for row in _advances
]
ADVANCES: NDArray[np.float32] = np.array(ADVANCE, np.float32)


def fonts(split: str) -> range:
    """Indices of the fonts a split may use."""
    return range(TRAIN_FONTS) if split == TRAIN else range(TRAIN_FONTS, len(FONT_NAMES))


def width(text: str, font: int, size: float) -> float:
    """Pixels from the first to the last pen position of a line."""
    advance = ADVANCE[font]
    return size * sum([advance[byte] for byte in text.encode()])
