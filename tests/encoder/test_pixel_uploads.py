"""Pixels travel once for a picture, or while their array lives, and are not mistaken for those of another."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.encoder.upload import PixelUploads
from saccade.request import Pixels


class Road:
    def __init__(self) -> None:
        self.sent = 0

    def send(self, pixels: Pixels) -> torch.Tensor:
        self.sent += 1
        return torch.from_numpy(pixels.copy())


def picture(value: int, side: int = 4) -> Pixels:
    return np.full((1, side, side, 3), value, dtype=np.uint8)


def test_one_array_is_sent_once_and_equal_ones_each() -> None:
    road = Road()
    uploads = PixelUploads(road.send)
    one, twin = picture(7), picture(7)
    assert uploads.send(one) is uploads.send(one)
    assert uploads.send(twin) is not uploads.send(one)
    assert road.sent == 2
    uploads.check()


def test_a_picture_with_an_identity_is_sent_once_whatever_array_it_comes_in() -> None:
    """Every question about it brings an array of its own."""
    road = Road()
    uploads = PixelUploads(road.send)
    first = uploads.send(picture(7), b"seven")
    uploads.send(picture(8), b"eight")
    uploads.send(picture(9))
    assert uploads.send(picture(7), b"seven") is first
    assert road.sent == 3
    uploads.check()


def test_of_a_deleted_picture_no_copy_outlives_its_array() -> None:
    """Those of requests that were on their way included: red when one sends it again, for good."""
    road = Road()
    uploads = PixelUploads(road.send)
    shown = picture(7)
    uploads.send(shown, b"seven")
    uploads.forget(b"seven")
    assert uploads.nbytes == 0
    assert uploads.send(shown, b"seven") is uploads.send(shown, b"seven")
    assert road.sent == 2
    uploads.check()
    del shown
    uploads.send(picture(1), b"one")
    assert uploads.nbytes == 48
    uploads.check()


def test_what_is_dead_goes_with_the_next_to_come() -> None:
    uploads = PixelUploads(Road().send)
    uploads.send(picture(1))
    uploads.send(picture(2))
    assert uploads.nbytes == 48
    uploads.check()


def test_a_picture_beyond_the_bound_is_sent_and_not_kept() -> None:
    road = Road()
    uploads = PixelUploads(road.send, max_bytes=100)
    large = picture(1, 8)
    for _ in range(2):
        assert uploads.send(large).shape == (1, 8, 8, 3)
        assert uploads.nbytes == 0
    assert road.sent == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_whatever_comes_and_goes_every_copy_is_of_its_array(moves: list[tuple[int, bool]]) -> None:
    """Red when a new array at a dead one's address is given the dead one's copy."""
    uploads = PixelUploads(Road().send, max_bytes=3 * 48)
    alive: dict[int, Pixels] = {}
    for value, (slot, ends) in enumerate(moves):
        if ends:
            alive.pop(slot, None)
            continue
        shown = alive.setdefault(slot, picture(value))
        assert torch.equal(uploads.send(shown), torch.from_numpy(shown))
        uploads.check()
