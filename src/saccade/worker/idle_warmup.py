"""While nobody waits: the tower's graphs for views of less than full detail, before the first of them comes.

takes   the tower's graphs, what the checkpoint does to pictures, the views it can be given
gives   one more captured shape a call, until all that are likely are there
owns    the list of those
never   makes another shape leave, or fails: what cannot be captured runs without

A shape that comes for the first time costs plans of the libraries and, a little later, captures, while its
request waits. Graphs take views of any grid of so many patches, so zoomed views have few shapes, whatever the
picture: the ladder's and, where a budget leaves less than its second level, windows that take all of that:
37 sizes of 12 to 63 tokens, of which fifteen are nine in ten. Global views have those that the usual wishes
give pictures of the usual sizes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np

from saccade.encoder.encoder_graphs import EncoderGraphs, TowerShape
from saccade.inputs.image_processor import ImageProcessor
from saccade.lod.allocate import Field, windows
from saccade.lod.global_view import plan_global_views
from saccade.lod.types import Detail, Grid, LodParams, ViewRule
from saccade.worker.warmup import SIZES

SOURCES = (*SIZES, (2048, 2048))  # width, height of pictures
SIDES = range(320, 2049, 192)  # of pictures of any proportions
USUAL = 10  # of those count as much as one of SOURCES
SHARES = (0.25, 0.12)  # of full detail's tokens: budgets that are asked for
ZOOMS_TOGETHER = (1, 2, 4, 8, 16, 32, 64)  # views of one level of the ladder in a call
WINDOWS_TOGETHER = 2  # the same, at most: of windows between its levels
WINDOWS = 16  # sizes of those that come first
LOOKS_TOGETHER = (1, 2, 4)  # of global views, which come one by one
SPARE = 16  # shapes left for what nobody foresees


class Ahead:
    def __init__(self, graphs: EncoderGraphs, shapes: Sequence[TowerShape]) -> None:
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
    processing: ImageProcessor,
    rule: ViewRule,
    graphs: EncoderGraphs,
    most_tokens: int,
    *,
    alone: bool = False,
) -> list[TowerShape]:
    """Those that come often first: one view of the ladder's levels, global views and the commonest windows;
    two together; of levels as many as go together (`alone`: always one); then other windows, and global views
    together. None that a context of `most_tokens` could not hold."""
    zooms, looks = zoom_grids(processing, rule), look_grids(processing, rule)
    levels = Counter({grid: n for grid, n in zooms.items() if grid[0] * grid[1] in rule.zoom_tokens})
    others = zooms - levels
    any_left = window_grids(processing, rule)
    shapes: dict[TowerShape, None] = {}

    def add(grids: Counter[Grid], views: int, most: int | None = None) -> None:
        found: Counter[TowerShape] = Counter()
        for (rows, columns), count in grids.items():
            if rows * columns < most_tokens:
                patches = rows * processing.merge_size, columns * processing.merge_size
                found[graphs.shape_for(patches, views)] += count
        for shape, _ in found.most_common(most):
            if graphs.views_per_call(shape.size, views) == views:
                shapes[shape] = None

    for views in ZOOMS_TOGETHER[: 1 if alone else None]:
        add(levels, views)
        if views <= WINDOWS_TOGETHER:
            add(others, views, WINDOWS)
        if views == 1:
            add(looks, views)
    add(any_left, 1)
    add(others, 1)
    for views in () if alone else LOOKS_TOGETHER:
        add(looks, views)
    return list(shapes)


def zoom_grids(processing: ImageProcessor, rule: ViewRule) -> Counter[Grid]:
    """Token grids of zoomed views that usual wishes pay for, by how many wishes and sizes of pictures do."""
    found: Counter[Grid] = Counter()
    sizes = dict.fromkeys(((width, height) for width in SIDES for height in SIDES), 1)
    for size, weight in (sizes | dict.fromkeys(SOURCES, USUAL)).items():
        frame = processing.token_grid(*size)
        for budget, grid in _looks(frame, rule):
            for window in _windows(size, frame, rule, budget - grid[0] * grid[1]):
                found[window] += weight
    return found


def window_grids(processing: ImageProcessor, rule: ViewRule) -> Counter[Grid]:
    """Token grids of the windows that take all a budget leaves, between the ladder's first two levels: by how
    many budgets have them."""
    first, second = (*sorted(rule.zoom_tokens), 0, 0)[:2]
    size = SOURCES[-1]
    frame = processing.token_grid(*size)
    return Counter(grid for left in range(first, second) for grid in _windows(size, frame, rule, left))


def look_grids(processing: ImageProcessor, rule: ViewRule) -> Counter[Grid]:
    """Token grids of global views, by how many wishes and usual sizes have them."""
    found: Counter[Grid] = Counter()
    for size in SOURCES:
        frame = processing.token_grid(*size)
        found.update(grid for _, grid in _looks(frame, rule, "medium", "low") if grid != frame)
    return found


def _looks(frame: Grid, rule: ViewRule, *levels: Detail) -> Iterator[tuple[int, Grid]]:
    """Budgets and grids of the global views that the usual wishes, and these, have of a picture."""
    full = frame[0] * frame[1]
    detail_req = [LodParams(detail=level) for level in ("auto", *levels)]
    detail_req += [LodParams(budget=max(1, int(full * share))) for share in SHARES]
    for wish in detail_req:
        found = plan_global_views([frame], wish, rule)
        yield found.budget, found.grids[0]


def _windows(size: tuple[int, int], frame: Grid, rule: ViewRule, left: int) -> set[Grid]:
    """Of zoomed views of a picture for which so many tokens are left."""
    field = Field(np.zeros(frame, dtype=np.float32), size, frame)
    return {window.grid for window in windows(field, rule, left) if window.tokens <= left}
