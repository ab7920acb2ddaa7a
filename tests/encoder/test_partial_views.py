"""Views half way through the tower: what is kept of them, within its bound, and nothing besides."""

import pytest

from saccade.encoder.partial_views import PartialViews

A, B, C = b"a", b"b", b"c"


def test_a_view_continues_from_the_state_of_the_slice_before() -> None:
    views: PartialViews[str] = PartialViews(100)
    assert views.layers(A) == 0
    views.advance(A, 40, 3)
    views.keep(A, "three")
    views.check()
    assert views.layers(A) == 3
    views.advance(A, 40, 5)
    assert views.take(A) == "three"
    views.keep(A, "five")
    views.finish(A)
    views.check()
    assert (views.keys, views.finishing, views.patches) == ((), (A,), 0)
    assert views.take(A) == "five"
    assert views.finishing == ()
    assert views.layers(A) == 0


def test_a_dropped_view_frees_its_state_and_starts_again() -> None:
    views: PartialViews[str] = PartialViews(100)
    views.advance(A, 40, 3)
    views.keep(A, "three")
    views.drop(A)
    views.drop(B)
    views.check()
    assert views.patches == len(views) == 0
    with pytest.raises(RuntimeError, match="it has no state"):
        views.take(A)
    with pytest.raises(RuntimeError, match="no next slice is planned"):
        views.keep(A, "three")
    views.advance(A, 40, 1)  # from the first layer again
    views.finish(A)
    views.drop(A)  # the step with its last slice has failed
    assert not views.finishing


def test_a_state_is_taken_once() -> None:
    views: PartialViews[str] = PartialViews(100)
    views.advance(A, 40, 3)
    views.keep(A, "three")
    assert views.take(A) == "three"
    with pytest.raises(RuntimeError, match="it has no state"):
        views.take(A)


def test_layers_only_grow_and_the_order_is_that_of_the_last_slices() -> None:
    views: PartialViews[str] = PartialViews(100)
    for key in (A, B, C):
        views.advance(key, 30, 2)
    views.advance(A, 30, 4)
    assert views.keys == (B, C, A)
    with pytest.raises(RuntimeError, match="planned up to layer 4, not 4"):
        views.advance(A, 30, 4)


def test_check_notices_more_patches_than_the_capacity() -> None:
    views: PartialViews[str] = PartialViews(50)
    views.advance(A, 400, 2)
    views.check()  # a single large one is allowed
    views.advance(B, 1, 2)
    with pytest.raises(RuntimeError, match="2 views have 401 patches of 50"):
        views.check()
