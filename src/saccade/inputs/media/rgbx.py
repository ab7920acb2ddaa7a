"""RGBX pixel buffers: RGB pixels as 4-byte words whose last byte is 255, as Pillow keeps them in memory.

A decoded image is copied once into words (0.1 ms for 1024 x 1024), hashed and sent to the engine core in that
form. Pillow's `tobytes` instead drops the fourth byte, which takes nine times as long and holds the GIL for
4.6 ms.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_char_p, c_int64, c_void_p
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.request import Pixels

RgbxWords = NDArray[np.uint32]
OPAQUE = np.array(0xFF000000, dtype="<u4")  # the fourth byte, which some of Pillow's operations leave at 0

# One core of a machine with an H200 copies 4 MB in 0.7 ms and hashes them in 0.9; all sixteen hash them in
# 0.3.
CORES = os.cpu_count() or 1
PARALLEL_BYTES = 1 << 20 if CORES >= 4 else sys.maxsize
COPY_THREADS = min(4, CORES)  # more are not faster: memory bandwidth is the limit
_all_cores_lock = threading.Lock()
_process = os.getpid()  # a forked child has none of the threads, neither ours nor blake3's


def rgb_of_words(words: RgbxWords) -> Pixels:
    """A read-only view [1, height, width, 3] of words [height, width], which the caller must own."""
    words.flags.writeable = False
    return words.view(np.uint8).reshape(1, *words.shape, 4)[..., :3]


def words_of_rgb(pixels: Pixels) -> RgbxWords | None:
    """The words that `rgb_of_words` made `pixels` of; None for any other array."""
    base = pixels.base
    if not isinstance(base, np.ndarray) or base.dtype != OPAQUE.dtype:
        return None
    whole = pixels.shape == (1, *base.shape, 3) and pixels.ctypes.data == base.ctypes.data
    return base if whole else None


def contiguous(pixels: Pixels) -> Pixels:
    """The same pixels as a C-contiguous array."""
    if pixels.flags.c_contiguous:
        return pixels
    out = np.empty(pixels.shape, dtype=np.uint8)
    for band in range(pixels.shape[-1]):  # numpy copies three bytes at a time five times slower
        out[..., band] = pixels[..., band]
    return out


# --- copies by several cores --------------------------------------------------------------------------------


@contextmanager
def all_cores(size: int) -> Iterator[bool]:
    """Whether this thread may use all cores for `size` bytes: one thread at a time may; none waits."""
    parallel = size >= PARALLEL_BYTES and os.getpid() == _process
    granted = parallel and _all_cores_lock.acquire(blocking=False)
    try:
        yield granted
    finally:
        if granted:
            _all_cores_lock.release()


def copy_array(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    """A C-contiguous copy of an array of bytes."""
    copy = np.empty(array.shape, np.uint8)
    _copy_rows(lambda source, target: np.copyto(target, source), array, copy)
    return copy


def _copy_rows(copy: Callable[[Any, Any], object], source: NDArray[Any], target: NDArray[Any]) -> None:
    with all_cores(source.nbytes) as granted:
        count = COPY_THREADS if granted else 1
        edges = [len(source) * part // count for part in range(count + 1)]
        first, *others = [slice(*pair) for pair in pairwise(edges)]
        jobs = [_copy_pool().submit(copy, source[part], target[part]) for part in others]
        copy(source[first], target[first])
        for job in jobs:
            job.result()


@cache
def _copy_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPY_THREADS - 1, thread_name_prefix="copier")


# --- Pillow's memory, through the Arrow C data interface ----------------------------------------------------

_FORMAT = b"+w:4"  # lists of four bytes, each list a pixel


class _Schema(Structure):
    """The first field of ArrowSchema."""

    _fields_ = (("format", c_char_p),)


class _Array(Structure):
    """The first fields of ArrowArray."""


_Array._fields_ = (
    ("length", c_int64),
    ("null_count", c_int64),
    ("offset", c_int64),
    ("n_buffers", c_int64),
    ("n_children", c_int64),
    ("buffers", POINTER(c_void_p)),
    ("children", POINTER(POINTER(_Array))),
)

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, c_char_p), c_void_p


class _Borrowed:
    """Words in Pillow's memory, for numpy."""

    def __init__(self, address: int, shape: tuple[int, int], owner: Any) -> None:
        self.owner = owner  # keeps the memory alive
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": shape,
            "typestr": OPAQUE.dtype.str,
        }


def copy_rgbx(image: Image.Image) -> RgbxWords:
    """A copy of the pixels of a loaded image of mode RGB. It does not hold the GIL."""
    borrowed = _borrow(image)
    if borrowed is not None:
        padded: RgbxWords = np.asarray(borrowed)
    else:
        padded = np.frombuffer(image.tobytes("raw", "RGBX"), dtype=np.uint32)
    padded = padded.reshape(image.height, image.width)
    words = np.empty_like(padded)
    _copy_rows(partial(np.bitwise_or, OPAQUE), padded, words)
    return words


def _borrow(image: Image.Image) -> _Borrowed | None:
    """The image's own memory; None if it is not contiguous (from 16 MiB on) or Pillow is older than 11.2."""
    try:
        schema, array = image.__arrow_c_array__()
    except (AttributeError, ValueError):
        return None
    if _Schema.from_address(_pointer(schema, b"arrow_schema")).format != _FORMAT:
        return None
    pixels = _Array.from_address(_pointer(array, b"arrow_array"))
    count = image.width * image.height
    if (pixels.length, pixels.offset, pixels.n_children) != (count, 0, 1):
        return None
    values = pixels.children[0].contents
    if (values.length, values.offset, values.n_buffers) != (4 * count, 0, 2) or not values.buffers[1]:
        return None
    return _Borrowed(values.buffers[1], (image.height, image.width), array)
