"""With the table saying triton, whole paths run on the kernels and give what the twins give.

The kernels run in the interpreter on CPU tensors here: what is tested is the plumbing between them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.kernels import activation, add_norm, attention, greedy, qkv_finish, rope, skinny
from saccade.models.load import load
from saccade.runtime import sampler
from tests.kernels.places import CUDA, needs_triton
from tests.models.harness import Walker, relative_error, text_story

ASKING = (activation, add_norm, attention, qkv_finish, rope, greedy, skinny, sampler)
pytestmark = [needs_triton, pytest.mark.skipif(CUDA, reason="for the interpreter")]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Everything runs as a kernel; the names that did."""
    names: set[str] = set()

    def always(name: str, tensor: torch.Tensor) -> bool:
        names.add(name)
        return True

    for module in ASKING:
        monkeypatch.setattr(module, "runs_triton", always)
    return names


@pytest.mark.parametrize("family", ["qwen3_vl", "llama"])
def test_a_model_on_kernels_gives_the_twins_logits(
    family: str, family_folder: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    model = load(open_checkpoint(str(family_folder(family))), "cpu", torch.float32)
    tokens = torch.randint(0, 200, (9,), generator=torch.Generator().manual_seed(3))
    expected = Walker(model).run(text_story(model, tokens), 4)
    used = request.getfixturevalue("used")
    made = Walker(model).run(text_story(model, tokens), 4)
    assert relative_error(made, expected) < 1e-4
    assert used >= {
        "decode_attention",
        "prefill_attention",
        "qkv_finish",
        "rotary_angles",
        "add_rms_norm",
        "skinny_linear",
    }
