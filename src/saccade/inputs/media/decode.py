"""Encoded pictures to RGB pixels, refusing what may harm.

takes   bytes of anybody, PIL images and arrays of the library's user
gives   uint8 [1, height, width, 3]
never   decodes a format that is not listed; allocates a raster before its size was checked; reads a second
        frame; lets an exception of Pillow out

How pixels become RGB (the rule of the reference processor, plus two it leaves open):
- the EXIF orientation of encoded pictures is applied;
- transparency of any kind (an alpha band, a transparent palette entry or colour) is laid over white;
- grey, palette, CMYK and other 8-bit modes are converted as Pillow converts them;
- 16 bits per sample keep their high byte, for grey as for colour.
"""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ExifTags import Base as Exif

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.image_processor import check_size
from saccade.inputs.media.parallel import copied
from saccade.inputs.media.pil_buffer import copy_rgbx
from saccade.inputs.media.rgbx import rgb_of_words
from saccade.request import Pixels

Format = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP"]
ALLOWED: tuple[Format, ...] = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_LISTED = ", ".join(ALLOWED[:-1]) + " or " + ALLOWED[-1]
_READING = tuple(threading.Lock() for _ in range(32))  # of one PIL image, whichever its address picks
# EXIF orientation -> how to turn the stored picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Decoded:
    """Pixels, and what the hash needs to know of how they were written."""

    pixels: Pixels  # [1, height, width, 3]
    format: Format
    mode: str  # Pillow's mode before normalising
    size: tuple[int, int]  # width, height as stored, before the EXIF orientation


def sniff(data: bytes) -> Format | None:
    """The format by its first bytes; None when it is not one of the allowed."""
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
    """Width and height an encoded picture's header gives it, checked; no pixel is decoded."""
    found = _format(data, limits)
    if found == "WEBP":
        with _refusing(found):
            size = _webp_size(data)
            check_area(size, limits)
            return size
    with _refusing(found), Image.open(io.BytesIO(data), formats=[found]) as image:
        check_area(image.size, limits)
        return image.size


def decode(data: bytes, limits: MediaLimits) -> Decoded:
    """One encoded picture; of an animation, its first frame."""
    found = _format(data, limits)
    if found == "WEBP":
        stored_size(data, limits)  # Pillow prepares the canvas as it opens one
    with _refusing(found), Image.open(io.BytesIO(data), formats=[found]) as image:
        check_area(image.size, limits)
        mode, size = image.mode, image.size
        image.load()
        pixels = _pixels(_upright(image))
    return Decoded(pixels, found, mode, size)


def _format(data: bytes, limits: MediaLimits) -> Format:
    if not data:
        raise MediaRefused("The picture is empty.")
    if len(data) > limits.max_bytes:
        raise MediaRefused(f"The picture has {len(data)} bytes; at most {limits.max_bytes} are allowed.")
    found = sniff(data)
    if found is None:
        raise MediaRefused(f"The picture is of no known format; send {_LISTED}.")
    return found


@contextmanager
def _refusing(found: Format) -> Iterator[None]:
    """Everything Pillow may raise, as a refusal."""
    try:
        yield
    except MediaRefused:
        raise
    except Image.DecompressionBombError as error:
        raise MediaRefused(
            "The picture has more pixels than are ever decoded. Send a smaller one."
        ) from error
    except Exception as error:  # Pillow raises nearly anything on hostile bytes
        raise MediaRefused(f"The {found} picture is damaged or incomplete.") from error


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in the header of the first chunk, in each of the three ways it may be written."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise MediaRefused("The WEBP picture is damaged or incomplete.")
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF


def _upright(image: Image.Image) -> Image.Image:
    turn = _UPRIGHT.get(image.getexif().get(Exif.Orientation, 1))
    return image if turn is None else image.transpose(turn)


def check_area(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    check_size(width, height)
    if width * height > limits.max_pixels:
        raise MediaRefused(
            f"The picture is {width}x{height}, {width * height} pixels; at most {limits.max_pixels} are"
            " allowed. Send a smaller one."
        )


def from_image(image: Image.Image, limits: MediaLimits) -> Pixels:
    """A PIL image, as it is: its EXIF orientation, if any, is the caller's business."""
    check_area(image.size, limits)
    try:
        # Opening reads only the header; the first to need pixels reads the file, and only one may.
        with _READING[id(image) % len(_READING)]:
            image.load()
        return _pixels(image)
    except MediaRefused:
        raise
    except Exception as error:  # a lazily opened file may be anything
        raise MediaRefused("The PIL image cannot be read.") from error


def from_array(array: NDArray[np.generic], limits: MediaLimits) -> Pixels:
    """An array [height, width], [height, width, 1], [.., 3] or [.., 4] of uint8."""
    array_size(array, limits)
    if array.ndim == 3 and array.shape[2] == 3:
        pixels = copied(array)[None]
        pixels.flags.writeable = False
        return pixels
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return normalise(Image.fromarray(np.ascontiguousarray(array)))


def array_size(array: NDArray[np.generic], limits: MediaLimits) -> tuple[int, int]:
    """Width and height of a picture given as an array, checked."""
    if array.dtype != np.uint8:
        raise MediaRefused(f"The picture is an array of {array.dtype}; give uint8, 0 to 255.")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        shape = "x".join(map(str, array.shape))
        raise MediaRefused(f"The picture is an array of shape {shape}; give height x width x 3, 4 or 1.")
    size = (array.shape[1], array.shape[0])
    check_area(size, limits)
    return size


def normalise(image: Image.Image) -> Pixels:
    """RGB pixels [1, height, width, 3] by the rule above."""
    if _sixteen_bits(image):
        return _from_sixteen_bits(image)
    # Read-only, over the bytes Pillow hands out: nobody writes into a picture, and a copy is a millisecond.
    return np.asarray(_rgb(image), dtype=np.uint8)[None]


def _pixels(image: Image.Image) -> Pixels:
    """The same, as words where they are Pillow's (raster.py): other threads go on while they are copied."""
    return normalise(image) if _sixteen_bits(image) else rgb_of_words(copy_rgbx(_rgb(image)))


def _sixteen_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I;16")


def _rgb(image: Image.Image) -> Image.Image:
    """Of mode RGB, by the rule above for all but 16 bits."""
    if image.mode in ("I", "F"):
        raise MediaRefused(
            f"The picture has the mode {image.mode}, whose range is not known; convert it to L or RGB."
        )
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_sixteen_bits(image: Image.Image) -> Pixels:
    """Grey of 16 bits: the high byte, three times; a transparent grey value becomes white."""
    samples = np.asarray(image).astype(np.uint16)
    grey = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 255
    return np.repeat(grey[None, :, :, None], 3, axis=3)
