"""A mixture of experts equals a loop over tokens; both layouts of stacked experts load; bad values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from saccade.checkpoint import open_checkpoint
from saccade.errors import CheckpointError, ConfigError
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.models.config import ExpertDims
from saccade.models.experts import Experts
from saccade.models.layers import ModelBuilder
from saccade.models.loader import load_model
from tests import checkpoints

DIMS = ExpertDims(count=7, chosen=3, inner=24, normalized=True, stacked=True, layers=frozenset({0}))


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_grouped_products_equal_a_loop_over_tokens(tokens: int) -> None:
    experts = Experts(16, DIMS, ModelBuilder(torch.device("cpu"), torch.float32))
    generator = torch.Generator().manual_seed(tokens)
    for parameter in experts.parameters():
        parameter.normal_(generator=generator)
    x = torch.randn(tokens, 16, generator=generator)
    weights = torch.rand(tokens, 3, generator=generator)
    # Expert 5 takes every token, expert 6 none.
    chosen = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(tokens)])
    chosen[:, 1] = 5
    expected = torch.zeros_like(x)
    for token in range(tokens):
        for place in range(3):
            number = int(chosen[token, place])
            gate, up = (experts.gate_up[number] @ x[token]).chunk(2)
            expected[token] += weights[token, place] * (experts.down[number] @ (F.silu(gate) * up))
    found = experts.forward(x, chosen, weights, DEFAULT_MODE)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_stacked_experts_load_in_the_layout_of_the_hub_and_of_transformers(tmp_path: Path) -> None:
    plain, hub = (checkpoints.qwen3_vl(tmp_path / name, experts=True) for name in ("plain", "hub"))
    tensors = load_file(hub / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, hub / "model.safetensors", {"format": "pt"})
    models = [load_model(open_checkpoint(str(folder)), "cpu", torch.float32) for folder in (plain, hub)]
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(theirs[name], parameter) for name, parameter in ours.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok.*7.*6 experts"),
        ({"moe_intermediate_size": 16}, r"experts.* is \[6, .*config.json makes it"),
        ({"moe_intermediate_size": 64}, "does not tell inputs from outputs|config.json makes it"),
        ({"num_local_experts": 5}, r"is \[6, .*config.json makes it \[5"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"mlp_only_layers": []}, "lacks .*layers.2.mlp.gate.weight"),
    ],
)
def test_contradictions_are_refused(
    family_folder: Callable[[str], Path], values: dict[str, Any], message: str
) -> None:
    checkpoint = open_checkpoint(str(family_folder("qwen3_vl_moe")))
    checkpoint.config["text_config"].update(values)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint, "cpu", torch.float32)


def test_deterministic_mode_is_refused(family_folder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(family_folder("qwen3_moe")))
    with pytest.raises(ConfigError, match="deterministic mode"):
        load_model(checkpoint, "cpu", torch.float32, mode=KernelMode(deterministic=True))
