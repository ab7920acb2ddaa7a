"""Compile the kernels for an H200 on a machine without one: registers, spills, shared memory.

    PYTHONPATH=src python bench/compile_kernels.py [--only decode] [--sass folder]

Needs Triton, no GPU: the wrappers run on CPU tensors, and every launch is turned into a compilation for
compute capability 9.0. Shows what does not compile, what spills and what leaves room for few programs per
multiprocessor, before a chip is asked.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent))
from launches import LAUNCHES

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS, SHARED = 65536, 227 << 10  # of one multiprocessor


class NoDevice:
    """Stands for a driver: names the target, owns nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiled:
    """Collects what the launches of one wrapper call compile to."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []
        plain = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = plain(function, *args, grid=grid, warmup=True, **kwargs)
            self.kernels.append(kernel)
            return kernel

        JITFunction.run = run

    def of(self, call: Callable[[], Any]) -> list[Any]:
        self.kernels = []
        call()
        return self.kernels


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack (spills) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    if registers is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {shown}")
    return int(registers[1]), int(registers[2])


def sass(cubin: bytes, target: Path) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        with target.open("w") as out:
            subprocess.run([TOOLS / "cuobjdump", "--dump-sass", file.name], stdout=out, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="launches whose name contains this")
    parser.add_argument("--sass", type=Path, help="write each kernel's machine code into this folder")
    options = parser.parse_args()
    triton.runtime.driver.set_active(NoDevice())
    compiled = Compiled()
    print(
        f"{'launch':34} {'kernel':22} {'warps':>5} {'regs':>5} {'stack':>6} {'shared':>8} {'per SM':>6}  mma"
    )
    for name, call in LAUNCHES.items():
        if options.only not in name:
            continue
        for kernel in compiled.of(lambda call=call: call(torch.device("cpu"))):
            registers, stack = usage(kernel.asm["cubin"])
            warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
            resident = min(
                REGISTERS // (registers * 32 * warps), SHARED // max(shared + 1024, 1), 64 // warps
            )
            ptx = kernel.asm["ptx"]
            mma = "wgmma" if "wgmma.mma" in ptx else "mma" if "mma.sync" in ptx else "-"
            print(f"{name:34} {kernel.metadata.name[:22]:22} {warps:5} {registers:5} {stack:6} {shared:8} "
                  f"{resident:6}  {mma}{' pdl' if 'griddepcontrol' in ptx else ''}")  # fmt: skip
            if options.sass:
                options.sass.mkdir(parents=True, exist_ok=True)
                sass(
                    kernel.asm["cubin"],
                    options.sass / f"{name}.{kernel.metadata.name}.sass".replace(" ", "_"),
                )


if __name__ == "__main__":
    main()
