"""How the C library's heap treats blocks of memory, so that a process gives back what it does not use.

takes   which process it is
gives   whether the heap could be told
never   overrides what the user has set (MALLOC_ARENA_MAX and its like)

Left to itself glibc gives every few threads a heap of their own, and learns from the first large block that
is freed (pixels, bodies, activations: up to 32 MiB) to keep blocks of that size inside. Blocks of all sizes
from all threads then leave holes: after six minutes of mixed traffic 86 of the 107 MiB of a front's heap were
free and could not be given back. What an engine keeps lies apart from it (apart.py).
"""

import ctypes
import os
import time
from collections.abc import Callable, Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h

# Many threads, large blocks that live shortly: each becomes a mapping that ends when it is freed. For a
# front, and for an engine whose activations are on a GPU.
MMAP_LARGE_BLOCKS = {
    _ARENA_MAX: 2,  # heaps; more would spare threads waiting that mostly wait for the interpreter anyway
    _MMAP_THRESHOLD: 128 << 10,  # bytes; a mapping costs a fault per page, which smaller blocks would feel
    _TRIM_THRESHOLD: 1 << 20,  # bytes free at a heap's end before they are given back
}
# An engine on a CPU: its activations are better kept than mapped anew. Of a picture of 896 x 896, mapping
# blocks from 1 MiB on took 25% more time, from 4 MiB on 5%. What is free in the one heap for all threads is
# given back now and then, by `HeapTrimmer`: between two times a busy engine holds some 110 MiB that way.
KEEP_LARGE_BLOCKS = {_ARENA_MAX: 1, _MMAP_THRESHOLD: 4 << 20, _TRIM_THRESHOLD: 8 << 20}
TRIM_SECONDS = 10.0  # trimming takes some 20 ms, touching 200 MiB again 90: 1% at most
# Of those, after which it is overdue: whoever allocates meanwhile waits for its end. A front's event loop did
# for 22 to 77 ms with 180 MiB, and beside an H200 for 130: every stream stood still.
OVERDUE = 12
# Kernels that oneDNN, and torch's layer over it, keep compiled on a CPU, each for one shape. By themselves
# they keep 1,024 each, and every size of picture brings one more (an exact gelu of so many tokens) of 0.2 to
# 0.5 MiB; in bfloat16 every product does. Compiling one takes 0.2 ms, a product's up to 1: of those, as many
# are kept as a dozen sizes of steps need.
KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 16, "LRU_CACHE_CAPACITY": 64}
_SET_BY_USER = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def configure_malloc(settings: Mapping[int, int]) -> bool:
    """Call it once, before threads begin. False where the C library is another one or the user has chosen."""
    if any(name in os.environ for name in _SET_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(setting, value) == 1 for setting, value in settings.items()]
    return all(taken)


def limit_onednn_cache() -> None:
    """Call it before anything is computed on a CPU: the first kernel reads it."""
    for name, most in KEPT_KERNELS.items():
        if name not in os.environ and name.replace("ONEDNN", "DNNL") not in os.environ:  # its older name
            os.environ[name] = str(most)


class HeapTrimmer:
    """Gives back the pages of a heap that are free, wherever in it they are; due every `seconds`."""

    def __init__(self, seconds: float = TRIM_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.used = False  # since it was trimmed last; told by the owner
        self._clock = clock
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._last = clock()

    @property
    def due(self) -> bool:
        return self._trim is not None and self._clock() - self._last >= self.seconds

    @property
    def overdue(self) -> bool:
        """Due even for who is busy."""
        return self._trim is not None and self._clock() - self._last >= OVERDUE * self.seconds

    def trim(self) -> None:
        """Now. Other threads go on, but for those that want memory."""
        self._last = self._clock()
        self.used = False
        if self._trim is not None:
            self._trim(0)
