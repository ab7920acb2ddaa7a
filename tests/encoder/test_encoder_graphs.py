"""The tower by captured stretches gives what the tower gives; shapes are counted, bounded, given up."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from saccade.checkpoint import open_checkpoint
from saccade.encoder import partial_views as unfinished
from saccade.encoder.encoder_graphs import (
    EncoderBuffers,
    EncoderGraphs,
    TowerGraph,
    TowerShape,
    build_encoder_graphs,
)
from saccade.kernels.cuda_graph import PlainRecorder, Replay
from saccade.models.interface import Layout, VisionTower
from saccade.models.loader import load_model
from tests import checkpoints

CPU = torch.device("cpu")
Grid = tuple[int, int]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    folder = checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"))
    vision = load_model(open_checkpoint(str(folder)), "cpu", torch.float32).vision
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


def graphs(tower: VisionTower, recorder: Counting, **options: int) -> EncoderGraphs:
    return EncoderGraphs(tower, recorder, CPU, torch.float32, **options)


def patches(tower: VisionTower, shape: TowerShape, seed: int = 0) -> Tensor:
    return torch.randn(shape.patches, tower.patch_dim, generator=torch.Generator().manual_seed(seed))


def through(
    carrier: TowerGraph, tower: VisionTower, grids: Sequence[Grid], made: Tensor, ends: Sequence[int]
) -> Tensor:
    """Slices that end at these layers; what lies between them is copied out, as the encoder does it."""
    layout = tower.layout(grids)
    stream, levels, first = carrier.begin(made, layout), [], 0
    for stop in (*ends, tower.depth):
        stream, more = carrier.carry(stream, layout, first, stop)
        stream, first = stream.clone(), stop
        levels += [level.clone() for level in more]
    return carrier.finish(stream, levels)


@pytest.mark.parametrize(
    "calls",  # of one shape
    [
        [[(4, 6)]] * 3,
        [[(2, 2)] * 4] * 3,
        [[(4, 6)], [(6, 4)], [(2, 12)]],
        [[(8, 4), (8, 4)], [(4, 8), (2, 16)], [(8, 4), (4, 8)]],
    ],
    ids=str,
)
@pytest.mark.parametrize("ends", [[], [1], [2], [1, 3]])
def test_graphs_give_the_towers_features_bit_for_bit(
    tower: VisionTower, calls: list[list[Grid]], ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "SEGMENTS", 2)  # of two layers each: [1] and [1, 3] cut through them
    recorder = Counting()
    shape = TowerShape(calls[0][0][0] * calls[0][0][1], len(calls[0]))
    found = graphs(tower, recorder).find(shape, now=True)
    assert found is not None
    for seed, grids in enumerate(calls):
        made = patches(tower, shape, seed)
        assert torch.equal(through(found, tower, grids, made, ends), tower(made, grids))
    assert recorder.replayed > 0
    if not ends:
        assert found.complete
        assert recorder.recorded == 4
        assert recorder.replayed == 8


def test_tables_are_copied_only_when_the_grids_change(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shapes share one place for them: a view of another shape in between overwrites it."""
    copied: list[tuple[Grid, ...]] = []
    copy = Layout.copy_

    def counted(self: Layout, given: Layout) -> None:
        copied.append(given.grids)
        copy(self, given)

    monkeypatch.setattr(Layout, "copy_", counted)
    made = graphs(tower, Counting())
    large, small = made.find(TowerShape(24, 1), now=True), made.find(TowerShape(16, 1), now=True)
    assert large is not None
    assert small is not None
    wide, tall, square = (tower.layout([grid]) for grid in ((4, 6), (6, 4), (4, 4)))
    cut, other = patches(tower, TowerShape(24, 1)), patches(tower, TowerShape(16, 1))
    through(large, tower, [(4, 6)], cut, [1, 2])
    through(large, tower, [(4, 6)], cut, [])
    assert copied == [wide.grids], "once for all slices"
    stream, levels = large.carry(large.begin(cut, tall), tall, 0, 2)
    stream, levels = stream.clone(), [level.clone() for level in levels]
    through(small, tower, [(4, 4)], other, [])
    _, more = large.carry(stream, tall, 2, tower.depth)
    assert copied == [wide.grids, tall.grids, square.grids, tall.grids]
    given = large.finish(large._stream, levels + [level.clone() for level in more])
    assert torch.equal(given, tower(cut, [(6, 4)]))


