"""What an idle engine captures of the tower: the shapes that zoomed and global views have, never too many."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.encoder.encoder_graphs import MAX_SHAPES, EncoderGraphs, TowerShape
from saccade.inputs.image_processor import plain_view
from saccade.lod.allocate import Field, windows
from saccade.lod.types import ViewRule
from saccade.models.interface import VisionTower
from saccade.models.loader import load_model
from saccade.worker.encoder_warmup import (
    SIZES,
    SPARE,
    TowerWarmup,
    global_view_grids,
    likely_tower_shapes,
    zoom_view_grids,
)
from tests import checkpoints
from tests.encoder.test_encoder_graphs import CPU, Counting, graphs, patches, through
from tests.engine.test_memory import PROCESSING

RULE = ViewRule(unit=32)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    folder: Path = checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"))
    vision = load_model(open_checkpoint(str(folder)), "cpu", torch.float32).vision
    assert vision is not None
    return vision


def test_ladder_global_views_and_common_windows_come_first_and_fit(tower: VisionTower) -> None:
    made = EncoderGraphs(tower, Counting(), CPU, torch.float32)
    shapes = likely_tower_shapes(PROCESSING, RULE, made, 4096)
    assert len(set(shapes)) == len(shapes)
    assert {shape.size for shape in shapes[:4]} == {4 * tokens for tokens in RULE.zoom_tokens}
    assert {shape.views for shape in shapes if shape.size == 4 * 64} == {1, 2, 4, 8, 16}
    assert {shape.views for shape in shapes if shape.size == 4 * 400} == {1, 2}, "as many as go together"
    assert {shape.views for shape in shapes if shape.size == 4 * 144} == {1, 2, 4}, "a look"
    often = shapes[: MAX_SHAPES - SPARE - 13]
    for tokens in (36, 39, 40):
        reason = "a window at 1024x1024, whose budget of 12% leaves 41"
        assert {TowerShape(4 * tokens, 1), TowerShape(4 * tokens, 2)} <= set(often), reason
    for tokens in (13 * 13, 9 * 9):
        assert TowerShape(4 * tokens, 1) in often, "the looks at 1024x1024 that 25% and 12% pay for"
    assert all(shape.views == 1 for shape in likely_tower_shapes(PROCESSING, RULE, made, 4096, alone=True))
    assert all(
        shape.patches < 4 * 100 for shape in likely_tower_shapes(PROCESSING, RULE, made, 100, alone=True)
    )


@pytest.mark.parametrize("alone", [False, True])
def test_window_shapes_of_any_size_are_listed(tower: VisionTower, alone: bool) -> None:
    """Of every budget and picture for which the allocator has one; `alone` there is a place for each."""
    made = EncoderGraphs(tower, Counting(), CPU, torch.float32)
    shapes = likely_tower_shapes(PROCESSING, RULE, made, 4096, alone=alone)
    sizes = {
        window.tokens
        for side in (512, 1024, 2048)
        for left in range(16, 64)
        for window in windows(
            Field(np.zeros((8, 8), np.float32), (side, side), PROCESSING.token_grid(side, side)), RULE, left
        )
        if window.tokens <= left
    }
    assert len(sizes) == 37
    assert {TowerShape(4 * tokens, 1) for tokens in sizes} <= set(shapes)
    if alone:
        last = max(shapes.index(TowerShape(4 * tokens, 1)) for tokens in sizes)
        assert last < MAX_SHAPES - SPARE - len(SIZES)


def test_a_checkpoint_of_square_views_of_two_levels_has_only_those(tower: VisionTower) -> None:
    rule = replace_rule(zoom_tokens=(16, 64), square=True)
    assert set(zoom_view_grids(PROCESSING, rule)) == {(4, 4), (8, 8)}
    looks = global_view_grids(replace(PROCESSING, max_pixels=32 * 32 * 8), rule)
    assert all(rows * columns <= 8 for rows, columns in looks), "none larger than the picture"
    made = EncoderGraphs(tower, Counting(), CPU, torch.float32)
    for none in (rule, replace_rule(zoom_tokens=())):
        assert likely_tower_shapes(PROCESSING, none, made, 4096), "looks, whatever the ladder"


def replace_rule(**changes: object) -> ViewRule:
    return ViewRule(**{"unit": 32, **changes})  # type: ignore[arg-type]


def test_each_call_captures_one_shape_until_none_is_left(tower: VisionTower) -> None:
    recorder = Counting()
    made = graphs(tower, recorder)
    shapes = [TowerShape(16, 1), TowerShape(12, 2), TowerShape(16, 1)]
    ahead = TowerWarmup(made, shapes)
    for number in (1, 2):
        assert ahead.capture_next()
        assert len(made) == number
        assert recorder.recorded == number * (2 + tower.depth)
        made.check()
    assert not ahead.capture_next()
    assert len(ahead) == 0
    before = recorder.replayed
    found = made.find(shapes[1])  # at its first coming
    assert found is not None
    cut = patches(tower, shapes[1])
    assert torch.equal(through(found, tower, [(2, 6), (6, 2)], cut, []), tower(cut, [(2, 6), (6, 2)]))
    assert recorder.replayed == before + 2 + tower.depth


def test_warmup_evicts_no_shape(tower: VisionTower) -> None:
    made = graphs(tower, Counting(), max_shapes=SPARE + 1)
    ahead = TowerWarmup(made, [TowerShape(size, 1) for size in (4, 8, 12)])
    assert ahead.capture_next()
    assert not ahead.capture_next()
    assert made.shapes == (TowerShape(4, 1),)


def test_frequent_shapes_fit_beside_the_first_ones(tower: VisionTower) -> None:
    made = EncoderGraphs(tower, Counting(), CPU, torch.float32)
    shapes = likely_tower_shapes(PROCESSING, RULE, made, 4096)
    sizes = [4 * plain_view(bytes(16), size, PROCESSING).tokens for size in SIZES]
    began = {
        TowerShape(size, views)
        for size in sizes
        for views in (1, 2, 4)
        if made.views_per_call(size, views) == views
    }
    last = shapes.index(TowerShape(4 * 16, 64))  # of levels together; what follows is rare
    assert len(began | set(shapes[: last + 1])) <= MAX_SHAPES - SPARE


def test_a_shape_begun_by_requests_is_completed(tower: VisionTower) -> None:
    made, shape = graphs(tower, Counting(), min_uses=1), TowerShape(16, 1)
    found = made.find(shape)
    assert found is not None
    through(found, tower, [(4, 4)], patches(tower, shape), [])
    states = [found.complete, made.capture(shape), found.complete, made.capture(shape)]
    assert states == [False, True, True, False]


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_failed_capture_fails_nothing(tower: VisionTower, fail_at: int) -> None:
    made = graphs(tower, Counting(fail_at=fail_at))
    ahead = TowerWarmup(made, [TowerShape(16, 1), TowerShape(16, 1)])
    assert ahead.capture_next()
    assert not ahead.capture_next()
    assert len(made) == 0
    made.check()


def test_a_capture_without_memory_fails_nothing(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    made, shape = graphs(tower, Counting()), TowerShape(16, 1)

    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(tower, "begin", short)
    assert made.capture(shape)
    assert not made.capture(shape)
    assert made.shapes == ()
    made.check()
