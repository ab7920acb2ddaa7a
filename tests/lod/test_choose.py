"""The whole decision: looks in, views out, never above the budget."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import InvalidValue
from saccade.lod.balance import refine
from saccade.lod.checkpoint_views import CheckpointViews
from saccade.lod.controller import choose
from saccade.lod.detail import DetailRequest, divide, plan_first_views, plan_global_view, shrink
from saccade.lod.types import (
    DETAILS,
    FINE,
    SCORERS,
    Detail,
    Grid,
    ImageMaps,
    LodParams,
    Map,
    RelevanceMaps,
    ScoredImage,
    ViewRule,
    ZoomChoice,
)

EMBEDDED = ViewRule(global_tokens=(80, 256), zoom_tokens=(16, 64, 196), square=True, most_views=2)
grids = st.tuples(st.integers(1, 64), st.integers(1, 64))
params = st.builds(
    LodParams,
    detail=st.sampled_from(DETAILS),
    budget=st.none() | st.integers(20, 3000),
    scorers=st.lists(st.sampled_from(SCORERS), unique=True).map(tuple),
    balance=st.booleans(),
    gate=st.booleans(),
)


def look(grid: Grid, seed: int, strength: float = 0.0) -> RelevanceMaps:
    rng = np.random.default_rng(seed)

    def values() -> Map:
        kind = rng.integers(3)
        if kind == 0:
            return np.zeros(grid, np.float32)
        return (rng.random(grid) ** (1 if kind == 1 else 12)).astype(np.float32)

    image_maps = ImageMaps(
        propositional=values(),
        perspectival=values(),
        lost=rng.random(grid).astype(np.float32),
        fine=rng.random((grid[0] * FINE, grid[1] * FINE)).astype(np.float32) if rng.integers(2) else None,
    )
    return RelevanceMaps(image_maps=image_maps, participatory=values(), strength=strength)


@given(
    st.lists(grids, min_size=1, max_size=20),
    params,
    st.sampled_from([EMBEDDED, ViewRule()]),
    st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_a_request_never_costs_more_than_its_budget(
    frames: list[Grid], asked: LodParams, rule: ViewRule, seed: int
) -> None:
    full = [rows * columns for rows, columns in frames]
    parts: list[int | None] = [None] * len(frames)
    if asked.budget is not None:
        parts = [*divide(asked.budget, full)]
    firsts = [
        plan_global_view(frame, msgspec.structs.replace(asked, budget=part), rule)
        for frame, part in zip(frames, parts, strict=True)
    ]
    budget, grids = sum(first.budget for first in firsts), [first.grid for first in firsts]
    if asked.budget is not None:
        assert budget <= asked.budget
    looked = sum(rows * columns for rows, columns in grids)
    assert looked <= budget
    for frame, grid in zip(frames, grids, strict=True):
        assert grid[0] <= frame[0]
        assert grid[1] <= frame[1]
        assert min(grid) >= 1
    pictures = [
        ScoredImage(
            look=look(grid, seed + i, i % 3), size=(frame[1] * 32, frame[0] * 32), frame=frame, grid=grid
        )
        for i, (frame, grid) in enumerate(zip(frames, grids, strict=True))
    ]
    chosen = choose(pictures, budget, asked, rule)
    assert looked + sum(choice.spent for choice in chosen) <= budget
    for picture, choice in zip(pictures, chosen, strict=True):
        assert len(choice.regions) <= rule.most_views
        assert abs(sum(choice.weights.scorers) - 1) < 1e-6 or not choice.relevance.any()
        assert choice.gated is None or not choice.regions
        if picture.grid == picture.frame:
            assert not choice.regions


@pytest.mark.parametrize("size", [(1, 1), (10, 2000), (2000, 10), (8000, 40), (3, 600)])
def test_odd_pictures_are_chosen_in_without_harm(size: tuple[int, int]) -> None:
    width, height = size
    frame = (max(1, round(height / 32)), max(1, round(width / 32)))
    for budget in (1, 17, 80, 5000):
        asked = LodParams(budget=budget, gate=False)
        first = plan_global_view(frame, asked, ViewRule())
        picture = ScoredImage(look=look(first.grid, 1), size=size, frame=frame, grid=first.grid)
        (choice,) = choose([picture], first.budget, asked, ViewRule())
        for x0, y0, x1, y1 in (region.box for region in choice.regions):
            assert 0 <= x0 < x1 <= width
            assert 0 <= y0 < y1 <= height


def peaked(grid: Grid, lost: float) -> RelevanceMaps:
    flat = np.full(grid, 0.1, np.float32)
    point = np.zeros(grid, np.float32)
    point[grid[0] // 2, grid[1] // 2] = 1.0
    image_maps = ImageMaps(propositional=flat, perspectival=flat, lost=np.full(grid, lost, np.float32))
    return RelevanceMaps(image_maps=image_maps, participatory=point)


def with_fine(seen: RelevanceMaps, fine: Map) -> RelevanceMaps:
    return msgspec.structs.replace(seen, image_maps=msgspec.structs.replace(seen.image_maps, fine=fine))


def chosen(lost: float, asked: LodParams) -> ZoomChoice:
    picture = ScoredImage(look=peaked((12, 12), lost), size=(1024, 1024), frame=(32, 32), grid=(12, 12))
    return choose([picture], 400, asked, EMBEDDED)[0]


def test_the_gate_closes_when_nothing_is_lost_where_the_question_looks() -> None:
    assert chosen(0.0, LodParams()).gated
    assert not chosen(0.0, LodParams()).regions
    assert chosen(0.9, LodParams()).regions
    assert chosen(0.9, LodParams()).gated is None
    assert chosen(0.0, LodParams(gate=False)).regions


def test_a_price_that_was_named_is_spent_whatever_the_gate_would_say() -> None:
    assert chosen(0.0, LodParams(budget=400)).regions
    assert chosen(0.0, LodParams(detail="medium")).regions


def test_the_gate_knows_how_much_smaller_the_view_is() -> None:
    def gated(frame: Grid) -> bool:
        picture = ScoredImage(look=peaked((12, 12), 0.2), size=(1024, 1024), frame=frame, grid=(12, 12))
        return choose([picture], 400, LodParams(), EMBEDDED)[0].gated is not None

    assert gated((13, 13))
    assert not gated((32, 32))


def test_the_zoom_is_where_the_question_looks() -> None:
    (region, *_) = chosen(0.9, LodParams(balance=True)).regions
    x0, y0, x1, y1 = region.box
    assert x0 <= 6.5 / 12 * 1024 <= x1
    assert y0 <= 6.5 / 12 * 1024 <= y1


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_cell_keeps_its_relevance_wherever_in_it_something_stands(grid: Grid, seed: int) -> None:
    one = look(grid, seed)
    for fine in (one.image_maps.fine, None, np.zeros((grid[0] * FINE, grid[1] * FINE), np.float32)):
        found = refine(one.lost, msgspec.structs.replace(one.image_maps, fine=fine).position_in_token)
        assert found.shape == (grid[0] * FINE, grid[1] * FINE)
        cells = found.reshape(grid[0], FINE, grid[1], FINE).sum((1, 3))
        assert np.allclose(cells, one.lost, rtol=1e-4, atol=1e-6)


def test_a_window_is_put_over_the_writing_of_the_cell_that_matters() -> None:
    """Cells are 128 pixels high; a window of 2 rows is 64: it must find the line in the cell."""
    for place in range(FINE):
        fine = np.zeros((6 * FINE, 6 * FINE), np.float32)
        fine[2 * FINE + place] = 1.0
        seen = peaked((6, 6), 0.9)
        row = np.zeros((6, 6), np.float32)
        row[2, 2:4] = 0.5
        seen = with_fine(msgspec.structs.replace(seen, participatory=row), fine)
        picture = ScoredImage(look=seen, size=(768, 768), frame=(24, 24), grid=(6, 6))
        asked = LodParams(budget=52, scorers=("participatory",))
        (region,) = choose([picture], 52, asked, ViewRule(zoom_tokens=(16,)))[0].regions
        middle = (2 * FINE + place + 0.5) * 32
        assert region.box[1] <= middle - 15
        assert middle + 15 <= region.box[3]
        assert (region.box[0], region.box[2]) == (256, 512)


def test_a_fine_map_of_another_size_is_refused() -> None:
    seen = with_fine(peaked((6, 6), 0.9), np.ones((6, 6), np.float32))
    picture = ScoredImage(look=seen, size=(768, 768), frame=(24, 24), grid=(6, 6))
    with pytest.raises(ValueError, match="fine map"):
        choose([picture], 100, LodParams(budget=100), EMBEDDED)


def test_a_lone_scorer_has_all_the_weight_and_none_chooses_nothing() -> None:
    assert chosen(0.9, LodParams(scorers=("perspectival",))).weights.scorers == (0.0, 1.0, 0.0)
    assert chosen(0.9, LodParams(scorers=())).gated


def test_plain_detail_is_the_plain_grid_and_small_pictures_are_never_shrunk() -> None:
    assert plan_global_view((40, 50), LodParams(detail="high"), EMBEDDED).grid == (40, 50)
    assert plan_global_view((7, 9), LodParams(detail="medium"), EMBEDDED).grid == (7, 9)
    assert plan_global_view((40, 50), LodParams(budget=10**6), EMBEDDED).grid == (40, 50)


def test_medium_is_about_a_quarter_and_low_has_nothing_left_to_zoom() -> None:
    assert plan_global_view((40, 50), LodParams(detail="medium"), EMBEDDED).budget == 500
    low = plan_global_view((40, 50), LodParams(detail="low"), EMBEDDED)
    assert low.budget == 80
    assert 64 <= low.grid[0] * low.grid[1] <= 80


@given(st.integers(1, 120), st.integers(1, 120))
def test_more_detail_never_costs_less(rows: int, columns: int) -> None:
    details: tuple[Detail, ...] = ("low", "medium", "auto", "high")
    for rule in (EMBEDDED, ViewRule()):
        spent = [plan_global_view((rows, columns), LodParams(detail=one), rule).budget for one in details]
        assert spent == sorted(spent)


def test_fewer_tokens_than_pictures_are_refused() -> None:
    asked = DetailRequest(params=LodParams(budget=2), details=(None,) * 3)
    with pytest.raises(InvalidValue, match="is 2; 3 images need a token each"):
        plan_first_views(((9, 9),) * 3, asked, CheckpointViews(ViewRule(), False, False, None))


@given(st.integers(1, 5000), st.lists(st.integers(1, 900), min_size=1, max_size=25))
def test_a_divided_budget_is_kept_and_nobody_goes_without(budget: int, full: list[int]) -> None:
    parts = divide(max(budget, len(full)), full)
    assert sum(parts) <= max(budget, len(full))
    assert min(parts) >= 1
    assert all(part <= tokens for part, tokens in zip(parts, full, strict=True))


@given(grids, st.integers(1, 600))
def test_a_shrunk_grid_keeps_its_shape_within_its_tokens(frame: Grid, tokens: int) -> None:
    rows, columns = shrink(frame, tokens)
    assert rows * columns <= max(tokens, 1)
    assert rows <= frame[0]
    assert columns <= frame[1]
    if frame[0] == frame[1] and tokens >= 4:
        assert abs(rows - columns) <= 1
