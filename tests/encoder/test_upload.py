"""Pinned buffers are used again, and never while the device may be reading them."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from saccade.encoder.upload import MIN_BUFFER_BYTES, PinnedStaging
from saccade.inputs.media.rgbx import copy_rgbx, rgb_of_words


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


def test_what_was_sent_is_a_copy_that_later_pictures_leave_alone() -> None:
    bench = Bench(64 << 20)
    first = bench.send(0.5, 7)
    bench.events[0].done = True
    second = bench.send(0.5, 9)
    assert bench.allocated == [1 << 20]
    assert bool((first == 7).all())
    assert bool((second == 9).all())


def test_beyond_the_bound_it_waits_for_the_oldest() -> None:
    bench = Bench(3 << 20)
    for _ in range(3):
        bench.send(0.9)
    bench.send(0.9)
    assert bench.allocated == [1 << 20] * 3
    assert [mark.waited for mark in bench.events] == [True, False, False, False]
    assert bench.staging.nbytes == 3 << 20


def test_a_picture_larger_than_the_bound_still_goes() -> None:
    bench = Bench(2 << 20)
    bench.send(0.9)
    assert bench.send(5.0, 3).nbytes > 2 << 20
    assert bench.staging.nbytes == 8 << 20
    bench.events[-1].done = True
    bench.send(0.9)
    assert bench.staging.nbytes <= 8 << 20


def test_a_read_only_picture_of_one_pixel_goes_too() -> None:
    bench = Bench(2 << 20)
    pixels = np.full((1, 1, 1, 3), 5, dtype=np.uint8)
    pixels.setflags(write=False)
    assert bench.staging.send(pixels).flatten().tolist() == [5, 5, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pictures_sent_one_after_the_other_arrive_whole() -> None:
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
