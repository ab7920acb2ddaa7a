"""Which implementation runs: the table decides, CUDA and Triton permitting, and nothing else."""

import re
from pathlib import Path

import pytest
import torch

from saccade.kernels import dispatch as choice
from saccade.kernels.dispatch import CHOICE, KERNEL, TORCH, Mode, mode, running, runs_triton

KERNELS = Path(choice.__file__).parent


class OnCuda:
    """What the choice asks of a tensor."""

    is_cuda = True

    def __init__(self, size: int = 2) -> None:
        self._size = size

    def element_size(self) -> int:
        return self._size


def test_every_name_asked_for_is_in_the_table_and_the_other_way_round() -> None:
    package = KERNELS.parent
    text = "\n".join(path.read_text() for path in package.rglob("*.py"))
    assert set(re.findall(r'runs_triton\(\s*"(\w+)"', text)) == set(CHOICE)


@pytest.mark.parametrize("name", CHOICE)
def test_a_tensor_on_the_cpu_never_meets_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHOICE, name, KERNEL)
    assert not runs_triton(name, torch.zeros(1))


def test_the_table_decides_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TRITON", True)
    monkeypatch.setitem(CHOICE, "argmax", TORCH)
    assert not runs_triton("argmax", OnCuda())  # type: ignore[arg-type]
    monkeypatch.setitem(CHOICE, "argmax", KERNEL)
    assert runs_triton("argmax", OnCuda())  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "TRITON", False)
    assert not runs_triton("argmax", OnCuda())  # type: ignore[arg-type]


def test_matrices_of_float32_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TRITON", True)
    for name, wide in (("skinny_linear", False), ("decode_attention", False), ("add_rms_norm", True)):
        monkeypatch.setitem(CHOICE, name, KERNEL)
        assert runs_triton(name, OnCuda(2))  # type: ignore[arg-type]
        assert runs_triton(name, OnCuda(4)) == wide  # type: ignore[arg-type]


def test_the_mode_overrides_the_table_where_it_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TRITON", True)
    monkeypatch.setitem(CHOICE, "argmax", TORCH)
    monkeypatch.setitem(CHOICE, "gelu", KERNEL)
    with running(Mode("triton")):
        assert mode().kernels == "triton"
        assert runs_triton("argmax", OnCuda())  # type: ignore[arg-type]
        assert not runs_triton("skinny_linear", OnCuda(4))  # type: ignore[arg-type]
        with running(Mode("torch")):
            assert not runs_triton("gelu", OnCuda())  # type: ignore[arg-type]
    assert mode() == Mode()
    assert not runs_triton("argmax", OnCuda())  # type: ignore[arg-type]


def test_the_cpu_runs_kernels_in_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Mode("triton")):
        monkeypatch.setattr(choice, "INTERPRETED", False)
        assert not runs_triton("skinny_linear", torch.zeros(1))
        monkeypatch.setattr(choice, "INTERPRETED", True)
        assert runs_triton("skinny_linear", torch.zeros(1))


def test_an_unknown_kernel_or_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'sort'"):
        runs_triton("sort", torch.zeros(1))
    monkeypatch.setitem(CHOICE, "argmax", "cuda")
    with pytest.raises(ValueError, match="'cuda'"):
        runs_triton("argmax", torch.zeros(1))


def test_the_choice_does_not_read_the_environment() -> None:
    reading = [
        path.name for path in KERNELS.rglob("*.py") if re.search(r"os\.environ|getenv", path.read_text())
    ]
    assert reading == ["workers.py"], "it hands its environment on to the processes it starts"
