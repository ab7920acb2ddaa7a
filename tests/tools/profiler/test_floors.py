"""Floors at the ceilings of the chip are those the anchors give for the same shapes."""

import pytest
import torch

from bench.simulate import QWEN3_VL_8B
from saccade.engine.cost_prior import H200
from saccade.tools.profiler.floors import Floors, chip_of, floors

FLOORS = Floors(QWEN3_VL_8B, H200)


@pytest.mark.parametrize(("rows", "wanted"), [(1, 3.25), (8, 3.4), (32, 3.9), (128, 5.8), (256, 8.4)])
def test_decode_floors_are_the_anchors(rows: int, wanted: float) -> None:
    assert FLOORS.decode(rows, 640) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("patches", "wanted"), [(28 * 28, 7), (64 * 64, 36), (68 * 120, 81)])
def test_first_token_floors_are_the_anchors(patches: int, wanted: float) -> None:
    first = FLOORS.encode(patches) + FLOORS.prefill(patches // 4 + 66)
    assert first == pytest.approx(wanted, rel=0.1)


def test_a_floor_grows_with_the_work_and_never_falls_below_reading_the_weights() -> None:
    weights = 1e3 * QWEN3_VL_8B.parameters * 2 / H200.bandwidth
    times = [FLOORS.decode(rows, 512) for rows in (1, 2, 64, 512)]
    assert sorted(times) == times
    assert times[0] >= weights
    assert FLOORS.decode(1, 64_000) > FLOORS.decode(1, 512)


def test_an_unknown_device_is_measured() -> None:
    chip = chip_of(torch.device("cpu"), torch.float32)
    assert chip.name == "measured here"
    assert 1e8 < chip.bandwidth < 1e13
    assert 1e8 < chip.matrix < 1e14
    assert floors(QWEN3_VL_8B, torch.device("cpu"), torch.float32).network.value_bytes == 4
