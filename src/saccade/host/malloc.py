"""glibc malloc settings, so that a process returns memory it does not use. The user's settings win.

By default glibc gives every few threads their own heap, and once a large block is freed (pixels, bodies,
activations: up to 32 MiB) it keeps blocks of that size in the heap, which fragments: after six minutes of
mixed traffic, 86 of 107 MiB of an API server's heap were free but could not be returned.
"""

import ctypes
import os
import time
from collections.abc import Callable, Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h

# For the API server and for an engine core whose activations are on a GPU: large blocks are short-lived, so
# each becomes a mapping that ends when it is freed.
MMAP_LARGE_BLOCKS = {
    _ARENA_MAX: 2,  # heaps; the threads mostly wait for the GIL anyway
    _MMAP_THRESHOLD: 128 << 10,  # bytes; a mapping costs a page fault per page
    _TRIM_THRESHOLD: 1 << 20,  # bytes free at the end of a heap before they are returned
}
# For an engine core on a CPU, where activations are better kept: for an image of 896 x 896, mapping blocks
# from 1 MiB on took 25% more time, from 4 MiB on 5%. `HeapTrimmer` returns what is free from time to time;
# between two times a busy engine core holds about 110 MiB.
KEEP_LARGE_BLOCKS = {_ARENA_MAX: 1, _MMAP_THRESHOLD: 4 << 20, _TRIM_THRESHOLD: 8 << 20}
TRIM_SECONDS = 10.0  # trimming takes about 20 ms, touching 200 MiB again 90: at most 1%
# Trim intervals after which a busy process trims too. Threads that allocate wait meanwhile: an API server's
# event loop waited 22 to 77 ms with 180 MiB, and 130 beside an H200.
OVERDUE = 12
# Compiled kernels that oneDNN, and torch's layer over it, cache on a CPU, each for one shape. The default is
# 1,024 each, and every image size adds one of 0.2 to 0.5 MiB (an exact gelu of so many tokens); in bfloat16
# every product does. Compiling one takes 0.2 ms, a product's up to 1: of those, as many are kept as a dozen
# step sizes need.
KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 16, "LRU_CACHE_CAPACITY": 64}
_SET_BY_USER = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def configure_malloc(settings: Mapping[int, int]) -> bool:
    """Call it once, before threads start. False if the C library is not glibc or the user has set malloc."""
    if any(name in os.environ for name in _SET_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [mallopt(setting, value) == 1 for setting, value in settings.items()]
    return all(accepted)


def limit_onednn_cache() -> None:
    """Call it before anything is computed on a CPU: the first kernel reads the environment."""
    for name, most in KEPT_KERNELS.items():
        if name not in os.environ and name.replace("ONEDNN", "DNNL") not in os.environ:  # its older name
            os.environ[name] = str(most)


class HeapTrimmer:
    """Returns free pages anywhere in the heap to the system, every `seconds`."""

    def __init__(self, seconds: float = TRIM_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.used = False  # since the last trim; set by the owner
        self._clock = clock
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._last = clock()

    @property
    def due(self) -> bool:
        return self._trim is not None and self._clock() - self._last >= self.seconds

    @property
    def overdue(self) -> bool:
        """Due even in a busy process."""
        return self._trim is not None and self._clock() - self._last >= OVERDUE * self.seconds

    def trim(self) -> None:
        """Trims now. Other threads run unless they allocate."""
        self._last = self._clock()
        self.used = False
        if self._trim is not None:
            self._trim(0)
