"""With the table saying triton, whole paths run on the kernels and give what the references give.

The kernels run in the interpreter on CPU tensors here: what is tested is the plumbing between them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.kernels.attention import paged as attention
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.split_k import SplitKPartials
from saccade.kernels.norm_rope import elementwise, rope
from saccade.kernels.norm_rope import qk_norm_rope as qk_norm_rope
from saccade.kernels.sampling import greedy
from saccade.models.layers import Attention
from saccade.models.loader import load_model
from saccade.sampling import sampler
from tests.kernels.buffers import CUDA, needs_triton
from tests.models.harness import Walker, relative_error, text_story

ASKING = (elementwise, attention, qk_norm_rope, rope, greedy, skinny, sampler)
pytestmark = [needs_triton, pytest.mark.skipif(CUDA, reason="for the interpreter")]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Everything runs as a kernel; the names that did."""
    names: set[str] = set()

    def always(name: str, tensor: torch.Tensor, mode: KernelMode) -> bool:
        names.add(name)
        return True

    for module in ASKING:
        monkeypatch.setattr(module, "use_triton", always)
    return names


@pytest.mark.parametrize("family", ["qwen3_vl", "llama"])
def test_a_model_on_kernels_gives_the_reference_logits(
    family: str, family_folder: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    model = load_model(open_checkpoint(str(family_folder(family))), "cpu", torch.float32)
    tokens = torch.randint(0, 200, (9,), generator=torch.Generator().manual_seed(3))
    expected = Walker(model).run(text_story(model, tokens), 4)
    used = request.getfixturevalue("used")
    made = Walker(model).run(text_story(model, tokens), 4)
    assert relative_error(made, expected) < 1e-4
    assert used >= {
        "decode_attention",
        "prefill_attention",
        "qk_norm_rope",
        "rotary_angles",
        "add_norm",
        "skinny_linear",
    }


def test_partial_sums_added_by_the_next_kernel_change_no_bit(
    family_folder: Callable[[str], Path], used: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(open_checkpoint(str(family_folder("qwen3_vl"))), "cpu", torch.float32)
    weight = next(
        module.qkv.get_parameter("weight") for module in model.modules() if isinstance(module, Attention)
    )
    tokens = torch.arange(3)
    tuning, shape = skinny.SkinnyTuning(64, 16, 2), (64, *weight.shape)
    monkeypatch.setitem(skinny.TUNED, (*shape, False), tuning)
    added_first = Walker(model).run(text_story(model, tokens), 2)
    left: list[bool] = []
    plain = qk_norm_rope.qk_norm_rope_triton

    def spy(qkv: torch.Tensor | SplitKPartials, *args: Any, **kwargs: Any) -> torch.Tensor:
        left.append(isinstance(qkv, SplitKPartials))
        return plain(qkv, *args, **kwargs)

    monkeypatch.setattr(qk_norm_rope, "qk_norm_rope_triton", spy)
    monkeypatch.setitem(skinny.LEFT, shape, tuning)
    assert torch.equal(Walker(model).run(text_story(model, tokens), 2), added_first)
    assert left
    assert all(left)
    x, fixed = torch.zeros(1, weight.shape[1]), KernelMode(deterministic=True)
    assert isinstance(skinny.skinny_linear_partials(x, weight, mode=fixed), torch.Tensor)
