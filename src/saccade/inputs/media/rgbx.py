"""RGB pixels of which each is a word of four bytes, the last of them 255, as Pillow has them in memory.

takes   such words
gives   the pixels in them, without a copy: [1, height, width, 3] like all others; and back
never   takes an array for one of these that was not made here

A picture that Pillow has decoded is copied into words (0.1 ms for 1024 x 1024), hashed so where it came as an
image, and goes to the engine so. To take the fourth byte out is nine times the work (Pillow's own way keeps
the interpreter for 4.6 ms meanwhile), and of a picture that is known nobody looks at pixels at all.
"""

import numpy as np
from numpy.typing import NDArray

from saccade.request import Pixels

RgbxWords = NDArray[np.uint32]
OPAQUE = np.array(0xFF000000, dtype="<u4")  # the fourth byte, which some of Pillow's operations leave at 0


def rgb_of_words(words: RgbxWords) -> Pixels:
    """The pixels of words [height, width], which are the caller's alone: nobody may write them any more."""
    words.flags.writeable = False
    return words.view(np.uint8).reshape(1, *words.shape, 4)[..., :3]


def words_of_rgb(pixels: Pixels) -> RgbxWords | None:
    """What pixels are shown of; None if they are an array of their own."""
    base = pixels.base
    if not isinstance(base, np.ndarray) or base.dtype != OPAQUE.dtype:
        return None
    whole = pixels.shape == (1, *base.shape, 3) and pixels.ctypes.data == base.ctypes.data
    return base if whole else None


def contiguous(pixels: Pixels) -> Pixels:
    """The same pixels with nothing between them."""
    if pixels.flags.c_contiguous:
        return pixels
    out = np.empty(pixels.shape, dtype=np.uint8)
    for band in range(pixels.shape[-1]):  # numpy copies three bytes at a time five times slower
        out[..., band] = pixels[..., band]
    return out
