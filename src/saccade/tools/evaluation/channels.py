"""What the texture's channels are worth: how well the maps made from it find the evidence, with each group of
channels taken out.

takes   examples whose evidence has a place
gives   for each group, the mean area under the ROC curve of the two maps that need no question, over the
        tokens of a global view (1: every token of the evidence scores above every other; 0.5: chance)
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.inputs.image_processor import ImageProcessing
from saccade.lod.global_view import shrink
from saccade.lod.scorers import lost, perspectival, propositional
from saccade.lod.texture import CHANNELS, texture
from saccade.lod.types import Grid
from saccade.tools.evaluation.methods import EVERYWHERE
from saccade.tools.evaluation.question_set import Example

LOOK = 64  # tokens of the global view the maps are made for
GROUPS: dict[str, tuple[str, ...]] = {
    "all": (),
    "without red, green, blue": ("red", "green", "blue"),
    "without L*, a*": ("lightness", "green_red"),
    "without Sobel": ("edge_x", "edge_y", "edge"),
    "without place": ("y", "x", "eccentricity"),
    "without entropy": ("entropy",),
    "without text": ("text",),
}
MAPS = {"propositional": propositional, "perspectival": perspectival, "lost": lost}


@dataclass(frozen=True)
class Found:
    """Of one group and map: the mean over the examples."""

    group: str
    map: str
    area: float
    examples: int


class Channels:
    """Collects over examples."""

    def __init__(self, processing: ImageProcessing) -> None:
        self._processing = processing
        self._areas: dict[tuple[str, str], list[float]] = {
            (group, name): [] for group in GROUPS for name in MAPS
        }

    def add(self, example: Example) -> None:
        height, width = example.image.shape[:2]
        x0, y0, x1, y1 = example.box
        if (x1 - x0) * (y1 - y0) > EVERYWHERE * width * height:
            return
        grid = shrink(self._processing.token_grid(width, height), LOOK)
        wanted = evidence(example.box, (width, height), grid)
        if wanted.all() or not wanted.any():
            return
        whole = texture(torch.from_numpy(np.ascontiguousarray(example.image)))
        for group, names in GROUPS.items():
            some = whole.clone()
            for name in names:
                some[CHANNELS.index(name)] = 0
            for name, score in MAPS.items():
                self._areas[group, name].append(area(score(some, grid).numpy(), wanted))

    def found(self) -> tuple[Found, ...]:
        return tuple(
            Found(group, name, sum(areas) / len(areas), len(areas))
            for (group, name), areas in self._areas.items()
            if areas
        )


def evidence(box: tuple[float, ...], size: tuple[int, int], grid: Grid) -> NDArray[np.bool_]:
    """Tokens that hold at least half as much of the evidence as the one that holds most."""
    (x0, y0, x1, y1), (width, height), (rows, columns) = box, size, grid
    down, across = np.arange(rows + 1) * height / rows, np.arange(columns + 1) * width / columns
    high = np.clip(np.minimum(y1, down[1:]) - np.maximum(y0, down[:-1]), 0, None)
    wide = np.clip(np.minimum(x1, across[1:]) - np.maximum(x0, across[:-1]), 0, None)
    held = high[:, None] * wide[None]
    inside: NDArray[np.bool_] = (held >= held.max() / 2) & (held > 0)
    return inside


def area(scores: NDArray[np.float32], wanted: NDArray[np.bool_]) -> float:
    """Chance that a wanted token scores above another one; ties count half."""
    ours, others = scores[wanted], scores[~wanted]
    above = (ours[:, None] > others[None]).mean(dtype=np.float64)
    same = (ours[:, None] == others[None]).mean(dtype=np.float64)
    return float(above + same / 2)
