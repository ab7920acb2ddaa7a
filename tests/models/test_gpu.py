"""The same networks on a CUDA device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.models.loader import load_model
from tests import checkpoints
from tests.models.harness import Walker, relative_error, text_story

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("chunk", [None, 7, 1])
@pytest.mark.parametrize("window", [None, 6])
def test_logits_on_cuda_equal_those_on_the_cpu(tmp_path: Path, chunk: int | None, window: int | None) -> None:
    options: dict[str, Any] = {}
    if window is not None:
        options = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 2}
    checkpoint = open_checkpoint(str(checkpoints.qwen3(tmp_path, **options)))
    tokens = torch.randint(0, 480, (45,), generator=torch.Generator().manual_seed(3))
    logits = []
    for device in ("cpu", "cuda"):
        model = load_model(checkpoint, device, torch.float32)
        logits.append(Walker(model).run(text_story(model, tokens.to(device)), chunk).cpu())
    assert relative_error(logits[1], logits[0]) < 1e-3
    assert torch.equal(logits[1].argmax(-1), logits[0].argmax(-1))


def test_vision_features_on_cuda_equal_those_on_the_cpu(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(checkpoints.qwen3_vl(tmp_path)))
    grids = [(4, 6), (4, 6), (2, 30), (8, 8)]
    patches = torch.randn(4 * 6 * 2 + 60 + 64, 1536, generator=torch.Generator().manual_seed(0))
    features = []
    for device in ("cpu", "cuda"):
        vision = load_model(checkpoint, device, torch.float32).vision
        assert vision is not None
        with torch.inference_mode():
            features.append(vision(patches.to(device), grids).cpu())
    assert relative_error(features[1], features[0]) < 1e-3


def test_dummy_weights_are_made_on_the_device(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(checkpoints.qwen3_vl(tmp_path)))
    model = load_model(checkpoint, "cuda", torch.bfloat16, "dummy")
    assert all(parameter.is_cuda and parameter.isfinite().all() for parameter in model.parameters())