def test_tables_are_copied_again_after_a_failed_copy(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = graphs(tower, Counting())
    found = made.find(TowerShape(24, 1), now=True)
    assert found is not None
    cut = patches(tower, TowerShape(24, 1))
    through(found, tower, [(4, 6)], cut, [])
    made.check()

    def half(self: Layout, given: Layout) -> None:
        self.table(0).zero_()
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(Layout, "copy_", half)
        with pytest.raises(torch.OutOfMemoryError):
            found.begin(cut, tower.layout([(6, 4)]))
    made.check()
    assert torch.equal(through(found, tower, [(4, 6)], cut, []), tower(cut, [(4, 6)]))


def test_views_of_another_size_are_refused(tower: VisionTower) -> None:
    found = graphs(tower, Counting()).find(TowerShape(24, 2), now=True)
    assert found is not None
    with pytest.raises(RuntimeError, match="were given to the graphs of"):
        found.begin(patches(tower, TowerShape(24, 2)), tower.layout([(8, 4), (4, 4)]))


def test_the_buffers_take_the_bytes_that_are_reserved(tower: VisionTower) -> None:
    made = EncoderBuffers(tower, CPU, torch.float32, 64)
    tensors = [made.patches, made.stream, made.features, *made._tables]
    assert EncoderBuffers.nbytes(tower, torch.float32, 64) == sum(one.nbytes for one in tensors)


def test_a_second_shape_does_not_disturb_what_the_first_gave(tower: VisionTower) -> None:
    made = graphs(tower, Counting())
    one, other = TowerShape(16, 1), TowerShape(24, 2)
    first, second = made.find(one, now=True), made.find(other, now=True)
    assert first is not None
    assert second is not None
    given = through(first, tower, [(4, 4)], patches(tower, one), [])
    kept = given.clone()
    through(second, tower, [(6, 4)] * 2, patches(tower, other, 1), [])
    assert torch.equal(given, kept)


def test_a_frequent_shape_is_captured_one_graph_per_call(tower: VisionTower) -> None:
    recorder = Counting()
    made = graphs(tower, recorder, min_uses=3)
    shape = TowerShape(16, 1)
    assert made.find(shape) is made.find(shape) is None
    for call in range(1, 8):
        found = made.find(shape)
        assert found is not None
        through(found, tower, [(4, 4)], patches(tower, shape), [])
        made.check()
        assert recorder.recorded == min(call, 2 + tower.depth)
        assert found.complete == (call >= 2 + tower.depth)


def test_least_recently_used_shapes_are_evicted(tower: VisionTower) -> None:
    made = graphs(tower, Counting(), max_shapes=2)
    a, b, c = (TowerShape(size, 1) for size in (4, 8, 12))
    for shape in (a, b, a, c):
        assert made.find(shape, now=True) is not None
        made.check()
    assert made.shapes == (a, c)


def test_a_shape_beyond_the_bound_runs_eagerly(tower: VisionTower) -> None:
    made = graphs(tower, Counting(), max_patches=16)
    assert made.find(TowerShape(24, 1), now=True) is None
    assert made.find(TowerShape(16, 2), now=True) is None
    assert made.find(TowerShape(16, 1), now=True) is not None


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_failed_capture_changes_no_feature_and_is_not_tried_again(tower: VisionTower, fail_at: int) -> None:
    recorder = Counting(fail_at=fail_at)
    made = graphs(tower, recorder)
    shape = TowerShape(24, 1)
    found = made.find(shape, now=True)
    assert found is not None
    given = through(found, tower, [(4, 6)], patches(tower, shape), [])
    assert torch.equal(given, tower(patches(tower, shape), [(4, 6)]))
    assert len(made) == 0
    assert made.find(shape, now=True) is None
    assert recorder.recorded == fail_at
    made.check()


def test_patches_that_are_not_whole_views_are_refused(tower: VisionTower) -> None:
    made = graphs(tower, Counting())
    shape = TowerShape(24, 4)
    found = made.find(shape, now=True)
    assert found is not None
    whole = patches(tower, shape)
    layout = tower.layout([(4, 6)] * 4)
    found.begin(whole, layout)
    found.begin(whole[: 3 * 24], layout)  # the fourth is blank
    for count in (5, 3 * 24 + 1, 4 * 24 - 5):
        with pytest.raises(RuntimeError, match=f"{count} patches"):
            found.begin(whole[:count], layout)


def test_views_share_a_call_by_powers_of_two(tower: VisionTower) -> None:
    made = graphs(tower, Counting())
    assert [made.views_per_call(64 * 64, views) for views in (1, 2, 9)] == [1, 1, 1]
    assert [made.views_per_call(28 * 28, views) for views in (1, 2, 3, 4, 5, 100)] == [1, 2, 2, 4, 4, 4]
    assert [made.views_per_call(64, views) for views in (1, 3, 5, 9, 16, 17, 200)] == [
        1,
        4,
        8,
        16,
        16,
        16,
        64,
    ]
    assert [made.views_per_call(64, views, padding=False) for views in (1, 3, 5, 9)] == [1, 2, 4, 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "calls",  # of one shape
    [
        [[(4, 6)], [(6, 4)], [(2, 12)], [(6, 4)]],
        [[(28, 28), (28, 28)], [(14, 56), (28, 28)], [(56, 14), (14, 56)]],
    ],
    ids=str,
)
@torch.inference_mode()
def test_graphs_on_cuda_give_the_eager_towers_features(tmp_path: Path, calls: list[list[Grid]]) -> None:
    """Captured with the first grids, replayed with others; and sliced, others in between."""
    device = torch.device("cuda")
    folder = checkpoints.qwen3_vl(tmp_path)
    vision = load_model(open_checkpoint(str(folder)), "cuda", torch.bfloat16).vision
    assert vision is not None
    made = build_encoder_graphs(vision, device, torch.bfloat16)
    shape = made.shape_for(calls[0][0], len(calls[0]))
    found = made.find(shape, now=True)
    assert found is not None
    cuts = [patches(vision, shape, seed).to(device, torch.bfloat16) for seed in range(len(calls))]
    expected = []
    for cut, grids in zip(cuts, calls, strict=True):
        layout = vision.layout(grids)
        stream, levels = vision.carry(vision.begin(cut, layout), layout, 0, vision.depth, recurring=True)
        expected.append(vision.finish(stream, levels))
    for cut, grids, whole in zip(cuts, calls, expected, strict=True):
        for ends in ([], [1], [1, 3]):
            assert torch.equal(through(found, vision, grids, cut, ends), whole)
    assert found.complete
    assert len(made) == 1
    halves = []
    for cut, grids in zip(cuts, calls, strict=True):
        layout = vision.layout(grids)
        stream, levels = found.carry(found.begin(cut, layout), layout, 0, 2)
        halves.append((layout, stream.clone(), [level.clone() for level in levels]))
    for (layout, half, levels), whole in zip(halves, expected, strict=True):
        stream, more = found.carry(half, layout, 2, vision.depth)
        assert torch.equal(found.finish(stream, [*levels, *(level.clone() for level in more)]), whole)
