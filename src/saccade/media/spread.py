"""All cores for one picture, where somebody waits for it alone.

takes   how many bytes there are to go over
gives   whether several cores may, to one at a time; a copy by several, which also tells what they copied
owns    the threads that copy
never   waits: of many pictures, threads prepare one each, and more threads would be in each other's way

One core copies 4 MB that it has not touched lately in 0.7 ms on a machine with an H200 and hashes them in
0.9; four copied them in 0.6, then sixteen hashed them in 0.5. So a core that copies a piece hashes it as
well, while it has it.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import chain

import numpy as np

from saccade.raster import OPAQUE, Words

CORES = os.cpu_count() or 1
LEAST_BYTES = 1 << 20 if CORES >= 4 else sys.maxsize
COPIERS = min(8, CORES)
PIECE = 1 << 18  # bytes at most, or one row of a picture
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


Told = Callable[[Words], bytes]


def opaque(padded: Words, tell: Told | None = None) -> tuple[Words, list[bytes]]:
    """A copy of words [height, width], the fourth byte of each 255; and what there is to tell of its pieces,
    in their order: they are the same for every picture of this shape."""
    words = np.empty_like(padded)
    rows = max(1, PIECE // max(padded[0].nbytes, 1))
    pieces = [slice(top, top + rows) for top in range(0, len(padded), rows)]

    def copy(some: list[slice]) -> list[bytes]:
        told = []
        for piece in some:
            np.bitwise_or(padded[piece], OPAQUE, words[piece])
            if tell is not None:
                told.append(tell(words[piece]))
        return told

    with alone(padded.nbytes) as granted:
        if not granted:
            return words, copy(pieces)
        share = -(-len(pieces) // COPIERS)
        mine, *others = [pieces[first : first + share] for first in range(0, len(pieces), share)]
        jobs = [_copiers().submit(copy, some) for some in others]
        told = copy(mine)
        return words, [*told, *chain.from_iterable([job.result() for job in jobs])]


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS - 1, thread_name_prefix="copier")
