"""The vision bench on a CPU: its checks pass on the real thing, and find a thing that is wrong."""

import pytest
import torch
from torch import Tensor

from bench import vision
from saccade.encoder.encoder_graphs import TowerGraph
from saccade.models.layers import ModelBuilder
from saccade.models.vit import QwenVision

SIZE = (96, 64)


@pytest.fixture(scope="module")
def lab() -> vision.Lab:
    return vision.build(True, torch.device("cpu"))


def test_its_checks_pass(lab: vision.Lab) -> None:
    assert vision.check(lab, SIZE) == []


def test_stretches_that_give_something_else_are_found(
    lab: vision.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TowerGraph.finish

    def off(self: TowerGraph, stream: Tensor, levels: list[Tensor]) -> Tensor:
        return honest(self, stream, levels) * 1.0001

    monkeypatch.setattr(TowerGraph, "finish", off)
    assert any("captured stretches" in fault for fault in vision.check(lab, SIZE))


@torch.inference_mode()
def test_every_part_is_timed(lab: vision.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "seconds", lambda call, device: (call(), 1.0)[1])
    for part, rows in vision.MEASURES.items():
        assert list(rows(lab, SIZE)), part


def test_the_bound_of_a_1024_image_is_that_of_the_anchors() -> None:
    """27 layers over 4,096 patches: 3.5 TFLOP of products at 644, 2.1 of attention at 360: 11 ms."""
    tower = QwenVision(vision.QWEN3_VL_8B, ModelBuilder(torch.device("meta"), torch.bfloat16))
    products, attention = vision.operations(tower, 4096)
    assert products == pytest.approx(3.55e12, rel=0.05)
    assert attention == pytest.approx(2.09e12, rel=0.01)
