"""The fonts each split may use, and the width of text in them."""

from __future__ import annotations

from saccade.tools.evaluation.renderer import ADVANCES, FONT_NAMES, TRAIN_FONTS

from .words import TRAIN

_ADVANCES: list[list[float]] = ADVANCES.tolist()


def fonts(split: str) -> range:
    """Indices of the fonts a split may use."""
    return range(TRAIN_FONTS) if split == TRAIN else range(TRAIN_FONTS, len(FONT_NAMES))


def text_width(text: str, font: int, size: float) -> float:
    """Pixels from the first to the last pen position of a line."""
    advance = _ADVANCES[font]
    return size * sum([advance[byte] for byte in text.encode()])
