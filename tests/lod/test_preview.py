"""A decision can be drawn, whatever the picture's shape."""

import numpy as np
import pytest

from saccade.lod.preview import FRAME, LONGEST, annotate
from saccade.lod.types import ImageMaps, Region, RelevanceMaps, ZoomChoice


def look(rows: int, columns: int) -> RelevanceMaps:
    flat = np.full((rows, columns), 0.5, np.float32)
    return RelevanceMaps(
        image_maps=ImageMaps(propositional=flat, perspectival=flat, lost=flat), participatory=flat
    )


@pytest.mark.parametrize("size", [(1, 1), (10, 2000), (2000, 10), (300, 200)])
def test_any_picture_is_drawn_within_bounds(size: tuple[int, int]) -> None:
    width, height = size
    choice = ZoomChoice(relevance=np.zeros((2, 3), np.float32), gated="nothing to see")
    image = annotate(np.zeros((height, width, 3), np.uint8), look(2, 3), choice)
    assert image.mode == "RGB"
    assert max(image.size) <= LONGEST + 500


def test_a_zoomed_view_has_its_frame_and_relevance_its_heat() -> None:
    relevance = np.zeros((4, 4), np.float32)
    relevance[1, 2] = 1.0
    choice = ZoomChoice(relevance=relevance, regions=(Region((200, 100, 300, 200), (4, 4), 1.0),))
    drawn = np.asarray(annotate(np.full((400, 400, 3), 128, np.uint8), look(4, 4), choice))
    assert tuple(drawn[150, 200]) == FRAME  # the left side of the box
    assert drawn[150, 250].astype(int).sum() > drawn[350, 50].astype(int).sum() + 60
