"""Pixel uploads: staging buffers are reused when the device has read them, copies belong to their image."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from saccade.encoder.upload import MIN_BUFFER_BYTES, PinnedStaging, PixelUploads
from saccade.inputs.media.decode import copy_rgbx, rgb_of_words
from saccade.request import Pixels


class FakeEvent:
    """A copy the device has not made until told so."""

    def __init__(self) -> None:
        self.done = False
        self.waited = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited = self.done = True


class Bench:
    def __init__(self, most_bytes: int) -> None:
        self.allocated: list[int] = []
        self.events: list[FakeEvent] = []
        self.staging = PinnedStaging(
            torch.device("cpu"), most_bytes, allocate=self.allocate, record=self.record
        )

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def record(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def send(self, megabytes: float, value: int = 0) -> Tensor:
        height = int(megabytes * MIN_BUFFER_BYTES) // 192
        return self.staging.send(np.full((1, height, 64, 3), value, dtype=np.uint8))


def test_a_buffer_is_used_again_once_the_device_has_read_it() -> None:
    bench = Bench(64 << 20)
    bench.send(0.9)
    bench.events[0].done = True
    bench.send(0.4)
    assert bench.allocated == [1 << 20]
    bench.send(0.4)  # the one before is still being read
    assert bench.allocated == [1 << 20, 1 << 20]
    assert not any(mark.waited for mark in bench.events)


def test_an_upload_is_a_copy_that_later_images_do_not_change() -> None:
    bench = Bench(64 << 20)
    first = bench.send(0.5, 7)
    bench.events[0].done = True
    second = bench.send(0.5, 9)
    assert bench.allocated == [1 << 20]
    assert bool((first == 7).all())
    assert bool((second == 9).all())


def test_beyond_the_bound_the_oldest_copy_is_awaited() -> None:
    bench = Bench(3 << 20)
    for _ in range(3):
        bench.send(0.9)
    bench.send(0.9)
    assert bench.allocated == [1 << 20] * 3
    assert [mark.waited for mark in bench.events] == [True, False, False, False]
    assert bench.staging.nbytes == 3 << 20


def test_an_image_larger_than_the_bound_is_uploaded() -> None:
    bench = Bench(2 << 20)
    bench.send(0.9)
    assert bench.send(5.0, 3).nbytes > 2 << 20
    assert bench.staging.nbytes == 8 << 20
    bench.events[-1].done = True
    bench.send(0.9)
    assert bench.staging.nbytes <= 8 << 20


def test_a_read_only_image_of_one_pixel_is_uploaded() -> None:
    bench = Bench(2 << 20)
    pixels = np.full((1, 1, 1, 3), 5, dtype=np.uint8)
    pixels.setflags(write=False)
    assert bench.staging.send(pixels).flatten().tolist() == [5, 5, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_images_uploaded_in_a_row_arrive_whole() -> None:
    staging = PinnedStaging(torch.device("cuda"), 16 << 20)
    draw = np.random.default_rng(0)
    sent = []
    for size in (100, 700, 1000, 50, 1000, 700, 1200) * 3:
        pixels = draw.integers(0, 256, (1, size, size, 3), dtype=np.uint8)
        sent.append((pixels, staging.send(pixels)))
    assert all(np.array_equal(pixels, there.cpu().numpy()) for pixels, there in sent)
    assert staging.nbytes <= 16 << 20


def test_pixels_in_words_of_four_bytes_arrive_as_others_do() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, 20, 30, 3), dtype=np.uint8)
    words = rgb_of_words(copy_rgbx(Image.fromarray(pixels[0])))
    bench = Bench(64 << 20)
    sent = bench.staging.send(words)
    assert sent.is_contiguous()
    np.testing.assert_array_equal(sent.numpy(), pixels)


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


def test_an_image_with_a_hash_is_uploaded_once_whatever_array_it_comes_in() -> None:
    """Every question about it brings an array of its own."""
    road = Road()
    uploads = PixelUploads(road.send)
    first = uploads.send(picture(7), b"seven")
    uploads.send(picture(8), b"eight")
    uploads.send(picture(9))
    assert uploads.send(picture(7), b"seven") is first
    assert road.sent == 3
    uploads.check()


def test_no_copy_of_a_deleted_image_outlives_its_array() -> None:
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


def test_copies_of_dead_arrays_go_with_the_next_upload() -> None:
    uploads = PixelUploads(Road().send)
    uploads.send(picture(1))
    uploads.send(picture(2))
    assert uploads.nbytes == 48
    uploads.check()


def test_an_image_beyond_the_bound_is_uploaded_and_not_kept() -> None:
    road = Road()
    uploads = PixelUploads(road.send, max_bytes=100)
    large = picture(1, 8)
    for _ in range(2):
        assert uploads.send(large).shape == (1, 8, 8, 3)
        assert uploads.nbytes == 0
    assert road.sent == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_every_copy_is_of_its_array(moves: list[tuple[int, bool]]) -> None:
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
