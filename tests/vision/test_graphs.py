"""The tower by captured stretches gives what the tower gives; shapes are counted, bounded, given up."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from saccade.checkpoint import open_checkpoint
from saccade.kernels.record import PlainRecorder, Replay
from saccade.models.layers import VisionTower
from saccade.models.load import load
from saccade.vision import unfinished
from saccade.vision.graphs import Captured, Shape, TowerGraphs, tower_graphs
from tests import checkpoints

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    folder = checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"))
    vision = load(open_checkpoint(str(folder)), "cpu", torch.float32).vision
    assert vision is not None
    return vision


class Counting(PlainRecorder):
    """Counts what is recorded and what is replayed; fails where it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.recorded = self.replayed = 0
        self.fail_at = fail_at

    def record(self, function: Replay) -> Replay:
        if self.recorded == self.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            function()

        return replay


def graphs(tower: VisionTower, recorder: Counting, **options: int) -> TowerGraphs:
    return TowerGraphs(tower, recorder, CPU, torch.float32, **options)


def patches(tower: VisionTower, shape: Shape, seed: int = 0) -> Tensor:
    return torch.randn(shape.patches, tower.patch_dim, generator=torch.Generator().manual_seed(seed))


def through(carrier: Captured, tower: VisionTower, shape: Shape, made: Tensor, ends: Sequence[int]) -> Tensor:
    """Slices that end at these layers; what lies between them is copied out, as the encoder does it."""
    grids = [shape.grid] * shape.views
    stream, levels, first = carrier.begin(made, grids), [], 0
    for stop in (*ends, tower.depth):
        stream, more = carrier.carry(stream, grids, first, stop)
        stream, first = stream.clone(), stop
        levels += [level.clone() for level in more]
    return carrier.finish(stream, levels)


@pytest.mark.parametrize("shape", [Shape((4, 6), 1), Shape((2, 2), 4), Shape((8, 4), 2)])
@pytest.mark.parametrize("ends", [[], [1], [2], [1, 3]])
def test_stretches_give_what_the_tower_gives_bit_for_bit(
    tower: VisionTower, shape: Shape, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "STRETCHES", 2)  # of two layers each: [1] and [1, 3] cut through them
    recorder = Counting()
    found = graphs(tower, recorder).find(shape, now=True)
    assert found is not None
    for seed in range(3):
        made = patches(tower, shape, seed)
        whole = tower(made, [shape.grid] * shape.views)
        assert torch.equal(through(found, tower, shape, made, ends), whole)
    assert recorder.replayed > 0
    if not ends:
        assert found.complete
        assert recorder.recorded == 4
        assert recorder.replayed == 8


def test_a_second_shape_does_not_disturb_what_the_first_gave(tower: VisionTower) -> None:
    made = graphs(tower, Counting())
    one, other = Shape((4, 4), 1), Shape((6, 4), 2)
    first, second = made.find(one, now=True), made.find(other, now=True)
    assert first is not None
    assert second is not None
    given = through(first, tower, one, patches(tower, one), [])
    kept = given.clone()
    through(second, tower, other, patches(tower, other, 1), [])
    assert torch.equal(given, kept)


def test_a_shape_is_captured_when_it_has_come_often_a_stretch_per_call(tower: VisionTower) -> None:
    recorder = Counting()
    made = graphs(tower, recorder, sightings=3)
    shape = Shape((4, 4), 1)
    assert made.find(shape) is made.find(shape) is None
    for call in range(1, 8):
        found = made.find(shape)
        assert found is not None
        through(found, tower, shape, patches(tower, shape), [])
        made.check()
        assert recorder.recorded == min(call, 2 + tower.depth)
        assert found.complete == (call >= 2 + tower.depth)


def test_least_recently_used_shapes_go_when_there_are_too_many(tower: VisionTower) -> None:
    made = graphs(tower, Counting(), most_shapes=2)
    a, b, c = (Shape((2, columns), 1) for columns in (2, 4, 6))
    for shape in (a, b, a, c):
        assert made.find(shape, now=True) is not None
        made.check()
    assert made.shapes == (a, c)


def test_a_shape_beyond_the_bound_takes_the_ordinary_way(tower: VisionTower) -> None:
    made = graphs(tower, Counting(), most_patches=16)
    assert made.find(Shape((4, 6), 1), now=True) is None
    assert made.find(Shape((4, 4), 2), now=True) is None
    assert made.find(Shape((4, 4), 1), now=True) is not None


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_capture_that_fails_spoils_nothing_and_is_not_tried_again(tower: VisionTower, fail_at: int) -> None:
    recorder = Counting(fail_at=fail_at)
    made = graphs(tower, recorder)
    shape = Shape((4, 6), 1)
    found = made.find(shape, now=True)
    assert found is not None
    given = through(found, tower, shape, patches(tower, shape), [])
    assert torch.equal(given, tower(patches(tower, shape), [shape.grid]))
    assert len(made) == 0
    assert made.find(shape, now=True) is None
    assert recorder.recorded == fail_at
    made.check()


def test_views_go_together_by_powers_of_two_up_to_what_a_call_gains_from(tower: VisionTower) -> None:
    made = graphs(tower, Counting())
    assert [made.together((64, 64), views) for views in (1, 2, 9)] == [1, 1, 1]
    assert [made.together((28, 28), views) for views in (1, 2, 3, 4, 5, 100)] == [1, 2, 2, 4, 4, 4]


def test_what_stretches_read_outlives_the_towers_own_tables(tower: VisionTower) -> None:
    shape = Shape((4, 6), 1)
    found = graphs(tower, Counting()).find(shape, now=True)
    assert found is not None
    assert found._kept is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [Shape((4, 6), 1), Shape((28, 28), 2)])
@torch.inference_mode()
def test_graphs_on_a_device_give_what_the_uncaptured_tower_gives(tmp_path: Path, shape: Shape) -> None:
    device = torch.device("cuda")
    folder = checkpoints.qwen3_vl(tmp_path)
    vision = load(open_checkpoint(str(folder)), "cuda", torch.bfloat16).vision
    assert vision is not None
    made = tower_graphs(vision, device, torch.bfloat16)
    found = made.find(shape, now=True)
    assert found is not None
    grids = [shape.grid] * shape.views
    for seed in range(3):
        cut = patches(vision, shape, seed).to(device, torch.bfloat16)
        stream, levels = vision.carry(vision.begin(cut, grids), grids, 0, vision.depth, recurring=True)
        expected = vision.finish(stream, levels)
        for ends in ([], [1], [1, 3]):
            assert torch.equal(through(found, vision, shape, cut, ends), expected)
    assert found.complete
    assert len(made) == 1
