"""Encoded images, PIL images and arrays to uint8 RGB pixels [1, height, width, 3].

Only listed formats are decoded, sizes are checked before a raster is allocated, and only the first frame is
read.
- The EXIF orientation of encoded images is applied.
- Transparency of any kind (an alpha band, a transparent palette entry or colour) is composited over white.
- Grey, palette, CMYK and other 8-bit modes are converted as Pillow converts them.
- 16 bits per sample keep their high byte, for grey as for colour.
"""

import ctypes
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ExifTags import Base as Exif

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.image_processor import check_size
from saccade.request import Pixels

Format = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]
ALLOWED: tuple[Format, ...] = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_LISTED = ", ".join(ALLOWED[:-1]) + " or " + ALLOWED[-1]
_LOAD_LOCKS = tuple(threading.Lock() for _ in range(32))  # a PIL image uses the one its id selects
# EXIF orientation -> how to rotate the stored image upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

RgbxWords = NDArray[np.uint32]
OPAQUE = np.array(0xFF000000, dtype="<u4")  # the fourth byte, which some of Pillow's operations leave at 0

# One core of a machine with an H200 copies 4 MB in 0.7 ms and hashes them in 0.9; all sixteen hash them in
# 0.3.
CORES = os.cpu_count() or 1
PARALLEL_BYTES = 1 << 20 if CORES >= 4 else sys.maxsize
COPY_THREADS = min(4, CORES)  # more are not faster: memory bandwidth is the limit
_all_cores_lock = threading.Lock()
_process = os.getpid()  # a forked child has none of the threads, neither ours nor blake3's


@dataclass(frozen=True)
class Decoded:
    """Pixels, and what the content hash needs to know of their encoding."""

    pixels: Pixels  # [1, height, width, 3]
    format: Format
    mode: str  # Pillow's mode before conversion to RGB
    size: tuple[int, int]  # width, height as stored, before the EXIF orientation


