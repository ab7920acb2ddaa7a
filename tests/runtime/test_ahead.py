"""What an idle engine captures of the tower: the shapes that zoomed and global views have, never too many."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.lod.values import ViewRule
from saccade.media.geometry import plain_view
from saccade.models.layers import VisionTower
from saccade.models.load import load
from saccade.runtime.ahead import SPARE, Ahead, likely_shapes, look_grids, zoom_grids
from saccade.runtime.warm import SIZES
from saccade.vision.graphs import MOST_SHAPES, Shape, TowerGraphs
from tests import checkpoints
from tests.runtime.test_workspace import PROCESSING
from tests.vision.test_graphs import CPU, Counting, graphs, patches, through

RULE = ViewRule(unit=32)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    folder: Path = checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"))
    vision = load(open_checkpoint(str(folder)), "cpu", torch.float32).vision
    assert vision is not None
    return vision


def test_the_ladder_and_the_usual_looks_come_first_and_fit(tower: VisionTower) -> None:
    made = TowerGraphs(tower, Counting(), CPU, torch.float32)
    shapes = likely_shapes(PROCESSING, RULE, made, 4096)
    assert len(set(shapes)) == len(shapes)
    ladder = [(4, 4), (2, 8), (8, 8), (4, 16), (14, 14), (7, 28), (20, 20), (10, 40)]
    patches_of = [(2 * rows, 2 * columns) for rows, columns in ladder]
    assert {shape.grid for shape in shapes[:9]} >= set(patches_of)
    assert {shape.views for shape in shapes if shape.grid == (16, 16)} == {1, 2, 4, 8, 16}
    assert {shape.views for shape in shapes if shape.grid == (40, 40)} == {1, 2}, "as many as go together"
    assert {shape.views for shape in shapes if shape.grid == (24, 24)} == {1, 2, 4}, "a look"
    assert Shape((26, 26), 1) in shapes, "the look at 1024x1024 that a quarter of its tokens pays for"
    assert all(shape.views == 1 for shape in likely_shapes(PROCESSING, RULE, made, 4096, alone=True))
    assert all(shape.patches < 4 * 100 for shape in likely_shapes(PROCESSING, RULE, made, 100, alone=True))


def test_a_checkpoint_of_square_views_of_two_levels_has_only_those() -> None:
    rule = replace_rule(zoom_tokens=(16, 64), square=True)
    assert set(zoom_grids(PROCESSING, rule)) == {(4, 4), (8, 8)}
    looks = look_grids(replace(PROCESSING, max_pixels=32 * 32 * 8), rule)
    assert all(rows * columns <= 8 for rows, columns in looks), "none larger than the picture"


def replace_rule(**changes: object) -> ViewRule:
    return ViewRule(**{"unit": 32, **changes})  # type: ignore[arg-type]


def test_one_shape_a_call_each_captured_whole_until_none_is_left(tower: VisionTower) -> None:
    recorder = Counting()
    made = graphs(tower, recorder)
    shapes = [Shape((4, 4), 1), Shape((2, 6), 2), Shape((4, 4), 1)]
    ahead = Ahead(made, shapes)
    for number in (1, 2):
        assert ahead.go_on()
        assert len(made) == number
        assert recorder.recorded == number * (2 + tower.depth)
        made.check()
    assert not ahead.go_on()
    assert len(ahead) == 0
    before = recorder.replayed
    found = made.find(shapes[1])  # at its first coming
    assert found is not None
    cut = patches(tower, shapes[1])
    assert torch.equal(through(found, tower, shapes[1], cut, []), tower(cut, [(2, 6)] * 2))
    assert recorder.replayed == before + 2 + tower.depth


def test_no_shape_leaves_for_one_that_has_not_come(tower: VisionTower) -> None:
    made = graphs(tower, Counting(), most_shapes=SPARE + 1)
    ahead = Ahead(made, [Shape((2, columns), 1) for columns in (2, 4, 6)])
    assert ahead.go_on()
    assert not ahead.go_on()
    assert made.shapes == (Shape((2, 2), 1),)


def test_what_comes_often_fits_beside_what_is_there_from_the_start(tower: VisionTower) -> None:
    made = TowerGraphs(tower, Counting(), CPU, torch.float32)
    shapes = likely_shapes(PROCESSING, RULE, made, 4096)
    grids = [plain_view(bytes(16), size, PROCESSING).grid for size in SIZES]
    began = {
        Shape(grid, views) for grid in grids for views in (1, 2, 4) if made.together(grid, views) == views
    }
    often = {shape for shape in shapes if shape.views > 1} | set(shapes[:19])
    assert len(began | often) <= MOST_SHAPES - SPARE


def test_a_shape_begun_by_requests_is_completed(tower: VisionTower) -> None:
    made, shape = graphs(tower, Counting(), sightings=1), Shape((4, 4), 1)
    found = made.find(shape)
    assert found is not None
    through(found, tower, shape, patches(tower, shape), [])
    states = [found.complete, made.capture(shape), found.complete, made.capture(shape)]
    assert states == [False, True, True, False]


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_capture_that_fails_ends_nothing(tower: VisionTower, fail_at: int) -> None:
    made = graphs(tower, Counting(fail_at=fail_at))
    ahead = Ahead(made, [Shape((4, 4), 1), Shape((4, 4), 1)])
    assert ahead.go_on()
    assert not ahead.go_on()
    assert len(made) == 0
    made.check()


def test_want_of_memory_ends_nothing(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    made, shape = graphs(tower, Counting()), Shape((4, 4), 1)

    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(tower, "begin", short)
    assert made.capture(shape)
    assert not made.capture(shape)
    assert made.shapes == ()
    made.check()
