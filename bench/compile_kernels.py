"""Compile the kernels for an H200 on a machine without one: registers, spills, shared memory.

    PYTHONPATH=src python -m bench.compile_kernels [--parts decode,products] [--sass folder]

Needs Triton, no GPU: the wrappers run on CPU tensors, and every launch is turned into a compilation for
compute capability 9.0. Shows what does not compile, what spills and what leaves room for few programs per
multiprocessor, before a chip is asked.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.kernel_cases import cases
from bench.many_rows import many_cases

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS, SHARED, WARPS = 65536, 227 << 10, 64  # of one multiprocessor


class NoDevice:
    """Stands for a driver: names the target, owns nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend() -> list[Any]:
    """From now on a launch compiles and does nothing else; gives the list compiled kernels are added to."""
    compiled: list[Any] = []
    plain = JITFunction.run

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = plain(function, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    JITFunction.run = run
    triton.runtime.driver.set_active(NoDevice())
    return compiled


def ask(tool_option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), tool_option, file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return shown.stdout


def describe(kernel: Any) -> str:
    shown = ask("--dump-resource-usage", kernel.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {shown}")
    registers, stack = int(found[1]), int(found[2])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    resident = min(REGISTERS // (registers * 32 * warps), SHARED // (shared + 1024), WARPS // warps)
    ptx = kernel.asm["ptx"]
    way = "wgmma" if "wgmma.mma" in ptx else "mma" if "mma.sync" in ptx else "-"
    name = kernel.metadata.name
    return f"{name:18} {warps:5} {registers:5} {stack:6} {shared:8} {resident:6}  {way}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default="decode,prefill,compact,finish,points,products,qkv,layer,many,sample,pixels"
    )
    parser.add_argument("--rows", default="1,32", help="rows of the skinny products")
    parser.add_argument("--sass", type=Path, help="write each kernel's machine code into this folder")
    options = parser.parse_args()
    compiled = pretend()
    seen: set[str] = set()
    print(
        f"{'case':36} {'variant':20} {'kernel':18} {'warps':>5} {'regs':>5} {'stack':>6} {'shared':>8} per SM"
    )
    parts = set(options.parts.split(","))
    for case in [*cases(parts, tuple(map(int, options.rows.split(",")))), *many_cases(parts)]:
        inputs = case.make(torch.device("cpu"), 0)
        for name, call in case.kernels.items():
            compiled.clear()
            call(inputs)
            for kernel in compiled:
                if kernel.hash in seen:
                    continue
                seen.add(kernel.hash)
                print(f"{case.part + ' ' + case.name:36} {name:20} {describe(kernel)}", flush=True)
                if options.sass:
                    options.sass.mkdir(parents=True, exist_ok=True)
                    target = options.sass / f"{kernel.metadata.name}.{kernel.hash[:12]}.sass"
                    target.write_text(ask("--dump-sass", kernel.asm["cubin"]))


if __name__ == "__main__":
    main()
