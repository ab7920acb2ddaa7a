"""While nobody waits: the tower's graphs for views of less than full detail, before the first of them comes.

takes   the tower's graphs, what the checkpoint does to pictures, the views it can be given
gives   one more captured shape a call, until all that are likely are there
owns    the list of those
never   makes another shape leave, or fails: what cannot be captured runs without

A shape that comes for the first time costs plans of the libraries and, a little later, captures, while its
request waits. Zoomed views have few shapes, whatever the picture: the ladder's, cut to the frame of smaller
ones. Global views have those that the usual wishes give pictures of the usual sizes.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from saccade.lod.allocate import WHOLE, Field, windows
from saccade.lod.glance import glance
from saccade.lod.values import Grid, LodParams, ViewRule
from saccade.media.geometry import ImageProcessing
from saccade.runtime.warm import SIZES
from saccade.vision.graphs import Shape, TowerGraphs

SOURCES = (*SIZES, (2048, 2048))  # width, height of pictures
SHARES = (0.25, 0.12)  # of full detail's tokens: budgets that are asked for
ZOOMS_TOGETHER = (1, 2, 4, 8, 16, 32, 64)  # views of one grid in a call
LOOKS_TOGETHER = 4  # the same, at most: of global views, which have more shapes and come one by one
SPARE = 16  # shapes left for what nobody foresees


class Ahead:
    def __init__(self, graphs: TowerGraphs, shapes: Sequence[Shape]) -> None:
        self._graphs = graphs
        self._later = deque(shapes)

    def __len__(self) -> int:
        """Shapes that have not been thought of yet."""
        return len(self._later)

    def go_on(self) -> bool:
        """Capture one more shape; gives whether there was one."""
        while self._later:
            if self._graphs.capture(self._later.popleft(), spare=SPARE):
                return True
        return False


def likely_shapes(
    processing: ImageProcessing, rule: ViewRule, graphs: TowerGraphs, most_tokens: int, *, alone: bool = False
) -> list[Shape]:
    """Those of many sizes of pictures first: one view, then two together, four, and of zoomed ones as many
    as go together (`alone`: always one); then those of a single size, one view. None that a context of
    `most_tokens` could not hold."""
    zooms, looks = zoom_grids(processing, rule), look_grids(processing, rule)
    shapes: dict[Shape, None] = {}

    def add(grids: Counter[Grid], views: int, *, common: bool) -> None:
        for (rows, columns), count in grids.most_common():
            patches = rows * processing.merge_size, columns * processing.merge_size
            fits = rows * columns < most_tokens and graphs.together(patches, views) == views
            if fits and (count > 1) == common:
                shapes[Shape(patches, views)] = None

    for views in ZOOMS_TOGETHER[: 1 if alone else None]:
        add(zooms, views, common=True)
        if views <= LOOKS_TOGETHER:
            add(looks, views, common=True)
    add(zooms, 1, common=False)
    add(looks, 1, common=False)
    return list(shapes)


def zoom_grids(processing: ImageProcessing, rule: ViewRule) -> Counter[Grid]:
    """Token grids of zoomed views, by how many of the usual sizes have them."""
    found: Counter[Grid] = Counter()
    for size in SOURCES:
        frame = processing.token_grid(*size)
        field = Field(np.zeros(frame, dtype=np.float32), size, frame)
        ladder = windows(field, rule, max(rule.zoom_tokens, default=0))
        found.update(window.grid for window in ladder if window.sharp == WHOLE)
    return found


def look_grids(processing: ImageProcessing, rule: ViewRule) -> Counter[Grid]:
    """Token grids of global views, by how many wishes and usual sizes have them."""
    found: Counter[Grid] = Counter()
    for size in SOURCES:
        frame = processing.token_grid(*size)
        full = frame[0] * frame[1]
        wishes = [LodParams(detail="auto"), LodParams(detail="medium"), LodParams(detail="low")]
        wishes += [LodParams(budget=max(1, int(full * share))) for share in SHARES]
        grids = [glance([frame], wish, rule).grids[0] for wish in wishes]
        found.update(grid for grid in grids if grid != frame)
    return found
