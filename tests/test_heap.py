"""A process that has settled its heap gives large blocks back at once, whatever it freed before."""

import ctypes
import os
import subprocess
import sys

import pytest

from saccade import heap

GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
# A large block is freed, from which an unsettled heap learns to keep such blocks; then one more is followed
# by a small one that keeps it from the heap's end, and freed.
PROBE = """
import ctypes, sys
from saccade.heap import MAPPING, Trimmer, settle_heap
if sys.argv[1] == "settled":
    assert settle_heap(MAPPING)
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
    Trimmer(0.0).trim()
print(resident() - before)
"""


def kept(how: str) -> int:
    """KiB still resident of the block that was freed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, how], capture_output=True, text=True, check=True, env=environment
    )
    return int(done.stdout)


@pytest.mark.skipif(not GLIBC or not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_a_large_block_that_is_freed_is_given_back() -> None:
    assert kept("settled") < 2048
    assert kept("unsettled") > 8192  # else the settings are needless here


@pytest.mark.skipif(not GLIBC or not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_a_trimmer_gives_back_what_lies_in_the_middle_of_a_heap() -> None:
    assert kept("trimmed") < 2048


def test_a_trimmer_waits_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    trims: list[int] = []
    trimmer = heap.Trimmer(10.0, clock=lambda: now[0])
    monkeypatch.setattr(trimmer, "_trim", trims.append)
    for now[0] in (5.0, 9.9, 10.0, 12.0, 19.9, 20.1):
        if trimmer.due:
            trimmer.trim()
    assert len(trims) == 2


def test_what_the_user_has_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not heap.settle_heap(heap.MAPPING)
