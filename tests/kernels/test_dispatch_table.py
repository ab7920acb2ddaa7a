"""Which implementation runs: the table decides, CUDA and Triton permitting, and nothing else."""

import ast
import re
from pathlib import Path

import pytest
import torch

from saccade.kernels import dispatch as choice
from saccade.kernels.dispatch import CHOICE, DEFAULT_MODE, KERNEL, TORCH, KernelMode, use_triton

KERNELS = Path(choice.__file__).parent


class OnCuda:
    """What the choice asks of a tensor."""

    is_cuda = True

    def __init__(self, size: int = 2) -> None:
        self._size = size

    def element_size(self) -> int:
        return self._size


def test_the_table_has_exactly_the_names_that_are_dispatched() -> None:
    package = KERNELS.parent
    text = "\n".join(path.read_text() for path in package.rglob("*.py"))
    assert set(re.findall(r'use_triton\(\s*"(\w+)"', text)) == set(CHOICE)


@pytest.mark.parametrize("name", CHOICE)
def test_cpu_tensors_never_run_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHOICE, name, KERNEL)
    assert not use_triton(name, torch.zeros(1), DEFAULT_MODE)


def test_the_table_decides_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TRITON", True)
    monkeypatch.setitem(CHOICE, "argmax", TORCH)
    assert not use_triton("argmax", OnCuda(), DEFAULT_MODE)  # type: ignore[arg-type]
    monkeypatch.setitem(CHOICE, "argmax", KERNEL)
    assert use_triton("argmax", OnCuda(), DEFAULT_MODE)  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "TRITON", False)
    assert not use_triton("argmax", OnCuda(), DEFAULT_MODE)  # type: ignore[arg-type]


def test_matrices_of_float32_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TRITON", True)
    for name, wide in (("skinny_linear", False), ("decode_attention", False), ("add_norm", True)):
        monkeypatch.setitem(CHOICE, name, KERNEL)
        assert use_triton(name, OnCuda(2), DEFAULT_MODE)  # type: ignore[arg-type]
        assert use_triton(name, OnCuda(4), DEFAULT_MODE) == wide  # type: ignore[arg-type]


def test_the_mode_overrides_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TRITON", True)
    monkeypatch.setitem(CHOICE, "argmax", TORCH)
    monkeypatch.setitem(CHOICE, "silu_mul", KERNEL)
    assert use_triton("argmax", OnCuda(), KernelMode("triton"))  # type: ignore[arg-type]
    assert not use_triton("skinny_linear", OnCuda(4), KernelMode("triton"))  # type: ignore[arg-type]
    assert not use_triton("silu_mul", OnCuda(), KernelMode("torch"))  # type: ignore[arg-type]
    assert not use_triton("argmax", OnCuda(), DEFAULT_MODE)  # type: ignore[arg-type]


def test_the_cpu_runs_kernels_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "INTERPRETED", False)
    assert not use_triton("skinny_linear", torch.zeros(1), KernelMode("triton"))
    monkeypatch.setattr(choice, "INTERPRETED", True)
    assert use_triton("skinny_linear", torch.zeros(1), KernelMode("triton"))


def test_an_unknown_kernel_or_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'sort'"):
        use_triton("sort", torch.zeros(1), DEFAULT_MODE)
    monkeypatch.setitem(CHOICE, "argmax", "cuda")
    with pytest.raises(ValueError, match="'cuda'"):
        use_triton("argmax", torch.zeros(1), DEFAULT_MODE)


def test_the_choice_does_not_read_the_environment() -> None:
    reading = [
        path.name for path in KERNELS.rglob("*.py") if re.search(r"os\.environ|getenv", path.read_text())
    ]
    assert reading == ["compile_pool.py"], "it hands its environment on to the processes it starts"


def mode_positions(tree: ast.Module) -> dict[str, int]:
    """The functions of a module that take a kernel mode, and which of their arguments it is."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    arguments = {node.name: [arg.arg for arg in node.args.args] for node in functions}
    return {name: names.index("mode") for name, names in arguments.items() if "mode" in names}


def test_every_call_in_the_package_passes_the_kernel_mode() -> None:
    """The default is for tests and benchmarks: a forgotten mode would change what `--deterministic` means."""
    source = KERNELS.parent.parent
    paths = (source / "saccade").rglob("*.py")
    trees = {
        ".".join(path.relative_to(source).with_suffix("").parts): ast.parse(path.read_text())
        for path in paths
    }
    forgotten = []
    for module, tree in trees.items():
        if module.startswith("saccade.tools"):  # not part of the engine
            continue
        known = mode_positions(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in trees:
                positions = mode_positions(trees[node.module])
                known |= {n.asname or n.name: positions[n.name] for n in node.names if n.name in positions}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                by_keyword = any(keyword.arg in ("mode", None) for keyword in node.keywords)
                if len(node.args) <= known[node.func.id] and not by_keyword:
                    forgotten.append(f"{module}:{node.lineno} {node.func.id}")
    assert not forgotten
