"""Shared by all tests: quiet hypothesis, few threads, tiny checkpoints made once per worker."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Before anything imports Triton: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests import checkpoints

torch.set_num_threads(1)  # two workers on two cores

settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("suite")

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": checkpoints.qwen3_vl,
    "qwen3_vl_tied": lambda folder: checkpoints.qwen3_vl(folder, tied=True),
    "qwen3_vl_moe": lambda folder: checkpoints.qwen3_vl(folder, experts=True),
    "qwen3_moe": lambda folder: checkpoints.qwen3_moe(folder),
    "qwen3_moe_unnormalized": lambda folder: checkpoints.qwen3_moe(folder, norm_topk_prob=False),
    "qwen2_5_vl": checkpoints.qwen2_5_vl,
    "qwen2_vl": checkpoints.qwen2_vl,
    "qwen3": checkpoints.qwen3,
    "qwen2": lambda folder: checkpoints.qwen2(folder),
    "mistral": lambda folder: checkpoints.mistral(folder),
    "mistral_window": lambda folder: checkpoints.mistral(folder, window=12),
    "llama": lambda folder: checkpoints.llama(folder),
    "llava": lambda folder: checkpoints.llava(folder),
    "idefics3": lambda folder: checkpoints.idefics3(folder),
    "smolvlm": lambda folder: checkpoints.idefics3(folder, smol=True),
    "gemma3": lambda folder: checkpoints.gemma3(folder),
    "llama_scaled": lambda folder: checkpoints.llama(folder, scaled=True),
}

WITH_IMAGES = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl")


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint folder of a family, made on first use."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = FAMILIES[name](tmp_path_factory.mktemp(name) / "checkpoint")
        return made[name]

    return folder


@pytest.fixture(scope="session")
def vl_folder(family_folder: Callable[[str], Path]) -> Path:
    return family_folder("qwen3_vl")
