"""The views of a training batch, chosen as the engine chooses them. No pixels and no torch here.

The first look comes from `lod.glance`, windows from `lod.allocate`: the same grids, scales and lattice. Only
the map of relevance is made up, from the evidence and with the errors that the trained head makes."""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray

from saccade.lod.allocate import Field, Window, allocate, spend, windows
from saccade.lod.balance import refine
from saccade.lod.controller import PRICE
from saccade.lod.detail import plan_global_view
from saccade.lod.types import FINE, Grid, LodParams, Map, Region, ViewRule, fraction_within_token

from .scenes.scene import Ask, Box

UNIT = 32  # pixels along a token's side
LEAST = 49  # tokens: the processor makes no image smaller, and no budget of a share is
GLOBAL = (36, 256)  # fewest and most tokens of a global view where no budget says otherwise
# The levels 16, 64 and 196 of the ladder, square and in a long row.
ZOOMS = ((128, 128), (256, 64), (256, 256), (512, 128), (448, 448), (896, 224))
RULE = ViewRule(
    global_tokens=GLOBAL, zoom_tokens=tuple(sorted({w * h // UNIT**2 for w, h in ZOOMS})), most_views=4
)
# Sizes come from a short list: every new shape costs the compiler and the allocator some seconds. Some are
# no multiples of a token: the frame then has other pixels than the source.
SOURCES: tuple[tuple[int, int], ...] = (
    *((256, 320), (320, 320), (320, 448), (384, 384), (448, 352), (512, 384), (384, 576), (448, 448)),
    *((576, 448), (640, 512), (544, 640), (672, 672), (768, 576), (608, 768), (768, 768), (896, 672)),
    *((672, 1024), (1024, 896), (1344, 896), (1024, 1344)),
    *((405, 331), (523, 610), (701, 469), (590, 747), (867, 980)),
)
SHARES: dict[float | None, float] = {0.125: 1, 0.25: 5, 0.5: 2, None: 1}  # None: `auto`
# How the head errs: off by so much of a token of the global view, down more than across; some of its mass
# beside the evidence; and now and then it looks elsewhere.
OFF = (0.12, 0.05)
BESIDE, NOWHERE, LOST = 0.05, 0.015, 0.015

NOTHING = Ask("", "", "")


def a_price(rng: Random) -> float:
    """What a token must bring in: the engine's depends on how much writing there is."""
    return rng.uniform(min(PRICE), max(PRICE))


def frame_of(width: int, height: int) -> Grid:
    """The plain processor's token grid of an image that is neither too small nor too large for it."""
    return round(height / UNIT), round(width / UNIT)


def first_look(width: int, height: int, share: float | None) -> tuple[Grid, int]:
    """Grid of the global view and tokens left for zooming; the whole frame and 0 where nothing is zoomed."""
    frame = frame_of(width, height)
    full = frame[0] * frame[1]
    budget = None if share is None else min(full, max(int(full * share), LEAST))
    total, grid = plan_global_view(frame, LodParams(budget=budget), RULE)
    return grid, 0 if grid == frame else total - grid[0] * grid[1]


def ink(x: NDArray[np.float32], y: NDArray[np.float32], width: int, height: int, look: Grid) -> Map:
    """How much stands where in the tokens of the global view: marks counted by their middles."""
    lines, columns = look[0] * FINE, look[1] * FINE
    inside = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    place = (y[inside] * lines / height).astype(np.int64) * columns + (x[inside] * columns / width).astype(
        np.int64
    )
    return np.bincount(place, minlength=lines * columns).reshape(lines, columns).astype(np.float32)


def _over(low: float, high: float, length: float, cells: int) -> NDArray[np.float64]:
    """Pixels of each of the cells along a side that lie between two places."""
    edges = np.arange(cells + 1) * (length / cells)
    over: NDArray[np.float64] = np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1])
    return np.maximum(over, 0.0)


def _seen(box: Box, width: int, height: int, look: Grid) -> NDArray[np.float64]:
    mass = np.outer(_over(box[1], box[3], height, look[0]), _over(box[0], box[2], width, look[1]))
    share: NDArray[np.float64] = mass / max(float(mass.sum()), 1e-6)
    return share


def guess(ask: Ask, width: int, height: int, look: Grid, rng: Random) -> Map:
    """What a head might say about where a question's evidence lies."""
    rows, columns = look
    if not ask.parts or rng.random() < LOST:
        y, x = rng.uniform(0, rows), rng.uniform(0, columns)
        down, across = np.arange(rows) + 0.5 - y, np.arange(columns) + 0.5 - x
        found = np.exp(-(down[:, None] ** 2 + across[None] ** 2) / 2)
    else:
        found = np.zeros(look)
        dy, dx = rng.gauss(0, OFF[0]) * height / rows, rng.gauss(0, OFF[1]) * width / columns
        for (x0, y0, x1, y1), weight in ask.parts:
            moved = (x0 + dx, y0 + dy, x1 + dx, y1 + dy)
            found += weight * rng.lognormvariate(0, 0.4) * _seen(moved, width, height, look)
    found /= max(float(found.sum()), 1e-6)
    wide = np.pad(found, 1)
    beside = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
    found = (1 - BESIDE - NOWHERE) * found + BESIDE / 4 * beside + NOWHERE / found.size
    relevance: Map = (found / found.sum()).astype(np.float32)
    return relevance


class Chooser:
    """Windows for the questions of images of one size, seen first in one grid."""

    def __init__(self, width: int, height: int, look: Grid, left: int) -> None:
        self.size, self.look, self.left = (width, height), look, left
        self.frame = frame_of(width, height)
        flat = np.ones((look[0] * FINE, look[1] * FINE), np.float32)
        every = windows(Field(flat, self.size, self.frame), RULE, left)
        self.windows = tuple(one for one in every if one.tokens <= left)

    def field(self, ask: Ask, fine: Map, rng: Random) -> Field:
        relevance = refine(guess(ask, *self.size, self.look, rng), fraction_within_token(fine))
        return Field(relevance, self.size, self.frame, most=rng.choice((2, 2, 3, 4)))

    def free(self, field: Field, price: float) -> tuple[Region, ...]:
        """Windows of any grid."""
        return allocate([field], self.left, RULE, price)[0]

    def of(self, field: Field, grid: Grid, price: float) -> tuple[Region, ...]:
        """Windows of one grid, at either scale."""
        some: tuple[Window, ...] = tuple(one for one in self.windows if one.grid == grid)
        return spend([field], [some], self.left, price)[0]

    def anywhere(self, grid: Grid, fine: Map, rng: Random) -> Region:
        """A window that no question asked for."""
        return rng.choice(self.of(self.field(NOTHING, fine, rng), grid, 0.0))
