"""All cores for one picture, where somebody waits for it alone.

takes   how many bytes there are to go over
gives   whether several cores may, to one at a time; a copy by several
owns    the threads that copy
never   waits: of many pictures, threads prepare one each, and more threads would be in each other's way

One core copies 4 MB that it has not touched lately in 0.7 ms on a machine with an H200 and hashes them in
0.9; all of its sixteen hash them in 0.3.
"""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import numpy as np

from saccade.raster import OPAQUE, Words

CORES = os.cpu_count() or 1
LEAST_BYTES = 1 << 20 if CORES >= 4 else sys.maxsize
COPIERS = min(4, CORES)  # more gain nothing: memory is as fast as it is
_spreading = threading.Lock()
_process = os.getpid()  # a child that is forked off has none of the threads, ours or those of the hash


@contextmanager
def alone(size: int) -> Iterator[bool]:
    """Within: whether all cores may go over so many bytes."""
    ours = size >= LEAST_BYTES and os.getpid() == _process
    granted = ours and _spreading.acquire(blocking=False)
    try:
        yield granted
    finally:
        if granted:
            _spreading.release()


def opaque(padded: Words) -> Words:
    """A copy of words [height, width], the fourth byte of each 255."""
    with alone(padded.nbytes) as granted:
        if not granted:
            copied: Words = padded | OPAQUE
            return copied
        words = np.empty_like(padded)
        edges = [len(padded) * part // COPIERS for part in range(COPIERS + 1)]
        parts = [slice(*pair) for pair in pairwise(edges)]
        jobs = [_copiers().submit(np.bitwise_or, padded[part], OPAQUE, words[part]) for part in parts[1:]]
        np.bitwise_or(padded[parts[0]], OPAQUE, words[parts[0]])
        for job in jobs:
            job.result()
    return words


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS - 1, thread_name_prefix="copier")
