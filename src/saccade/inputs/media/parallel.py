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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.inputs.media.rgbx import OPAQUE, RgbxWords

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


def opaque(padded: RgbxWords) -> RgbxWords:
    """A copy of words [height, width], the fourth byte of each 255."""
    words = np.empty_like(padded)
    _by_rows(partial(np.bitwise_or, OPAQUE), padded, words)
    return words


def copied(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    """A copy of an array of bytes, its rows one after the other."""
    copy = np.empty(array.shape, np.uint8)
    _by_rows(lambda source, target: np.copyto(target, source), array, copy)
    return copy


def _by_rows(copy: Callable[[Any, Any], object], source: NDArray[Any], target: NDArray[Any]) -> None:
    """`copy` from all rows of one to those of the other, some by each core where they are granted."""
    with alone(source.nbytes) as granted:
        count = COPIERS if granted else 1
        edges = [len(source) * part // count for part in range(count + 1)]
        mine, *others = [slice(*pair) for pair in pairwise(edges)]
        jobs = [_copiers().submit(copy, source[part], target[part]) for part in others]
        copy(source[mine], target[mine])
        for job in jobs:
            job.result()


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS - 1, thread_name_prefix="copier")