def sniff(data: bytes) -> Format | None:
    """The format by its first bytes; None if it is not allowed."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:2] == b"BM":
        return "BMP"
    return None


def stored_size(data: bytes, limits: MediaLimits) -> tuple[int, int]:
    """Width and height in the header, checked; no pixel is decoded."""
    found = _format(data, limits)
    with _refusing(found):
        if found == "WEBP":  # Pillow allocates the canvas as it opens one
            size = _webp_size(data)
        else:
            with Image.open(io.BytesIO(data), formats=[found]) as image:
                size = image.size
        check_area(size, limits)
        return size


def decode(data: bytes, limits: MediaLimits) -> Decoded:
    """One encoded image; of an animation, the first frame."""
    found = _format(data, limits)
    if found == "WEBP":
        stored_size(data, limits)
    with _refusing(found), Image.open(io.BytesIO(data), formats=[found]) as image:
        check_area(image.size, limits)
        mode, size = image.mode, image.size
        image.load()
        rotation = _UPRIGHT.get(image.getexif().get(Exif.Orientation, 1))
        pixels = to_rgb(image if rotation is None else image.transpose(rotation))
    return Decoded(pixels, found, mode, size)


def _format(data: bytes, limits: MediaLimits) -> Format:
    if not data:
        raise MediaRefused("The image is empty.")
    if len(data) > limits.max_bytes:
        raise MediaRefused(f"The image has {len(data)} bytes; at most {limits.max_bytes} are allowed.")
    found = sniff(data)
    if found is None:
        raise MediaRefused(f"The image is of no known format; send {_LISTED}.")
    return found


@contextmanager
def _refusing(found: Format) -> Iterator[None]:
    """Turns everything Pillow may raise into a MediaRefused."""
    try:
        yield
    except MediaRefused:
        raise
    except Image.DecompressionBombError as error:
        raise MediaRefused("The image has more pixels than are ever decoded. Send a smaller one.") from error
    except Exception as error:  # Pillow raises nearly anything on hostile bytes
        raise MediaRefused(f"The {found} image is damaged or incomplete.") from error


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in the header of the first chunk, in each of its three formats."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise MediaRefused("The WEBP image is damaged or incomplete.")
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF


def check_area(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    check_size(width, height)
    if width * height > limits.max_pixels:
        raise MediaRefused(
            f"The image is {width}x{height}, {width * height} pixels; at most {limits.max_pixels} are"
            " allowed. Send a smaller one."
        )


def from_image(image: Image.Image, limits: MediaLimits) -> Pixels:
    """A PIL image as it is: an EXIF orientation is not applied."""
    check_area(image.size, limits)
    try:
        # A lazily opened image reads its file here, which only one thread may do.
        with _LOAD_LOCKS[id(image) % len(_LOAD_LOCKS)]:
            image.load()
        return to_rgb(image)
    except MediaRefused:
        raise
    except Exception as error:  # a lazily opened file may be anything
        raise MediaRefused("The PIL image cannot be read.") from error


def from_array(array: NDArray[np.generic], limits: MediaLimits) -> Pixels:
    """An array [height, width], [height, width, 1], [.., 3] or [.., 4] of uint8."""
    array_size(array, limits)
    if array.ndim == 3 and array.shape[2] == 3:
        pixels = copy_array(array)[None]
        pixels.flags.writeable = False
        return pixels
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return to_rgb(Image.fromarray(np.ascontiguousarray(array)))


def array_size(array: NDArray[np.generic], limits: MediaLimits) -> tuple[int, int]:
    """Width and height of an image given as an array, checked."""
    if array.dtype != np.uint8:
        raise MediaRefused(f"The image is an array of {array.dtype}; give uint8, 0 to 255.")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        shape = "x".join(map(str, array.shape))
        raise MediaRefused(f"The image is an array of shape {shape}; give height x width x 3, 4 or 1.")
    size = (array.shape[1], array.shape[0])
    check_area(size, limits)
    return size


def to_rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I;16"):
        return _from_sixteen_bits(image)
    if image.mode in ("I", "F"):
        raise MediaRefused(
            f"The image has the mode {image.mode}, whose range is not known; convert it to L or RGB."
        )
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return rgb_of_words(copy_rgbx(image if image.mode == "RGB" else image.convert("RGB")))


def _from_sixteen_bits(image: Image.Image) -> Pixels:
    """The high byte, three times; a transparent grey value becomes white."""
    samples = np.asarray(image).astype(np.uint16)
    grey = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 255
    return np.repeat(grey[None, :, :, None], 3, axis=3)


# --- RGBX buffers -------------------------------------------------------------------------------------------
#
# Words of 4 bytes per pixel whose last byte is 255, as Pillow keeps them in memory. A decoded image is copied
# once into words (0.1 ms for 1024 x 1024), hashed and sent to the engine core in that form. Pillow's
# `tobytes` instead drops the fourth byte, which takes nine times as long and holds the GIL for 4.6 ms.


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

_ARROW_FORMAT = b"+w:4"  # lists of four bytes, each list a pixel


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


@dataclass(frozen=True)
class _Borrowed:
    """Words in Pillow's memory, for numpy."""

    __array_interface__: dict[str, object]
    owner: object  # keeps the memory alive


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
    if _Schema.from_address(_pointer(schema, b"arrow_schema")).format != _ARROW_FORMAT:
        return None
    pixels = _Array.from_address(_pointer(array, b"arrow_array"))
    count = image.width * image.height
    if (pixels.length, pixels.offset, pixels.n_children) != (count, 0, 1):
        return None
    values = pixels.children[0].contents
    if (values.length, values.offset, values.n_buffers) != (4 * count, 0, 2) or not values.buffers[1]:
        return None
    shape, data = (image.height, image.width), (values.buffers[1], True)
    return _Borrowed({"version": 3, "data": data, "shape": shape, "typestr": OPAQUE.dtype.str}, array)
