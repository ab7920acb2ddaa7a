"""A process that compiles kernels; only compile_pool.py starts it.

takes   a line of Python literals per kernel: whose it is, and all that Triton compiles it by
gives   a line per kernel: whether it is in the cache
never   loads torch or touches a device: it is ready in half a second, not in three; prints anything
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


class Name(type):
    """Stands for anything of torch's, and for what is in it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


class Absent(ModuleType):
    """Stands for torch, whose names the kernels' files use in annotations, tables and functions that nobody
    calls here. Of the kernels none does: Triton could not compile it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


def leave_out_torch() -> None:
    for name in ("torch", "torch.nn", "torch.nn.functional", "torch.nn.attention"):
        sys.modules[name] = Absent(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


def compile_kernel(job: dict[str, Any]) -> None:
    kernel = getattr(import_module(job["module"]), job["name"])
    source = ASTSource(kernel, job["signature"], job["constants"], job["attrs"])
    compiled = triton.compile(source, target=GPUTarget(*job["target"]), options=job["options"])
    if job["launcher"]:
        with suppress(Exception):  # whoever launches it tries again, and says what is wrong
            launcher = import_module("triton.backends.nvidia.driver").CudaLauncher
            launcher(source, compiled.metadata)


def main() -> None:
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    leave_out_torch()
    triton.runtime.driver.set_active(object())  # who looks for a device finds none
    triton_key()  # of the compiler itself, 400 MB: hashed before anybody waits
    for line in sys.stdin.buffer:
        try:
            compile_kernel(literal_eval(line.decode()))
            answer = DONE
        except Exception:  # the asker compiles it, and says what is wrong
            answer = FAILED
        os.write(answers, answer)


if __name__ == "__main__":
    main()
