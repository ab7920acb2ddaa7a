"""What is asked of detail, and what is seen for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import CheckpointError, InvalidValue
from saccade.lod.checkpoint_views import CheckpointViews, read_views
from saccade.lod.detail import DetailRequest, FirstViews, check_zoom_region, plan_first_views
from saccade.lod.types import DETAILS, Detail, LodParams, Region

TRAINED = read_views(
    {"saccade": {"views": {"trained": True, "global_tokens": [80, 256], "zoom_tokens": [16, 64, 196]}}}, 32
)
PUBLIC = read_views({}, 32)
LARGE = (40, 30)  # tokens of a picture at full detail


def see(
    *details: Detail | None, views: CheckpointViews = TRAINED, frames: int = 1, **asked: object
) -> FirstViews:
    detail_req = DetailRequest(details=details or (None,) * frames, **asked)  # type: ignore[arg-type]
    return plan_first_views((LARGE,) * len(detail_req.details), detail_req, views)


def test_nothing_asked_is_full_detail() -> None:
    for views in (TRAINED, PUBLIC):
        assert see(views=views) == FirstViews((LARGE,), (False,), 0, 0)
        assert see("high", views=views) == FirstViews((LARGE,), (False,), 0, 0)


def test_a_preview_looks_though_nothing_is_asked() -> None:
    for views in (TRAINED, PUBLIC):
        seen = plan_first_views((LARGE,), DetailRequest(preview_only=True, details=(None,)), views)
        assert seen.zoomable == (True,)


def test_low_is_a_global_view_alone_even_with_lod_off() -> None:
    for lod in (None, False, True):
        seen = see("low", lod=lod)
        assert seen.zoomable == (False,)
        rows, columns = seen.grids[0]
        assert 60 <= rows * columns <= 256


def test_medium_spends_about_a_quarter() -> None:
    seen = see("medium", views=PUBLIC)
    assert seen.zoomable == (True,)
    assert seen.budget == 300


def test_auto_asks_the_checkpoint_unless_lod_is_on() -> None:
    assert see("auto", views=TRAINED).zoomable == (True,)
    assert see("auto", views=PUBLIC).grids == (LARGE,)
    assert see("auto", views=PUBLIC, lod=True).zoomable == (True,)
    assert see(views=PUBLIC, lod=True).zoomable == (True,)
    assert see(views=PUBLIC, params=LodParams()).zoomable == (True,)


@pytest.mark.parametrize("requested", ["auto", "medium", "high", None])
def test_lod_off_is_full_detail(requested: Detail | None) -> None:
    assert see(requested, lod=False).grids == (LARGE,)


def test_lod_off_with_a_budget_is_plain_resizing() -> None:
    seen = see(lod=False, visual_tokens=600)
    rows, columns = seen.grids[0]
    assert seen.zoomable == (False,)
    assert 500 <= rows * columns <= 600
    assert see(lod=False, visual_tokens=5000).grids == (LARGE,)


def test_a_budget_beyond_the_picture_is_full_detail() -> None:
    assert see(visual_tokens=1200) == FirstViews((LARGE,), (False,), 0, 0)
    assert see(visual_tokens=10**9).grids == (LARGE,)


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_of_nothing_is_refused(budget: int) -> None:
    with pytest.raises(InvalidValue, match=f"visual_tokens is {budget}"):
        see(visual_tokens=budget)


def test_a_budget_below_one_token_a_picture_is_refused() -> None:
    for lod in (None, False):
        with pytest.raises(InvalidValue, match="19; 20 images need a token each"):
            see(frames=20, visual_tokens=19, lod=lod)
    assert sum(rows * columns for rows, columns in see(frames=20, visual_tokens=20).grids) == 20


def test_pictures_at_high_detail_are_paid_first() -> None:
    with pytest.raises(InvalidValue, match="beside the 1200"):
        see("high", None, visual_tokens=1200)
    seen = see("high", None, visual_tokens=1300)
    assert seen.grids[0] == LARGE
    assert seen.most_tokens(0) <= 1300


def test_what_is_asked_alike_is_equal_however_it_is_written() -> None:
    """What requests see is found again by what they asked."""
    lists = LodParams(scorers=["propositional"], zooms=[[Region([0, 0, 64, 64], [2, 2], 1.0)]])  # type: ignore[arg-type]
    tuples = LodParams(scorers=("propositional",), zooms=((Region((0, 0, 64, 64), (2, 2), 1.0),),))
    assert lists == tuples
    assert hash(lists) == hash(tuples)
    refused = [DetailRequest(lod=lod, visual_tokens=50, details=(None,)) for lod in (False, 0)]  # type: ignore[arg-type]
    assert refused[0] == refused[1]
    assert plan_first_views((LARGE,), refused[0], TRAINED) == plan_first_views((LARGE,), refused[1], TRAINED)


def test_a_picture_no_larger_than_its_global_view_is_never_zoomed() -> None:
    small = (5, 5)
    seen = plan_first_views((small, LARGE), DetailRequest(details=("medium", "medium")), TRAINED)
    assert seen.grids[0] == small
    assert seen.zoomable == (False, True)


@given(
    frames=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=20),
    details=st.lists(st.sampled_from([None, *DETAILS]), min_size=20, max_size=20),
    budget=st.integers(1, 5000),
    lod=st.sampled_from([None, True, False]),
    views=st.sampled_from([TRAINED, PUBLIC]),
)
def test_the_budget_is_never_exceeded(
    frames: list[tuple[int, int]],
    details: list[Detail | None],
    budget: int,
    lod: bool | None,
    views: CheckpointViews,
) -> None:
    detail_req = DetailRequest(details=tuple(details[: len(frames)]), visual_tokens=budget, lod=lod)
    try:
        seen = plan_first_views(tuple(frames), detail_req, views)
    except InvalidValue:
        return
    assert seen.most_tokens(0) <= budget
    for (rows, columns), (most_rows, most_columns) in zip(seen.grids, frames, strict=True):
        assert 1 <= rows <= most_rows
        assert 1 <= columns <= most_columns


def test_zooms_that_are_given_shrink_the_first_view_to_fit() -> None:
    zooms = ((Region((0, 0, 9, 9), (10, 10), 1.0),),)
    seen = see(params=LodParams(budget=120, zooms=zooms))
    assert seen.zoomable == (False,)
    assert seen.grids[0][0] * seen.grids[0][1] <= 20
    with pytest.raises(InvalidValue, match="100 of a budget of 100"):
        see(params=LodParams(budget=100, zooms=zooms))
    with pytest.raises(InvalidValue, match="for 1 images; the request has 2"):
        see(frames=2, params=LodParams(zooms=zooms))


@pytest.mark.parametrize("box", [(0, 0, 0, 9), (0, 0, 11, 9), (-1, 0, 3, 3), (5, 5, 4, 9)])
def test_a_zoom_outside_its_picture_is_refused(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidValue, match="inside the 10x9"):
        check_zoom_region(Region(box, (1, 1), 1.0), (10, 9))
    with pytest.raises(InvalidValue, match="at least 1 by 1"):
        check_zoom_region(Region((0, 0, 10, 9), (0, 1), 1.0), (10, 9))


@pytest.mark.parametrize(
    "section",
    [
        {"views": {"positions": "elsewhere"}},
        {"views": {"placement": "before_question"}},
        {"views": {"global_tokens": [5]}},
        {"views": {"global_tokens": [5, 4]}},
        {"views": {"zoom_tokens": "all"}},
        {"relevance": {"file": "../head.safetensors", "layer": 1, "width": 4}},
        {"relevance": {"file": "head.bin", "layer": 1, "width": 4}},
        {"relevance": {"file": "head.safetensors", "layer": 0, "width": 4}},
    ],
)
def test_a_broken_section_is_refused(section: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="saccade"):
        read_views({"saccade": section}, 32)
