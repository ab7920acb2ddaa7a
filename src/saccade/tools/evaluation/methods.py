"""Ways to spend a budget of visual tokens on one question: what `saccade eval-lod` compares.

takes   an example, a method, a level (a share of full detail, or the engine's own choice)
gives   a `Trial`: the picture and the parameters it is asked with
never   asks; knows the right answer, but for the oracle, which knows where it stands
"""

from dataclasses import dataclass
from random import Random

import numpy as np

from saccade.inputs.image_processor import ImageProcessing
from saccade.lod.allocate import Field, allocate, windows
from saccade.lod.choose import PRICE
from saccade.lod.global_view import glance
from saccade.lod.types import SCORERS, Box, Grid, LodParams, Map, Region, ViewRule
from saccade.request import Pixels
from saccade.tools.evaluation.question_set import Example
from saccade.tools.evaluation.resize import least_tokens, shrink, size_within

FULL, RESIZE, RANDOM, BALANCED, ORACLE = "full detail", "resize", "random", "balanced", "oracle"
METHODS = (RESIZE, RANDOM, *SCORERS, BALANCED, ORACLE)
# what each stage is worth: the whole without it
ABLATIONS: dict[str, dict[str, object]] = {
    BALANCED: {},
    "without propositional": {"scorers": ("perspectival", "participatory")},
    "without perspectival": {"scorers": ("propositional", "participatory")},
    "without participatory": {"scorers": ("propositional", "perspectival")},
    "without balance": {"balance": False},
    "without gate": {"gate": False},
}
EVERYWHERE = 0.5  # of the picture: evidence that takes more is in no place


@dataclass(frozen=True)
class Trial:
    """One request. `share` is of the tokens of full detail; None: as `detail: auto` has it."""

    example: Example
    method: str
    share: float | None
    image: Pixels
    lod: LodParams | None
    full: int  # tokens of full detail


@dataclass(frozen=True)
class Bench:
    """What trials are made for: a checkpoint's way of seeing."""

    processing: ImageProcessing
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
        else:
            lod = LodParams(budget=budget, **ABLATIONS[method])  # type: ignore[arg-type]
        return Trial(example, method, share, image, lod, full)

    def resized(self, example: Example, tokens: int, share: float | None, full: int) -> Trial:
        """The picture made smaller as a whole, to at most `tokens`."""
        height, width = example.image.shape[:2]
        size = size_within((width, height), max(tokens, least_tokens(self.processing)), self.processing)
        return Trial(example, RESIZE, share, shrink(example.image, size), None, full)

    def _zooms(self, example: Example, method: str, frame: Grid, lod: LodParams) -> tuple[Region, ...]:
        first = glance([frame], lod, self.rule)
        grid = first.grids[0]
        left = first.budget - grid[0] * grid[1]
        height, width = example.image.shape[:2]
        if grid == frame:
            return ()
        if method == ORACLE:
            return self._true(example.box, (width, height), frame, grid, left)
        field = Field(bump(grid, Random(f"{example.task}/{example.index}")), (width, height), frame, most=1)
        return allocate([field], left, self.rule, PRICE[1])[0]

    def _true(
        self, box: Box | tuple[float, ...], size: tuple[int, int], frame: Grid, grid: Grid, left: int
    ) -> tuple[Region, ...]:
        """The cheapest window that holds the evidence, or the largest there is room for, right on it."""
        width, height = size
        x0, y0, x1, y1 = box
        if (x1 - x0) * (y1 - y0) > EVERYWHERE * width * height:
            return ()
        field = Field(np.ones(grid, np.float32), size, frame)
        fitting = [one for one in windows(field, self.rule, left) if one.tokens <= left]
        if not fitting:
            return ()

        def held(share: tuple[float, float]) -> float:
            return min(1.0, share[0] * height / (y1 - y0)) * min(1.0, share[1] * width / (x1 - x0))

        best = max(fitting, key=lambda one: (round(held(one.share), 3), one.sharp, -one.tokens))
        spans = []
        for low, high, length, share in ((x0, x1, width, best.share[1]), (y0, y1, height, best.share[0])):
            side = max(1, round(share * length))
            start = min(max(round((low + high - side) / 2), 0), length - side)
            spans.append((start, start + side))
        (left_, right), (top, bottom) = spans
        return (Region((left_, top, right, bottom), best.grid, held(best.share)),)


def bump(grid: Grid, rng: Random) -> Map:
    """Relevance around one place drawn at random."""
    y, x = rng.uniform(0, grid[0]), rng.uniform(0, grid[1])
    rows, columns = np.arange(grid[0]) + 0.5, np.arange(grid[1]) + 0.5
    values: Map = np.exp(-((rows[:, None] - y) ** 2 + (columns[None] - x) ** 2) / 2).astype(np.float32)
    values /= values.sum()
    return values


def covered(box: tuple[float, ...], regions: tuple[Region, ...]) -> float:
    """Largest share of the evidence's box in one zoomed view."""
    x0, y0, x1, y1 = box
    area = max((x1 - x0) * (y1 - y0), 1e-9)
    shares = [
        max(0.0, min(x1, r.box[2]) - max(x0, r.box[0]))
        * max(0.0, min(y1, r.box[3]) - max(y0, r.box[1]))
        / area
        for r in regions
    ]
    return max(shares, default=0.0)
