"""Spends tokens: which windows of which images are zoomed, and at which level of the ladder.

A window is a token grid over the frame (the image at full detail) whose tokens cover what they cover at full
detail, or slightly more; relevance seen less sharply counts for less. A window covers the cells whose centres
it contains. Windows are chosen greedily by newly covered relevance minus price, so more relevance in a cell
never uncovers it. Relevance is counted in integer units of 2^-24: sums are exact, and ties go to the smaller
level, then to the earlier image and position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.lod.types import Grid, Map, Region, ViewRule

UNITS = 1 << 24  # of relevance 1
Units = NDArray[np.signedinteger[Any]]
MOST = 1e6  # upper bound on the relevance of a cell; the usual sum over an image is 1
LATTICE = 0.5  # in tokens of the frame: windows start at multiples of it if their cells allow it
TINY = 1e-9  # of a side
# token grids of each level: square, and wide with the same number of tokens
SHAPES: dict[int, tuple[Grid, ...]] = {
    16: ((4, 4), (2, 8)),
    64: ((8, 8), (4, 16)),
    196: ((14, 14), (7, 28)),
    400: ((20, 20), (10, 40)),
}
# Rows of windows that spend a whole budget between the first two levels, which differ by a factor of 4.
ROWS = (2, 3, 4, 5, 6, 8, 10, 12)
# (frame pixels per window pixel, weight of relevance at that scale in 64ths)
SCALES = ((1.0, 64), (1.2, 57))
WHOLE = 64


@dataclass(frozen=True)
class Field:
    """One image to allocate in."""

    relevance: Map  # >= 0; sums to about 1
    size: tuple[int, int]  # width, height of the source in pixels
    frame: Grid
    most: int = 8  # windows


@dataclass(frozen=True)
class Window:
    """A candidate: a token grid, and the cells it covers."""

    grid: Grid
    share: tuple[float, float]  # of the image's height and width
    cells: Grid  # rows, columns of cells covered
    tokens: int
    sharp: int = WHOLE  # weight of relevance seen through it, in 64ths


class _Pick(NamedTuple):
    field: int
    window: Window
    at: Grid  # first row and column of cells covered
    gain: int


def allocate(
    fields: Sequence[Field], budget: int, rule: ViewRule, price: float
) -> tuple[tuple[Region, ...], ...]:
    """Windows for each image. `price` is the relevance one token must add."""
    return spend(fields, [windows(field, rule, budget) for field in fields], budget, price)


def spend(
    fields: Sequence[Field], shapes: Sequence[tuple[Window, ...]], budget: int, price: float
) -> tuple[tuple[Region, ...], ...]:
    """Choose among the given windows of each image."""
    if not (price >= 0):
        raise ValueError(f"price is {price}; relevance per token, at least 0, is needed")
    grounds = [_Ground(field.relevance, some) for field, some in zip(fields, shapes, strict=True)]
    picks: list[_Pick] = []
    cost, left = round(price * UNITS), budget
    most = [field.most for field in fields]
    while True:
        open_ = [i for i, more in enumerate(most) if more > 0]
        best = _best(grounds, open_, left, cost)
        if best is None:
            break
        picks.append(best)
        left -= best.window.tokens
        most[best.field] -= 1
        grounds[best.field].cover(best.at, best.window.cells)
    return tuple(
        _in_reading_order(_region(fields[i], pick) for pick in picks if pick.field == i)
        for i in range(len(fields))
    )


def windows(field: Field, rule: ViewRule, budget: int) -> tuple[Window, ...]:
    """The distinct windows of an image, cheapest first: those of the ladder and, if the budget lies between
    its first two levels, those that spend all of it. Windows are clipped to the frame."""
    cells_down, cells_across = field.relevance.shape
    first, second = (*sorted(rule.zoom_tokens), 0, 0)[:2]
    between = budget if first <= budget < second and not rule.square else 0
    return _windows(field.frame, (cells_down, cells_across), rule, between)


@lru_cache(maxsize=256)
def _windows(frame: Grid, cells: Grid, rule: ViewRule, between: int) -> tuple[Window, ...]:
    high, wide = frame[0] * rule.unit, frame[1] * rule.unit
    found: dict[tuple[Grid, int], Window] = {}
    for times, sharp in SCALES:
        step = rule.unit * times
        for tall, long in _grids(rule, between):
            grid = min(tall, _tokens(high, step)), min(long, _tokens(wide, step))
            share = min(grid[0] * step / high, 1.0), min(grid[1] * step / wide, 1.0)
            covered = _covered(share[0], cells[0]), _covered(share[1], cells[1])
            found.setdefault((grid, sharp), Window(grid, share, covered, grid[0] * grid[1], sharp))
    return tuple(sorted(found.values(), key=lambda one: (one.tokens, -one.sharp, one.grid)))


def _grids(rule: ViewRule, between: int) -> Iterator[Grid]:
    for level in rule.zoom_tokens:
        yield from SHAPES[level][: 1 if rule.square else None]
    yield from ((rows, between // rows) for rows in ROWS if between // rows > 1)


def _tokens(pixels: float, step: float) -> int:
    return max(1, -int(-pixels // step))


def _covered(share: float, cells: int) -> int:
    """Number of cells whose centres fit into this share of the side; at least one."""
    return max(1, min(cells, int(share * cells + 0.5)))


class _Ground:
    """Uncovered relevance of one image, and the gain of each window."""

    def __init__(self, relevance: Map, windows: tuple[Window, ...]) -> None:
        self.windows = windows
        self._rest = _whole(relevance)
        # Per window: its gain at its best position when that was last computed. Relevance only decreases, so
        # this is an upper bound, and it is exact while the position is still known.
        self.bounds = [int(self._rest.sum())] * len(windows)
        self._places: list[Grid | None] = [None] * len(windows)
        self._sums: Units | None = None
        self._tall: dict[int, Units] = {}  # column sums by window height

    def best(self, number: int) -> tuple[int, Grid]:
        """Largest gain of a window and its position; the first of equals."""
        at = self._places[number]
        if at is None:
            high, wide = self.windows[number].cells
            if high not in self._tall:
                if self._sums is None:
                    self._sums = _sums(self._rest)
                self._tall[high] = self._sums[high:] - self._sums[:-high]
            gains = self._tall[high][:, wide:] - self._tall[high][:, :-wide]
            place = int(gains.argmax())
            self.bounds[number] = gains.item(place)
            at = self._places[number] = divmod(place, gains.shape[1])
        return self.bounds[number], at

    def cover(self, at: Grid, cells: Grid) -> None:
        """Remove the relevance of covered cells. Windows with their best position elsewhere keep it."""
        (top, left), (below, right) = at, (at[0] + cells[0], at[1] + cells[1])
        self._rest[top:below, left:right] = 0
        self._sums = None
        self._tall.clear()
        for number, place in enumerate(self._places):
            if place is not None:
                (row, column), (high, wide) = place, self.windows[number].cells
                if row < below and top < row + high and column < right and left < column + wide:
                    self._places[number] = None


def _sums(rest: Units) -> Units:
    """Summed-area table: [rows + 1, columns + 1]."""
    sums = np.zeros((rest.shape[0] + 1, rest.shape[1] + 1), rest.dtype)
    np.add.accumulate(np.add.accumulate(rest, 1, rest.dtype), 0, rest.dtype, sums[1:, 1:])
    return sums


def _whole(relevance: Map) -> Units:
    """Relevance in integer units; 32-bit if all sums fit, which is faster."""
    units = relevance * np.float64(UNITS)
    least, most = units.min(initial=0), units.max(initial=0)  # NaN propagates to both
    if not (least >= 0 and most < np.inf):
        raise ValueError("relevance must be finite and at least 0 everywhere")
    if most > MOST * UNITS:
        np.minimum(units, MOST * UNITS, out=units)
    np.rint(units, out=units)
    return units.astype(np.int32 if np.add.reduce(units, None) < 1 << 31 else np.int64)


def _best(grounds: Sequence[_Ground], open_: list[int], left: int, cost: int) -> _Pick | None:
    """The window of the largest worth, if any is positive and fits."""
    best: _Pick | None = None
    rank = 0, 0, 0  # of the best: worth, then image and window, negated, for ties
    for promised in _by_promise(grounds, open_, left, cost):
        if promised <= rank:
            break  # bounds are sorted: no later window can win
        _, first, then = promised
        window = grounds[-first].windows[-then]
        gain, at = grounds[-first].best(-then)
        worth = gain * window.sharp // WHOLE - cost * window.tokens
        if worth > 0 and (worth, first, then) > rank:
            rank = worth, first, then
            best = _Pick(-first, window, at, gain)
    return best


def _by_promise(
    grounds: Sequence[_Ground], open_: list[int], left: int, cost: int
) -> list[tuple[int, int, int]]:
    """Windows that fit, sorted by the upper bound of their worth: (bound, -image, -window)."""
    found = [
        (bound * window.sharp // WHOLE - cost * window.tokens, -i, -number)
        for i in open_
        for number, (bound, window) in enumerate(zip(grounds[i].bounds, grounds[i].windows, strict=True))
        if window.tokens <= left
    ]
    return sorted([one for one in found if one[0] > 0], reverse=True)


def _region(field: Field, pick: _Pick) -> Region:
    """The window in source pixels, centred on its relevance as far as its cells and the lattice allow. The
    lattice makes different questions about one region choose the same window, which the encoder cache
    then has."""
    (row, column), (high, wide) = pick.at, pick.window.cells
    seen = field.relevance[row : row + high, column : column + wide].astype(np.float64)
    down, across = seen.sum(1).tolist(), seen.sum(0).tolist()
    (tall, broad), (cells_down, cells_across) = field.frame, field.relevance.shape
    x0, x1 = _along(across, column, cells_across, pick.window.share[1], field.size[0], broad)
    y0, y1 = _along(down, row, cells_down, pick.window.share[0], field.size[1], tall)
    return Region((x0, y0, x1, y1), pick.window.grid, pick.gain / UNITS)


def _along(
    profile: list[float], at: int, cells: int, share: float, length: int, tokens: int
) -> tuple[int, int]:
    """First pixel and end of a window along one side. `profile`: relevance of the cells it covers, from cell
    `at` on. Plain Python is faster than arrays for so few numbers."""
    count = len(profile)
    slack = max(0.0, (share * cells - (count - 1)) / 2)  # in cells, on either side
    moment = sum([mass * (place + 0.5) for place, mass in enumerate(profile)])
    off = moment / max(sum(profile), 1e-12) - count / 2
    middle, end = at + count / 2, 1.0 - share
    half = share / 2
    low = min(max((middle - slack) / cells - half, 0.0), end)
    first = min(max((middle + min(max(off, -slack), slack)) / cells - half, 0.0), end)
    high = min(max((middle + slack) / cells - half, 0.0), end)
    point = LATTICE / tokens
    near = int(first / point + 0.5) * point
    near += point * ((near < low - TINY) - (near > high + TINY))  # next if out of range
    first = min(max(near, low), high)
    begin = min(int(first * length + 0.5), length - 1)
    return begin, min(max(int((first + share) * length + 0.5), begin + 1), length)


def _in_reading_order(regions: Iterator[Region]) -> tuple[Region, ...]:
    """Sorted by vertical centre, then from the left."""
    return tuple(sorted(regions, key=lambda region: (region.box[1] + region.box[3], region.box)))
