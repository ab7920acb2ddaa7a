"""Captured maps are the uncaptured ones; shapes are counted, bounded, given up."""

import logging

import pytest
import torch
from torch import Tensor

from saccade.kernels.cuda_graph import CudaRecorder, Replay
from saccade.lod.image_maps import ImageMapRunner, build_image_map_runner
from saccade.lod.scorers import image_maps
from saccade.lod.texture import LONGEST, texture
from tests.encoder.test_encoder_graphs import Counting

CPU = torch.device("cpu")


def page(height: int, width: int, seed: int = 0) -> Tensor:
    """Noise, and some of it plain."""
    made = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=_seeded(seed))
    made[height // 3 :, : width // 2] = 200
    return made


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("size", "grid"), [((96, 64), (3, 2)), ((800, 1000), (7, 9)), ((1, 1), (1, 1)), ((10, 900), (1, 16))]
)
def test_maps_of_a_graph_are_bit_exact(size: tuple[int, int], grid: tuple[int, int]) -> None:
    recorder = Counting()
    stills = ImageMapRunner(CPU, recorder)
    for seed in range(4):
        one = page(*size, seed)
        assert torch.equal(stills.maps(one, grid), image_maps(texture(one), grid))
        stills.check()
    assert (recorder.recorded, recorder.replayed) == (1, 2)  # the second sighting captures


def test_maps_outlive_the_next_image() -> None:
    stills = ImageMapRunner(CPU, Counting(), min_uses=1)
    given = [stills.maps(page(64, 64, seed), (2, 2)) for seed in range(3)]
    assert not torch.equal(given[1], given[2])
    assert torch.equal(given[1], image_maps(texture(page(64, 64, 1)), (2, 2)))


def test_images_of_one_aspect_ratio_share_a_graph() -> None:
    stills = ImageMapRunner(CPU, Counting(), min_uses=1)
    for side in (LONGEST, 800, 1600):
        stills.maps(page(side, side // 2), (4, 2))
    assert len(stills) == 1
    stills.maps(page(64, 64), (4, 2))
    stills.maps(page(64, 64), (2, 2))
    assert len(stills) == 3


def test_least_recently_used_shapes_are_evicted() -> None:
    recorder = Counting()
    stills = ImageMapRunner(CPU, recorder, min_uses=1, max_shapes=2)
    for width in (16, 32, 16, 48):
        stills.maps(page(16, width), (1, 1))
        stills.check()
    assert len(stills) == 2
    stills.maps(page(16, 16), (1, 1))  # still there
    assert recorder.recorded == 3
    stills.maps(page(16, 32), (1, 1))  # gone
    assert recorder.recorded == 4


def test_a_failed_capture_is_logged_once_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    stills = ImageMapRunner(CPU, Counting(fail_at=0), min_uses=1)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            one = page(64, 64, seed)
            assert torch.equal(stills.maps(one, (2, 2)), image_maps(texture(one), (2, 2)))
            stills.check()
    assert len(stills) == 0
    assert len(caplog.records) == 1
    assert "stream is capturing" in caplog.text


def test_maps_are_computed_whatever_a_capture_raises() -> None:
    class CompilationError(Exception):
        pass

    class Failing(Counting):
        def record(self, function: Replay) -> Replay:
            raise CompilationError("line 7")

    one = page(64, 64)
    assert torch.equal(
        ImageMapRunner(CPU, Failing(), min_uses=1).maps(one, (2, 2)), image_maps(texture(one), (2, 2))
    )


def test_nothing_is_captured_without_graphs() -> None:
    stills = build_image_map_runner(CPU, graphs=False)
    for _ in range(3):
        stills.maps(page(64, 64), (2, 2))
    assert len(stills) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_maps_captured_on_a_device_are_the_uncaptured_ones() -> None:
    device = torch.device("cuda")
    stills = ImageMapRunner(device, CudaRecorder(device))
    for seed in range(5):
        one = page(800, 1000, seed).to(device)
        assert torch.equal(stills.maps(one, (7, 9)), image_maps(texture(one), (7, 9)))
    assert len(stills) == 1
