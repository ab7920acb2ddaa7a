"""Kernels as they are compiled for a chip, without one: how often, and side by side."""

from pathlib import Path

from tests.kernels.buffers import needs_triton
from tests.kernels.programs import run

PROGRAM = """
import torch
from bench.compile_kernels import pretend
from saccade.kernels.gemm import skinny
from saccade.kernels.jit import compile_only, compiling

compiled = pretend()
weight = torch.zeros(64, 256, dtype=torch.bfloat16)
def launch(rows):
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    skinny.skinny_triton(x, weight, tuning=skinny.SkinnyTuning())
def kernels():
    return sum(len(cache[0]) for cache in skinny.skinny_kernel.device_caches.values())
with compile_only():
    assert compiling()
    for rows in (1, 2, 15, 16, 33, 48):
        launch(rows)
print(kernels(), compiling())
compiled.clear()
for rows in (3, 16, 64):
    launch(rows)
print(kernels())
"""


LAUNCHERS = """
import torch, triton
from bench.compile_kernels import pretend
from saccade.kernels.norm_rope import elementwise
from saccade.kernels.jit import compile_only

made = []
def launcher(source, metadata):
    made.append(source.name)
    if source.signature["out"] == "*fp16":
        raise RuntimeError("no C compiler")
pretend()
triton.runtime.driver.active.launcher_cls = launcher
one, two = (torch.zeros(4, 64, dtype=kind, device="meta") for kind in (torch.bfloat16, torch.float16))
with compile_only():
    for x in (one, one, two):
        elementwise.silu_mul(x)
    elementwise.silu_mul(one[:, :30])  # another kernel of the same types
kernels = sum(len(cache[0]) for cache in elementwise._silu_mul_kernel.device_caches.values())
print(len(made), kernels)
"""
START = """
from bench.compile_start import count
passes = count("qwen3-vl-8b").values()
print(sum(ahead for ahead, _ in passes), sum(left for _, left in passes))
"""


@needs_triton
def test_batch_sizes_share_a_kernel_and_warm_up_compiles_it(tmp_path: Path) -> None:
    """Red when a kernel is compiled for every number of rows, or when launching compiles a second time."""
    assert run(PROGRAM, tmp_path) == ["2", "False", "2"]  # padded to 16 lines, and to 64


@needs_triton
def test_a_launcher_is_compiled_once_per_signature_and_may_fail(
    tmp_path: Path,
) -> None:
    """Red when launchers are left to the first launch, where they would be made one after the other."""
    assert run(LAUNCHERS, tmp_path) == ["2", "3"]


@needs_triton
def test_warm_up_leaves_no_kernel_to_compile(
    tmp_path: Path,
) -> None:
    """Red when a shape launches a kernel that `compile_kernels` and `StepGraphCache.warm_up` leave out."""
    ahead, left = run(START, tmp_path)
    assert int(ahead) > 30
    assert left == "0"
