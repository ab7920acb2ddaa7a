"""Kernels as they are compiled for a chip, without one: how often, and side by side."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.places import needs_triton

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from bench.compile_kernels import pretend
from saccade.kernels import skinny
from saccade.kernels.jit import compiled_ahead, compiling

compiled = pretend()
weight = torch.zeros(64, 256, dtype=torch.bfloat16)
def launch(rows):
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    skinny.skinny_triton(x, weight, tuning=skinny.SkinnyTuning())
def kernels():
    return sum(len(cache[0]) for cache in skinny.skinny_kernel.device_caches.values())
with compiled_ahead():
    assert compiling()
    for rows in (1, 2, 15, 16, 33, 48):
        launch(rows)
print(kernels(), compiling())
compiled.clear()
for rows in (3, 16, 64):
    launch(rows)
print(kernels())
"""


@needs_triton
def test_numbers_of_rows_share_a_kernel_and_what_is_compiled_ahead_is_found_again(tmp_path: Path) -> None:
    """Red when a kernel is compiled for every number of rows, or when launching compiles a second time."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False", "2"], done.stderr[-2000:]  # padded to 16 lines, and to 64
