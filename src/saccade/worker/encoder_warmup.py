"""Warm-up of the vision tower: images of common sizes before serving, views of less than full detail when
idle.

A shape that is new costs library plans and, a little later, captures, while its request waits. Tower graphs
take any grid of so many patches, so zoomed views have few shapes whatever the image: those of the ladder and,
where a budget leaves less than the ladder's second level, windows that use all of it (37 sizes of 12 to 63
tokens, fifteen of which are nine in ten). Global views have the shapes that common requests give to images of
common sizes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np

from saccade.encoder.encoder_graphs import EncoderGraphs, TowerShape
from saccade.encoder.encoder_runner import EncoderRunner
from saccade.inputs.image_processor import ImageProcessor, plain_view
from saccade.lod.allocate import Field, windows
from saccade.lod.detail import plan_global_view
from saccade.lod.types import Detail, Grid, LodParams, ViewRule
from saccade.step_plan import EncodeTask
from saccade.worker.cuda_graphs import progress_bar

# Width, height of images. The last is the largest that is captured.
SIZES = (
    (448, 448),
    (512, 512),
    (640, 480),
    (480, 640),
    (768, 768),
    (1024, 768),
    (1024, 1024),
    (1280, 720),
    (1920, 1080),
)
# Every order of resizing, at sizes that are and are not multiples of 16: the kernels differ by that.
ODD_SIZES = (
    (1023, 767),
    (1040, 767),
    (1023, 784),
    (1040, 784),
    (1024, 767),  # columns only
    (1023, 768),
    (333, 2999),  # columns first
    (336, 2999),
    (61, 47),  # enlarged
)
VIEWS_PER_CALL = (1, 2, 4)  # of one size; larger views run alone
SOURCES = (*SIZES, (2048, 2048))  # width, height of images
SIDES = range(320, 2049, 192)  # of images of any aspect ratio
SOURCE_WEIGHT = 10  # an image of SOURCES counts as many of those
BUDGETS = (0.25, 0.12)  # of full detail's tokens
ZOOMS_PER_CALL = (1, 2, 4, 8, 16, 32, 64)  # views of one level of the ladder
WINDOWS_PER_CALL = 2  # at most, of windows between its levels
FIRST_WINDOWS = 16  # window sizes captured first
GLOBAL_VIEWS_PER_CALL = (1, 2, 4)
SPARE = 16  # graphs left for other shapes


def warm_up_encoder(
    encoder: EncoderRunner,
    processing: ImageProcessor,
    max_tokens: int,
    *,
    progress: bool,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> int:
    """Encode images of common sizes that fit a context of `max_tokens`, each twice: captured, then replayed.
    Returns the number of different calls."""
    calls = [call for size in sizes for call in _calls(encoder, size, processing, max_tokens)]
    with progress_bar(progress) as bar:
        for call in bar.track(calls, description="images"):
            for _ in range(2):
                encoder.encode(call, capture=True)
        for size in bar.track(ODD_SIZES, description="odd sizes"):
            encoder.preprocess(_blank_images(size, processing, 1))
    return len(calls)


def _calls(
    encoder: EncoderRunner, size: tuple[int, int], processing: ImageProcessor, max_tokens: int
) -> list[list[EncodeTask]]:
    encodes = _blank_images(size, processing, max(VIEWS_PER_CALL))
    first = encodes[0].view
    if first.tokens >= max_tokens:
        return []
    return [
        encodes[:count]
        for count in VIEWS_PER_CALL
        if encoder.views_per_call(encodes[0].patches, count) == count
    ]


def _blank_images(size: tuple[int, int], processing: ImageProcessor, count: int) -> list[EncodeTask]:
    """A black image, as so many different ones."""
    width, height = size
    pixels = np.zeros((1, height, width, 3), dtype=np.uint8)
    views = [plain_view(index.to_bytes(16, "little"), size, processing) for index in range(count)]
    return [EncodeTask(view, view.key, pixels) for view in views]


class TowerWarmup:
    def __init__(self, graphs: EncoderGraphs, shapes: Sequence[TowerShape]) -> None:
        self._graphs = graphs
        self._later = deque(shapes)

    def __len__(self) -> int:
        """Shapes not tried yet."""
        return len(self._later)

    def capture_next(self) -> bool:
        """Capture one more shape; returns whether there was one. Evicts nothing."""
        while self._later:
            if self._graphs.capture(self._later.popleft(), spare=SPARE):
                return True
        return False


def likely_tower_shapes(
    processing: ImageProcessor,
    rule: ViewRule,
    graphs: EncoderGraphs,
    max_tokens: int,
    *,
    alone: bool = False,
) -> list[TowerShape]:
    """Frequent shapes first: one view of the ladder's levels, global views and the commonest windows; two per
    call; more views of levels per call; then other windows and more global views per call. `alone`: one view
    per call. None that a context of `max_tokens` could not hold."""
    if not processing.supports_lod:  # all views have the shapes that `warm_up_encoder` captures
        return []
    zooms, global_views = zoom_view_grids(processing, rule), global_view_grids(processing, rule)
    levels = Counter({grid: n for grid, n in zooms.items() if grid[0] * grid[1] in rule.zoom_tokens})
    others = zooms - levels
    any_left = window_grids(processing, rule)
    shapes: dict[TowerShape, None] = {}

    def add(grids: Counter[Grid], views: int, most: int | None = None) -> None:
        found: Counter[TowerShape] = Counter()
        for (rows, columns), count in grids.items():
            if rows * columns < max_tokens:
                patches = rows * processing.merge_size, columns * processing.merge_size
                found[graphs.shape_for(patches, views)] += count
        for shape, _ in found.most_common(most):
            if graphs.views_per_call(shape.size, views) == views:
                shapes[shape] = None

    for views in ZOOMS_PER_CALL[: 1 if alone else None]:
        add(levels, views)
        if views <= WINDOWS_PER_CALL:
            add(others, views, FIRST_WINDOWS)
        if views == 1:
            add(global_views, views)
    add(any_left, 1)
    add(others, 1)
    for views in () if alone else GLOBAL_VIEWS_PER_CALL:
        add(global_views, views)
    return list(shapes)


def zoom_view_grids(processing: ImageProcessor, rule: ViewRule) -> Counter[Grid]:
    """Token grids of zoomed views under common budgets, counted over budgets and image sizes."""
    found: Counter[Grid] = Counter()
    sizes = dict.fromkeys(((width, height) for width in SIDES for height in SIDES), 1)
    for size, weight in (sizes | dict.fromkeys(SOURCES, SOURCE_WEIGHT)).items():
        frame = processing.token_grid(*size)
        for budget, grid in _global_views(frame, rule):
            for window in _windows(size, frame, rule, budget - grid[0] * grid[1]):
                found[window] += weight
    return found


def window_grids(processing: ImageProcessor, rule: ViewRule) -> Counter[Grid]:
    """Token grids of the windows that use all a budget leaves, between the ladder's first two levels, counted
    over budgets."""
    first, second = (*sorted(rule.zoom_tokens), 0, 0)[:2]
    size = SOURCES[-1]
    frame = processing.token_grid(*size)
    return Counter(grid for left in range(first, second) for grid in _windows(size, frame, rule, left))


def global_view_grids(processing: ImageProcessor, rule: ViewRule) -> Counter[Grid]:
    """Token grids of global views, counted over common requests and image sizes."""
    found: Counter[Grid] = Counter()
    for size in SOURCES:
        frame = processing.token_grid(*size)
        found.update(grid for _, grid in _global_views(frame, rule, "medium", "low") if grid != frame)
    return found


def _global_views(frame: Grid, rule: ViewRule, *levels: Detail) -> Iterator[tuple[int, Grid]]:
    """Budgets and grids of the global views of an image, for common requests and these detail levels."""
    full = frame[0] * frame[1]
    detail_req = [LodParams(detail=level) for level in ("auto", *levels)]
    detail_req += [LodParams(budget=max(1, int(full * share))) for share in BUDGETS]
    for request in detail_req:
        yield plan_global_view(frame, request, rule)


def _windows(size: tuple[int, int], frame: Grid, rule: ViewRule, left: int) -> set[Grid]:
    """Grids of zoomed views of an image for which `left` tokens are left."""
    field = Field(np.zeros(frame, dtype=np.float32), size, frame)
    return {window.grid for window in windows(field, rule, left) if window.tokens <= left}
