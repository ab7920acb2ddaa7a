"""Allocation keeps its promises for any relevance, size and budget."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.lod.allocate import UNITS, WHOLE, Field, _Pick, _region, allocate, windows
from saccade.lod.types import LADDER, Map, Region, ViewRule

sizes = st.integers(1, 3000)
rules = st.builds(
    ViewRule,
    zoom_tokens=st.lists(st.sampled_from(LADDER), unique=True).map(lambda some: tuple(sorted(some))),
    square=st.booleans(),
)


@st.composite
def fields(draw: st.DrawFn) -> Field:
    cells = draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
    # few distinct values, so that ties are common
    values = draw(st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.3]), min_size=cells[0] * cells[1]))
    relevance = np.array(values[: cells[0] * cells[1]], np.float32).reshape(cells)
    frame = draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    size = draw(st.tuples(sizes, sizes))
    return Field(relevance, size, frame, draw(st.integers(0, 5)))


budgets = st.integers(-10, 2000)
prices = st.sampled_from([0.0, 1e-4, 1e-3, 1e-2])


@given(st.lists(fields(), max_size=3), budgets, rules, prices)
@settings(max_examples=150, deadline=None)
def test_windows_fit_the_budget_the_picture_and_the_ladder(
    many: list[Field], budget: int, rule: ViewRule, price: float
) -> None:
    chosen = allocate(many, budget, rule, price)
    assert len(chosen) == len(many)
    assert sum(region.tokens for some in chosen for region in some) <= max(0, budget)
    for field, some in zip(many, chosen, strict=True):
        assert len(some) <= field.most
        for region in some:
            x0, y0, x1, y1 = region.box
            assert 0 <= x0 < x1 <= field.size[0]
            assert 0 <= y0 < y1 <= field.size[1]
            assert 1 <= region.tokens <= max(rule.zoom_tokens)
            assert region.score > price * region.tokens * 0.999
        assert sum(region.score for region in some) <= float(field.relevance.sum()) + 1e-4


def covered(field: Field, some: tuple[Region, ...]) -> Map:
    """Cells whose centres lie in a window, one source pixel of rounding allowed."""
    rows, columns = field.relevance.shape
    y = (np.arange(rows) + 0.5) * field.size[1] / rows
    x = (np.arange(columns) + 0.5) * field.size[0] / columns
    inside = np.zeros((rows, columns), bool)
    for x0, y0, x1, y1 in (region.box for region in some):
        inside |= ((y >= y0 - 1) & (y <= y1 + 1))[:, None] & ((x >= x0 - 1) & (x <= x1 + 1))[None]
    return inside.astype(np.float32)


@given(st.lists(fields(), max_size=3), budgets, rules, prices, st.sampled_from([1, 300]))
@settings(max_examples=100, deadline=None)
def test_windows_are_those_of_looking_at_every_place_of_every_window_each_time(
    pictures: list[Field], budget: int, rule: ViewRule, price: float, times: int
) -> None:
    """Also where there is more relevance than 32 bits have units for."""
    pictures = [replace(one, relevance=one.relevance * np.float32(times)) for one in pictures]
    rests = [np.rint(one.relevance.astype(np.float64) * UNITS).astype(np.int64) for one in pictures]
    picks: list[_Pick] = []
    left, most = budget, [one.most for one in pictures]
    while True:
        best: tuple[int, _Pick] | None = None
        for i, field in enumerate(pictures):
            for window in windows(field, rule, budget) if most[i] > 0 else ():
                if window.tokens > left:
                    continue
                gains = np.lib.stride_tricks.sliding_window_view(rests[i], window.cells).sum((2, 3))
                place = int(gains.argmax())
                gain = int(gains.flat[place])
                worth = gain * window.sharp // WHOLE - round(price * UNITS) * window.tokens
                if worth > (best[0] if best else 0):  # the first of equals stays
                    best = worth, _Pick(i, window, divmod(place, gains.shape[1]), gain)
        if best is None:
            break
        pick = best[1]
        picks.append(pick)
        left, most[pick.field] = left - pick.window.tokens, most[pick.field] - 1
        (row, column), (high, wide) = pick.at, pick.window.cells
        rests[pick.field][row : row + high, column : column + wide] = 0
    for i, (field, found) in enumerate(zip(pictures, allocate(pictures, budget, rule, price), strict=True)):
        assert set(found) == {_region(field, pick) for pick in picks if pick.field == i}


@given(fields(), budgets, rules, prices, st.data())
@settings(max_examples=150, deadline=None)
def test_a_cell_that_gains_relevance_is_not_uncovered(
    field: Field, budget: int, rule: ViewRule, price: float, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, field.relevance.shape[0] - 1))
    column = data.draw(st.integers(0, field.relevance.shape[1] - 1))
    before = allocate([field], budget, rule, price)[0]
    more = field.relevance.copy()
    more[row, column] += np.float32(data.draw(st.sampled_from([0.005, 0.1, 2.0])))
    after = allocate([Field(more, field.size, field.frame, field.most)], budget, rule, price)[0]
    if strictly_covered(field, rule, before, row, column):
        assert covered(field, after)[row, column]


def strictly_covered(field: Field, rule: ViewRule, some: tuple[Region, ...], row: int, column: int) -> bool:
    """Whether a cell counts as covered: its centre well inside a window."""
    width, height = field.size
    y = (row + 0.5) * height / field.relevance.shape[0]
    x = (column + 0.5) * width / field.relevance.shape[1]
    return any(x0 + 1 < x < x1 - 1 and y0 + 1 < y < y1 - 1 for x0, y0, x1, y1 in (r.box for r in some))


@given(fields(), budgets, rules, prices)
@settings(max_examples=50, deadline=None)
def test_equal_input_gives_equal_windows_and_ties_fall_to_the_earlier_place(
    field: Field, budget: int, rule: ViewRule, price: float
) -> None:
    assert allocate([field, field], budget, rule, price) == allocate([field, field], budget, rule, price)
    flat = Field(np.full_like(field.relevance, 0.25), (1920, 1920), (60, 60), 1)
    for region in allocate([flat], budget, ViewRule(zoom_tokens=(16,), square=True), 0.0)[0]:
        assert (
            region.box[:2]
            == allocate([flat], 16, ViewRule(zoom_tokens=(16,), square=True), 0.0)[0][0].box[:2]
        )
        assert max(region.box[0], region.box[1]) <= 1920 / min(flat.relevance.shape) / 2


def test_spread_evidence_is_seen_in_one_larger_window_and_a_point_in_a_small_one() -> None:
    rule = ViewRule(zoom_tokens=(16, 64, 196), square=True)
    point = np.zeros((14, 14), np.float32)
    point[5, 5] = 1.0
    assert [r.grid for r in allocate([Field(point, (896, 896), (28, 28))], 400, rule, 1e-3)[0]] == [(4, 4)]
    wide = np.zeros((14, 14), np.float32)
    wide[4:10, 4:10] = 1 / 36
    assert [r.grid for r in allocate([Field(wide, (896, 896), (28, 28))], 400, rule, 1e-3)[0]] == [(14, 14)]


def test_a_row_is_seen_in_a_long_window_where_the_checkpoint_takes_them() -> None:
    row = np.zeros((14, 14), np.float32)
    row[6, 2:10] = 1 / 8
    field = Field(row, (896, 896), (28, 28))
    assert [r.grid for r in allocate([field], 64, ViewRule(), 1e-3)[0]] == [(4, 16)]
    assert [r.grid for r in allocate([field], 64, ViewRule(square=True), 1e-3)[0]] == [(8, 8)]


@given(st.floats(0, 12), st.floats(0, 12), st.sampled_from([16, 64]))
@settings(max_examples=100, deadline=None)
def test_windows_stand_on_a_lattice_and_hold_the_cells_they_are_chosen_for(
    y: float, x: float, tokens: int
) -> None:
    """So that questions which look at one place find its window again: 16 pixels where a token has 32."""
    rows = np.arange(13)
    mass = np.exp(-((rows[:, None] - y) ** 2 + (rows[None] - x) ** 2)).astype(np.float32)
    field = Field(mass / mass.sum(), (1024, 1024), (32, 32), most=2)
    chosen = allocate([field], 2 * tokens, ViewRule(zoom_tokens=(tokens,)), 0.0)[0]
    assert chosen
    for x0, y0, x1, y1 in (region.box for region in chosen):  # windows that show more have other ends
        assert x0 % 16 == 0 or x1 == 1024
        assert y0 % 16 == 0 or y1 == 1024
    first = max(chosen, key=lambda region: region.score)
    held = field.relevance[covered(field, (first,)) > 0]
    assert float(held.sum()) >= first.score - 1e-5


def test_between_two_levels_a_window_takes_all_that_is_left() -> None:
    row = np.zeros((28, 28), np.float32)
    row[12, 4:18] = 1 / 14
    field = Field(row, (896, 896), (28, 28))
    rule = ViewRule(zoom_tokens=(16, 64))
    assert [r.grid for r in allocate([field], 28, rule, 1e-5)[0]] == [(2, 14)]
    assert [r.grid for r in allocate([field], 16, rule, 1e-5)[0]] == [(2, 8)]
    square = ViewRule(zoom_tokens=(16, 64), square=True)
    assert [r.grid for r in allocate([field], 28, square, 1e-5)[0]] == [(4, 4)]


def test_what_is_a_little_too_long_is_seen_less_sharply_and_a_spot_as_it_is() -> None:
    field = Field(np.zeros((28, 28), np.float32), (896, 896), (28, 28))
    field.relevance[12, 4:13] = 1 / 9  # 288 pixels; a window of 2 x 8 tokens shows 256, or 307
    (long,) = allocate([field], 16, ViewRule(zoom_tokens=(16,)), 1e-5)[0]
    assert (long.grid, long.box[2] - long.box[0]) == ((2, 8), 307)
    field.relevance[:] = 0
    field.relevance[12, 4:8] = 1 / 4
    (spot,) = allocate([field], 16, ViewRule(zoom_tokens=(16,)), 1e-5)[0]
    assert spot.box[2] - spot.box[0] == spot.grid[1] * 32


def test_the_picture_that_matters_more_gets_the_tokens() -> None:
    one = np.full((4, 4), 0.01, np.float32)
    two = np.full((4, 4), 0.05, np.float32)
    many = [Field(one, (512, 512), (16, 16)), Field(two, (512, 512), (16, 16))]
    first, second = allocate(many, 16, ViewRule(zoom_tokens=(16,)), 0.0)
    assert not first
    assert len(second) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_relevance_that_is_no_number_is_refused(bad: float) -> None:
    values = np.ones((2, 2), np.float32)
    values[0, 1] = bad
    with pytest.raises(ValueError, match="finite"):
        allocate([Field(values, (64, 64), (2, 2))], 16, ViewRule(), 0.0)
