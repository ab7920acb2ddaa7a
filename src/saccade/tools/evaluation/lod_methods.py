"""The ways to spend a budget of visual tokens that `saccade eval-lod` compares.

Only the oracle uses the example's evidence."""

from dataclasses import dataclass
from random import Random

import numpy as np

from saccade.inputs.image_processor import ImageProcessor
from saccade.lod.allocate import Field, allocate, windows
from saccade.lod.controller import PRICE
from saccade.lod.detail import plan_global_view
from saccade.lod.types import SCORERS, Box, Grid, LodParams, Map, Region, ViewRule
from saccade.request import Pixels
from saccade.tools.evaluation.question_set import Example
from saccade.tools.evaluation.resize import least_tokens, shrink, size_within

FULL, RESIZE, RANDOM, BALANCED, ORACLE = "full detail", "resize", "random", "balanced", "oracle"
METHODS = (RESIZE, RANDOM, *SCORERS, BALANCED, ORACLE)
EVERYWHERE = 0.5  # share of the image: larger evidence has no location


@dataclass(frozen=True)
class Trial:
    """One request. `share` of full detail's tokens is its budget; None: the budget of `detail: auto`."""

    example: Example
    method: str
    share: float | None
    image: Pixels
    lod: LodParams | None
    full: int  # tokens of full detail


@dataclass(frozen=True)
class TrialFactory:
    """Makes trials for one checkpoint's image processing."""

    processing: ImageProcessor
    rule: ViewRule

    def trial(self, example: Example, method: str, share: float | None) -> Trial:
        height, width = example.image.shape[:2]
        frame = self.processing.token_grid(width, height)
        full = frame[0] * frame[1]
        budget = None if share is None else min(full, max(int(full * share), least_tokens(self.processing)))
        image, lod = example.image, LodParams(budget=budget)
        if method == FULL or (budget is not None and budget >= full):
            return Trial(example, method, share, image, None, full)
        if method == RESIZE:
            if budget is None:
                raise ValueError("resizing needs a budget")
            return self.resized(example, budget, share, full)
        if method in SCORERS:
            lod = LodParams(budget=budget, scorers=(method,))
        elif method in (RANDOM, ORACLE):
            lod = LodParams(budget=budget, zooms=(self._zooms(example, method, frame, lod),))
        return Trial(example, method, share, image, lod, full)

    def resized(self, example: Example, tokens: int, share: float | None, full: int) -> Trial:
        """The image resized as a whole, to at most `tokens`."""
        height, width = example.image.shape[:2]
        size = size_within((width, height), max(tokens, least_tokens(self.processing)), self.processing)
        return Trial(example, RESIZE, share, shrink(example.image, size), None, full)

    def _zooms(self, example: Example, method: str, frame: Grid, lod: LodParams) -> tuple[Region, ...]:
        budget, grid = plan_global_view(frame, lod, self.rule)
        left = budget - grid[0] * grid[1]
        height, width = example.image.shape[:2]
        if grid == frame:
            return ()
        if method == ORACLE:
            return self._evidence_window(example.box, (width, height), frame, grid, left)
        relevance = random_peak(grid, Random(f"{example.task}/{example.index}"))
        field = Field(relevance, (width, height), frame, most=1)
        return allocate([field], left, self.rule, PRICE[1])[0]

    def _evidence_window(
        self, box: Box | tuple[float, ...], size: tuple[int, int], frame: Grid, grid: Grid, left: int
    ) -> tuple[Region, ...]:
        """The cheapest window that holds the evidence, or the largest that fits the budget, centred on it."""
        width, height = size
        x0, y0, x1, y1 = box
        if (x1 - x0) * (y1 - y0) > EVERYWHERE * width * height:
            return ()
        field = Field(np.ones(grid, np.float32), size, frame)
        fitting = [one for one in windows(field, self.rule, left) if one.tokens <= left]
        if not fitting:
            return ()

        def contained(share: tuple[float, float]) -> float:
            return min(1.0, share[0] * height / (y1 - y0)) * min(1.0, share[1] * width / (x1 - x0))

        best = max(fitting, key=lambda one: (round(contained(one.share), 3), one.sharp, -one.tokens))
        spans = []
        for low, high, length, share in ((x0, x1, width, best.share[1]), (y0, y1, height, best.share[0])):
            side = max(1, round(share * length))
            start = min(max(round((low + high - side) / 2), 0), length - side)
            spans.append((start, start + side))
        (x_low, x_high), (y_low, y_high) = spans
        return (Region((x_low, y_low, x_high, y_high), best.grid, contained(best.share)),)


def random_peak(grid: Grid, rng: Random) -> Map:
    """A relevance map with one peak at a random position."""
    y, x = rng.uniform(0, grid[0]), rng.uniform(0, grid[1])
    rows, columns = np.arange(grid[0]) + 0.5, np.arange(grid[1]) + 0.5
    values: Map = np.exp(-((rows[:, None] - y) ** 2 + (columns[None] - x) ** 2) / 2).astype(np.float32)
    values /= values.sum()
    return values


def covered(box: tuple[float, ...], regions: tuple[Region, ...]) -> float:
    """The largest share of the evidence's box that lies in one zoomed view."""
    x0, y0, x1, y1 = box
    area = max((x1 - x0) * (y1 - y0), 1e-9)
    shares = [
        max(0.0, min(x1, r.box[2]) - max(x0, r.box[0]))
        * max(0.0, min(y1, r.box[3]) - max(y0, r.box[1]))
        / area
        for r in regions
    ]
    return max(shares, default=0.0)
