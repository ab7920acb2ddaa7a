"""The towers of Qwen2-VL and Qwen2.5-VL: features equal transformers', windows, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from saccade.checkpoint import open_checkpoint
from saccade.errors import CheckpointError
from saccade.models.loader import load_model
from saccade.models.qwen2_vit import window_order, window_runs
from tests.models.harness import relative_error

GRIDS = [(2, 2), (6, 4), (6, 4), (4, 6), (10, 14), (2, 16)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl"])
def test_features_equal_transformers(family_folder: Callable[[str], Path], family: str) -> None:
    folder = family_folder(family)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tower = load_model(open_checkpoint(str(folder)), "cpu", torch.float32).vision
    assert tower is not None
    count = sum(rows * columns for rows, columns in GRIDS)
    patches = torch.randn(count, tower.patch_dim, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = theirs.model.get_image_features(patches, torch.tensor([[1, *grid] for grid in GRIDS]))
        expected = torch.cat(output.pooler_output)
        assert relative_error(tower(patches, GRIDS), expected) < 1e-5
        layout = tower.layout(GRIDS)  # layer by layer, as slices of a view run
        stream = tower.begin(patches, layout)
        for layer in range(tower.depth):
            stream, _ = tower.carry(stream, layout, layer, layer + 1)
        assert relative_error(tower.finish(stream, []), expected) < 1e-5


def test_windows_matter(family_folder: Callable[[str], Path]) -> None:
    """The equality above would be empty if attention over the whole view gave about the same."""
    checkpoint = open_checkpoint(str(family_folder("qwen2_5_vl")))
    windowed = load_model(checkpoint, "cpu", torch.float32).vision
    checkpoint.config["vision_config"]["fullatt_block_indexes"] = [0, 1, 2, 3]
    full = load_model(checkpoint, "cpu", torch.float32).vision
    assert windowed is not None
    assert full is not None
    patches = torch.randn(140, windowed.patch_dim, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert relative_error(full(patches, [(10, 14)]), windowed(patches, [(10, 14)])) > 0.05


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (5, 9), (3, 8), (8, 3), (2, 2)])
def test_windows_have_each_token_once_and_only_neighbours(grid: tuple[int, int]) -> None:
    order, runs = window_order(grid, 4), list(window_runs(grid, 4))
    assert sorted(order.tolist()) == list(range(grid[0] * grid[1]))
    assert sum(count * size for _, count, size in runs) == len(order)
    for start, count, size in runs:
        for window in order[start : start + count * size].view(count, size):
            places = {(int(token) // grid[1] // 4, int(token) % grid[1] // 4) for token in window}
            assert len(places) == 1


@pytest.mark.parametrize(
    ("family", "section", "values", "message"),
    [
        ("qwen2_5_vl", "vision_config", {"window_size": 16}, "window_size.*16.*32 of one token"),
        ("qwen2_5_vl", "vision_config", {"fullatt_block_indexes": [9]}, r"\[9\].*layers of 4"),
        ("qwen2_5_vl", "vision_config", {"hidden_act": "gelu"}, "gelu"),
        ("qwen2_5_vl", "vision_config", {"out_hidden_size": 32}, "32 channels.*64"),
        ("qwen2_5_vl", "vision_config", {"num_heads": 3}, "32 over 3 heads"),
        ("qwen2_5_vl", "vision_config", {"hidden_size": 48}, r"tensor .* is \[.*config.json makes it"),
        ("qwen2_vl", "vision_config", {"hidden_act": "gelu"}, "quick_gelu"),
        ("qwen2_vl", "vision_config", {"mlp_ratio": 4}, r"tensor .* is \[.*config.json makes it"),
        ("qwen2_5_vl", "text_config", {"intermediate_size": 96}, r"_proj.weight is .*config.json makes it"),
    ],
)
def test_configuration_that_contradicts_itself_or_the_tensors_is_refused(
    family_folder: Callable[[str], Path], family: str, section: str, values: dict[str, Any], message: str
) -> None:
    checkpoint = open_checkpoint(str(family_folder(family)))
    checkpoint.config[section].update(values)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint, "cpu", torch.float32)
