"""Who is listened to: a question that looks somewhere, or the picture where it looks everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.lod.balance import agreement, balance
from saccade.lod.controller import choose
from saccade.lod.types import (
    FINE,
    SCORERS,
    Grid,
    ImageMaps,
    LodParams,
    Map,
    RelevanceMaps,
    ScoredImage,
    Scorer,
    ViewRule,
    ZoomChoice,
    shares,
)

GRID = (13, 13)
grids = st.tuples(st.integers(1, 12), st.integers(1, 12))


def spots(*top_regions: Grid) -> Map:
    """Something stands there, and nowhere else."""
    found = np.zeros(GRID, np.float32)
    for row, column in top_regions:
        found[row : row + 2, column : column + 2] = 1.0
    return found


def seen(picture: Map, question: Map) -> RelevanceMaps:
    image_maps = ImageMaps(
        propositional=picture,
        perspectival=picture + np.float32(0.01),
        lost=picture,
        fine=np.repeat(np.repeat(picture, FINE, 0), FINE, 1),
    )
    return RelevanceMaps(image_maps=image_maps, participatory=question)


def sinking(height: float) -> Map:
    """How questions of a checkpoint without a head often look: everywhere alike, but at the first tokens."""
    found = np.ones(GRID, np.float32)
    found[0] += np.float32(height) / np.arange(1, 14, dtype=np.float32)
    return found


def known(one: Map, other: Map) -> float:
    """Agreement, with the chance that `ImageMaps` tells."""
    image_maps = ImageMaps(propositional=other, perspectival=other, lost=other)
    assert image_maps.chances[0] == image_maps.chances[1]
    return agreement(one, other, image_maps.chances[0])


@given(grids, st.integers(0, 10**6), st.sampled_from([1, 4, 12]))
@settings(max_examples=60, deadline=None)
def test_a_map_agrees_with_itself_and_a_flat_one_with_nobody(grid: Grid, seed: int, power: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = (shares((rng.random(grid) ** power).astype(np.float32)) for _ in range(2))
    flat = shares(np.ones(grid, np.float32))
    assert 0.0 <= known(one, other) <= 1.0
    assert known(flat, one) == pytest.approx(0.0, abs=1e-4)
    assert known(one, flat) == 0.0
    if one.size > 1:
        assert known(one, one) == pytest.approx(1.0, abs=1e-4)


def test_of_a_map_that_is_flat_but_for_rounding_nobody_knows_more() -> None:
    for off, expected in ((1e-7, 0.0), (1e-6, 0.0), (1e-2, 1.0)):
        values = np.ones(GRID, np.float32)
        values[::2] += np.float32(off)
        almost = shares(values)
        assert known(almost, almost) == pytest.approx(expected, abs=1e-3)


def test_a_question_that_looks_somewhere_leads_and_one_that_looks_everywhere_does_not() -> None:
    picture = spots((2, 2), (9, 9))
    leads = [balance(seen(picture, map_)).weights.scorers[2] for map_ in (spots((9, 9)), sinking(7))]
    assert leads[0] > 0.9
    assert leads[1] < 0.1


def middles(found: ZoomChoice) -> list[tuple[float, float]]:
    """Row and column of the cell in which each view has its middle."""
    boxes = [region.box for region in found.regions]
    return [((y0 + y1) / 2 / 1024 * 13, (x0 + x1) / 2 / 1024 * 13) for x0, y0, x1, y1 in boxes]


def chosen(look: RelevanceMaps, budget: int = 256, rule: ViewRule = ViewRule()) -> ZoomChoice:
    picture = ScoredImage(look=look, size=(1024, 1024), frame=(32, 32), grid=GRID)
    (found,) = choose([picture], budget, LodParams(budget=budget), rule)
    return found


@pytest.mark.parametrize("height", [3.0, 7.0, 15.0])
def test_no_view_is_spent_on_blank_paper_that_every_question_looks_at(height: float) -> None:
    found = middles(chosen(seen(spots((4, 3), (9, 9)), sinking(height))))
    assert found
    assert all(
        min(abs(row - 5) + abs(column - 4), abs(row - 10) + abs(column - 10)) < 3 for row, column in found
    )


def test_a_question_about_one_place_has_its_view_there_whatever_else_stands_out() -> None:
    picture = spots((1, 1), (4, 9), (9, 2)) + np.float32(0.2) * spots((9, 9))
    found = chosen(seen(picture, spots((9, 9))), budget=200)
    first = max(found.regions, key=lambda region: region.score)
    (row, column) = middles(found)[found.regions.index(first)]
    assert abs(row - 10) + abs(column - 10) < 2


def test_what_a_token_may_cost_is_measured_where_it_is_spent() -> None:
    """A question that looks everywhere once set the price by the blank paper it looks at: nothing was worth
    it. What it may cost, and how many views there are, is the picture's where the picture decides."""
    top_regions = [(row, column) for row in (0, 3, 6, 9) for column in (1, 5, 9)]
    flat = np.ones(GRID, np.float32)
    for count in range(1, len(top_regions) + 1):
        look = seen(spots(*top_regions[:count]), flat)
        picture = ScoredImage(look=look, size=(2048, 2048), frame=(64, 64), grid=GRID)
        (found,) = choose([picture], 1024, LodParams(budget=1024), ViewRule())
        assert found.spent > 150
        assert found.weights.particularise > 0.8
        assert (found.weights.diversify > 0.9) == (count > 1)


@pytest.mark.parametrize("asked", [SCORERS, SCORERS[1:], SCORERS[::2]])
def test_even_weights_are_equal_and_their_tensions_middling(asked: tuple[Scorer, ...]) -> None:
    rng = np.random.default_rng(7)
    one = seen(spots((2, 2), (9, 9)), (rng.random(GRID) ** 4).astype(np.float32))
    even = balance(one, asked, even=True).weights
    assert (even.particularise, even.explore, even.diversify) == (0.5, 0.5, 0.5)
    assert even.scorers == tuple((name in asked) / len(asked) for name in SCORERS)
