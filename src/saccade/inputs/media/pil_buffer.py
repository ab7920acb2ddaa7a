"""The memory of a PIL picture, read in place through the Arrow C data interface.

takes   a PIL image of mode RGB that has been loaded
gives   a copy of its pixels as words of four bytes (raster.py)
never   lets anybody refer to Pillow's own memory: the copy is made while that is held

Pillow's `tobytes` takes the fourth byte out, piece by piece, and keeps the interpreter meanwhile: threads
that prepare 128 pictures stood in a line, and the engine behind them. This copy lets all others go on.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int64, c_void_p
from typing import Any

import numpy as np
from PIL import Image

from saccade.inputs.media.parallel import opaque
from saccade.inputs.media.rgbx import OPAQUE, RgbxWords

_FORMAT = b"+w:4"  # lists of four, each a pixel


class _Schema(Structure):
    """The beginning of Arrow's."""

    _fields_ = (("format", c_char_p),)


class _Array(Structure):
    """The beginning of Arrow's."""


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


class _Lent:
    """Words where they lie, for numpy."""

    def __init__(self, address: int, shape: tuple[int, int], owner: Any) -> None:
        self.owner = owner  # of the memory: it may go when this goes
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": shape,
            "typestr": OPAQUE.dtype.str,
        }


def copy_rgbx(image: Image.Image) -> RgbxWords:
    """A copy of the pixels, the fourth byte of each 255."""
    lent = _lent(image)
    if lent is not None:
        padded: RgbxWords = np.asarray(lent)
    else:
        padded = np.frombuffer(image.tobytes("raw", "RGBX"), dtype=np.uint32)
    return opaque(padded.reshape(image.height, image.width))


def _lent(image: Image.Image) -> _Lent | None:
    """The image's own memory; None if it is not in one piece (from 16 MiB on), or Pillow is before 11.2."""
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
    return _Lent(values.buffers[1], (image.height, image.width), array)
