"""A process that has settled its heap gives large blocks back at once, whatever it freed before."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from saccade.host import malloc as heap

GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
# A large block is freed, from which an unsettled heap learns to keep such blocks; then one more is followed
# by a small one that keeps it from the heap's end, and freed.
PROBE = """
import ctypes, sys
from saccade.host.malloc import MMAP_LARGE_BLOCKS, HeapTrimmer, configure_malloc
if sys.argv[1] == "settled":
    assert configure_malloc(MMAP_LARGE_BLOCKS)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
def block(size):
    made = libc.malloc(size)
    ctypes.memset(made, 1, size)
    return made
libc.free(block(24 << 20))
before = resident()
large, small = block(16 << 20), block(4096)
libc.free(large)
if sys.argv[1] == "trimmed":
    HeapTrimmer(0.0).trim()
print(resident() - before)
"""

# Two hundred shapes of functions for which oneDNN compiles a kernel each; of the product if the processor has
# the instructions for it.
SHAPES = """
import sys
import torch
from saccade.host.malloc import limit_onednn_cache
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
if sys.argv[1] == "bound":
    limit_onednn_cache()
torch.set_num_threads(1)
values, half = torch.ones(200, 256), torch.ones(256, 256, dtype=torch.bfloat16)
torch.nn.functional.gelu(values), half[:200] @ half
before = resident()
for rows in range(1, 200):
    torch.nn.functional.gelu(values[:rows]), half[:rows] @ half
print(resident() - before)
"""


def kept(how: str, probe: str = PROBE) -> int:
    """KiB still resident of what was freed."""
    ours = ("MALLOC_", "ONEDNN_", "DNNL_", "LRU_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-c", probe, how], capture_output=True, text=True, check=True, env=environment
    )
    return int(done.stdout)


@pytest.mark.skipif(not GLIBC or not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_a_freed_large_block_is_returned_to_the_system() -> None:
    assert kept("settled") < 2048
    assert kept("unsettled") > 8192  # else the settings are needless here


@pytest.mark.skipif(not GLIBC or not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_trimming_returns_free_pages_in_the_middle_of_the_heap() -> None:
    assert kept("trimmed") < 2048


@pytest.mark.skipif(not torch._C._has_mkldnn, reason="torch was built without oneDNN")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_onednn_kernel_cache_is_bounded() -> None:
    free, bound = kept("free", SHAPES), kept("bound", SHAPES)
    assert free > 20 << 10  # else the bound is needless here
    assert bound < free // 2


def test_trimming_is_due_after_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    trims: list[int] = []
    trimmer = heap.HeapTrimmer(10.0, clock=lambda: now[0])
    monkeypatch.setattr(trimmer, "_trim", trims.append)
    for now[0] in (5.0, 9.9, 10.0, 12.0, 19.9, 20.1):
        if trimmer.due:
            trimmer.trim()
    assert len(trims) == 2


def test_trimming_is_overdue_after_twelve_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    trimmer = heap.HeapTrimmer(10.0, clock=lambda: now[0])
    monkeypatch.setattr(trimmer, "_trim", lambda _: None)
    for now[0], due, overdue in (
        (9.0, False, False),
        (10.0, True, False),
        (119.0, True, False),
        (120.0, True, True),
    ):
        assert (trimmer.due, trimmer.overdue) == (due, overdue)
    trimmer.trim()
    assert not trimmer.due


def test_malloc_settings_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not heap.configure_malloc(heap.MMAP_LARGE_BLOCKS)


def test_a_kernel_cache_limit_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in heap.KEPT_KERNELS:
        monkeypatch.setenv(name, "gone")  # so that what is set here is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("DNNL_PRIMITIVE_CACHE_CAPACITY", "7")
    heap.limit_onednn_cache()
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ
    assert os.environ["LRU_CACHE_CAPACITY"] == "64"
