"""A process of `compile_pool`: reads a line of Python literals per kernel, compiles it, answers with a line.

It does not load torch, so that it is ready in half a second instead of three.
"""

import os
import sys
from ast import literal_eval
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import triton_key

from saccade.kernels.compile_pool import DONE, FAILED


class StubName(type):
    """Stands for anything in torch."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubName(name, (), {})


class StubModule(ModuleType):
    """Stands for torch, whose names the kernels' files use outside of the kernels themselves."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubName(name, (), {})


def stub_torch() -> None:
    for name in ("torch", "torch.nn", "torch.nn.functional", "torch.nn.attention"):
        sys.modules[name] = StubModule(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


def compile_kernel(job: dict[str, Any]) -> None:
    kernel = getattr(import_module(job["module"]), job["name"])
    source = ASTSource(kernel, job["signature"], job["constants"], job["attrs"])
    compiled = triton.compile(source, target=GPUTarget(*job["target"]), options=job["options"])
    if job["launcher"]:
        with suppress(Exception):  # the first launch tries again and raises
            launcher = import_module("triton.backends.nvidia.driver").CudaLauncher
            launcher(source, compiled.metadata)


def main() -> None:
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    stub_torch()
    triton.runtime.driver.set_active(object())  # there is no device
    triton_key()  # hashes the compiler, 400 MB, before the first job
    for line in sys.stdin.buffer:
        try:
            compile_kernel(literal_eval(line.decode()))
            answer = DONE
        except Exception:  # the caller compiles it, and raises
            answer = FAILED
        os.write(answers, answer)


if __name__ == "__main__":
    main()
