"""Who is listened to: a question that looks somewhere, or the picture where it looks everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.lod.balance import agreement, balance
from saccade.lod.choose import choose
from saccade.lod.values import (
    FINE,
    SCORERS,
    Grid,
    LodParams,
    Look,
    Map,
    Picture,
    Scorer,
    StillMaps,
    ViewRule,
    shares,
)

GRID = (13, 13)
grids = st.tuples(st.integers(1, 12), st.integers(1, 12))


def spots(*places: Grid) -> Map:
    """Something stands there, and nowhere else."""
    found = np.zeros(GRID, np.float32)
    for row, column in places:
        found[row : row + 2, column : column + 2] = 1.0
    return found


def seen(picture: Map, question: Map) -> Look:
    still = StillMaps(
        propositional=picture,
        perspectival=picture + np.float32(0.01),
        lost=picture,
        fine=np.repeat(np.repeat(picture, FINE, 0), FINE, 1),
    )
    return Look(still=still, participatory=question)


def sinking(height: float) -> Map:
    """How questions of a checkpoint without a head often look: everywhere alike, but at the first tokens."""
    found = np.ones(GRID, np.float32)
    found[0] += np.float32(height) / np.arange(1, 14, dtype=np.float32)
    return found


@given(grids, st.integers(0, 10**6), st.sampled_from([1, 4, 12]))
@settings(max_examples=60, deadline=None)
def test_a_map_agrees_with_itself_and_a_flat_one_with_nobody(grid: Grid, seed: int, power: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = (shares((rng.random(grid) ** power).astype(np.float32)) for _ in range(2))
    flat = shares(np.ones(grid, np.float32))
    assert 0.0 <= agreement(one, other) <= 1.0
    assert agreement(flat, one) == pytest.approx(0.0, abs=1e-4)
    assert agreement(one, flat) == 0.0
    if one.size > 1:
        assert agreement(one, one) == pytest.approx(1.0, abs=1e-4)


def test_a_question_that_looks_somewhere_leads_and_one_that_looks_everywhere_does_not() -> None:
    picture = spots((2, 2), (9, 9))
    leads = [balance(seen(picture, map_)).weights.scorers[2] for map_ in (spots((9, 9)), sinking(7))]
    assert leads[0] > 0.9
    assert leads[1] < 0.1


@pytest.mark.parametrize("height", [1.0, 3.0, 7.0, 15.0])
def test_no_view_is_spent_on_blank_paper_that_every_question_looks_at(height: float) -> None:
    picture = Picture(
        look=seen(spots((4, 3), (9, 9)), sinking(height)), size=(1024, 1024), frame=(32, 32), grid=GRID
    )
    (found,) = choose([picture], 256, LodParams(budget=256), ViewRule())
    assert found.regions
    for region in found.regions:
        assert region.box[3] > 4 / 13 * 1024  # none lies in the blank rows at the top


def test_a_question_about_one_place_has_its_view_there_whatever_else_stands_out() -> None:
    picture = Picture(
        look=seen(spots((1, 1), (4, 9), (9, 2), (9, 9)), spots((9, 9))),
        size=(1024, 1024),
        frame=(32, 32),
        grid=GRID,
    )
    (found,) = choose([picture], 200, LodParams(budget=200), ViewRule())
    first = max(found.regions, key=lambda region: region.score)
    x0, y0, x1, y1 = first.box
    assert x0 <= 9.5 / 13 * 1024 <= x1
    assert y0 <= 9.5 / 13 * 1024 <= y1


@given(st.integers(0, 10**6), st.sampled_from([SCORERS, SCORERS[:2], SCORERS[1:]]))
@settings(max_examples=60, deadline=None)
def test_learned_leanings_replace_the_rule(seed: int, asked: tuple[Scorer, ...]) -> None:
    rng = np.random.default_rng(seed)
    one = seen(spots((2, 2), (9, 9)), (rng.random(GRID) ** rng.integers(1, 9)).astype(np.float32))
    leanings = tuple(tuple(row) for row in rng.normal(0, 3, (3, 4)).tolist())
    by_rule, found = balance(one, asked).weights, balance(one, asked, leanings=leanings).weights
    felt = by_rule.particularise, by_rule.explore, by_rule.diversify
    assert (found.particularise, found.explore, found.diversify) == felt
    strength = np.exp(np.array(leanings) @ (1.0, *felt)) * [name in asked for name in SCORERS]
    assert np.allclose(found.scorers, strength / strength.sum(), atol=1e-6)
    assert balance(one, asked, even=True, leanings=leanings).weights == balance(one, asked, even=True).weights


def test_a_checkpoint_that_learned_to_trust_the_picture_zooms_where_the_picture_says() -> None:
    trusting = ((9.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))
    picture = Picture(look=seen(spots((2, 2)), spots((9, 9))), size=(1024, 1024), frame=(32, 32), grid=GRID)
    for rule, row in ((ViewRule(), 9.5), (ViewRule(leanings=trusting), 2.5)):
        (found,) = choose([picture], 200, LodParams(budget=200), rule)
        first = max(found.regions, key=lambda region: region.score)
        assert first.box[1] <= row / 13 * 1024 <= first.box[3]


@pytest.mark.parametrize("steep", [1e300, float("nan"), float("-inf"), 100.5])
def test_leanings_that_make_no_sense_are_refused(steep: float) -> None:
    with pytest.raises(ValueError, match="leanings"):
        ViewRule(leanings=((steep, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)))
