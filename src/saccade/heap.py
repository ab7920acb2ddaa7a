"""How the C library's heap treats large blocks: a process gives back what it does not use.

takes   nothing
gives   whether the heap could be told
never   overrides what the user has set (MALLOC_ARENA_MAX and its like)

Left to itself glibc learns from the first large block that is freed (pixels, bodies, activations: up to
32 MiB) to keep blocks of that size in its heaps, of which every thread may have one. Blocks of all sizes from
all threads then leave holes: after minutes of mixed traffic most of a front's heap was free memory it could
not give back (bench/RESULTS.md). With a fixed threshold a large block is a mapping of its own, which ends
when the block is freed.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h
SETTINGS = {
    _ARENA_MAX: 2,  # heaps; more would spare threads waiting that mostly wait for the interpreter anyway
    _MMAP_THRESHOLD: 1 << 20,  # bytes; a mapping costs a fault per page, which smaller blocks would feel
    _TRIM_THRESHOLD: 8 << 20,  # bytes free at a heap's end before they are given back
}
_SET_BY_USER = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def settle_heap() -> bool:
    """Call it once, before threads begin. False where the C library is another one or the user has chosen."""
    if any(name in os.environ for name in _SET_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(setting, value) == 1 for setting, value in SETTINGS.items()]
    return all(taken)
