"""One image or video, in whatever form the caller gave it, to pixels and a content hash.

Callers that are not trusted (HTTP) may only give URLs; the library also takes paths, bytes, PIL images,
arrays and lists of frames.
"""

import base64
import binascii
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.image_processor import VideoProcessor
from saccade.inputs.media import decode, fetch, video
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.media.fetch import MediaKind
from saccade.inputs.media.video import SampledFrames
from saccade.request import NO_PIXELS, Pixels

_URL_SCHEMES = ("data:", "http:", "https:", "file:")
_DATA_URI = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)((?:;[^;,]*)*),", re.IGNORECASE)
_BASE64_SLICE = 1 << 16  # characters decoded at once, a multiple of 4; decoding holds the GIL
_MIME = {
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/png": "PNG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/x-ms-bmp": "BMP",
    "video/mp4": "mp4",
    "video/quicktime": "mp4",
    "video/x-m4v": "mp4",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
}
_HASH_CONTEXT = "saccade 2026 media content hash, keyed per tenant"

Admit = Callable[[int, int, int], None]  # count, width and height of frames; raises if they do not fit


class LoadedImage(NamedTuple):
    pixels: Pixels  # [1, height, width, 3]
    digest: bytes  # `media_hash`


@dataclass(frozen=True)
class OpenedImage:
    """An image whose size is known and of which nothing is decoded."""

    size: tuple[int, int]  # width, height as stored; an EXIF orientation may still swap them
    decode: Callable[[], LoadedImage]
    without_pixels: bool = False  # the client sent only its name

    @property
    def pixels(self) -> int:
        """How many will be decoded."""
        return 0 if self.without_pixels else self.size[0] * self.size[1]


class SharedImage:
    """An image that several prompts of one library call contain: it is decoded and hashed once.

    Only for the time of that call, since the caller may change the object afterwards.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self._lock = threading.Lock()
        self._loaded: LoadedImage | None = None

    def open(self, limits: MediaLimits) -> OpenedImage:
        opened = open_image(self.given, limits, trusted=True)
        return OpenedImage(opened.size, lambda: self._decode_once(opened))

    def _decode_once(self, opened: OpenedImage) -> LoadedImage:
        with self._lock:
            if self._loaded is None:
                self._loaded = opened.decode()
            return self._loaded


def open_image(
    source: Any, limits: MediaLimits, *, trusted: bool = False, cancel: CancelToken | None = None
) -> OpenedImage:
    """Fetches an image, reads its size and checks it."""
    if trusted and isinstance(source, SharedImage):
        return source.open(limits)
    if trusted and isinstance(source, Image.Image):
        decode.check_area(source.size, limits)
        return OpenedImage(source.size, lambda: _from_image(source, limits))
    if trusted and isinstance(source, np.ndarray):
        return OpenedImage(decode.array_size(source, limits), lambda: _from_array(source, limits))
    data = _bytes(source, limits, "image", trusted, cancel)
    return OpenedImage(decode.stored_size(data, limits), lambda: _from_bytes(data, limits))


def open_named_image(digest: bytes, width: int, height: int) -> OpenedImage:
    """An image of which only the name was sent."""
    return OpenedImage((width, height), lambda: LoadedImage(NO_PIXELS, digest), without_pixels=True)


def _from_image(image: Image.Image, limits: MediaLimits) -> LoadedImage:
    pixels = decode.from_image(image, limits)
    words = decode.words_of_rgb(pixels)
    data = pixels if words is None else words
    kind = "pil" if words is None else "pil words"
    return LoadedImage(pixels, media_hash(kind, image.mode, image.size, _flat(data)))


def _from_array(array: NDArray[np.generic], limits: MediaLimits) -> LoadedImage:
    pixels = decode.from_array(array, limits)
    # With three bands `pixels` is a copy of the array, which the caller cannot change meanwhile.
    data = pixels if array.shape == pixels.shape[1:] else np.ascontiguousarray(array)
    return LoadedImage(pixels, media_hash("array", str(array.dtype), array.shape, _flat(data)))


def _flat(array: NDArray[np.generic]) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _from_bytes(data: bytes, limits: MediaLimits) -> LoadedImage:
    found = decode.decode(data, limits)
    return LoadedImage(found.pixels, media_hash(found.format, found.mode, found.size, data))


def load_video(
    source: Any,
    processor: VideoProcessor,
    limits: MediaLimits,
    *,
    trusted: bool = False,
    cancel: CancelToken | None = None,
    admit: Admit | None = None,
) -> tuple[SampledFrames, bytes]:
    """Sampled frames and the `media_hash` of a video.

    The library may give frames: an array, a list, or a mapping with `fps`.
    """
    frames, fps = _given_frames(source) if trusted else (None, None)
    if frames is not None:
        sampled = video.from_frames(frames, fps, processor, limits, admit)
        return sampled, media_hash("frames", str(fps), sampled.frames.shape, sampled.frames.tobytes())
    data = _bytes(source, limits, "video", trusted, cancel)
    sampled = video.decode_video(data, processor, limits, cancel, admit)
    return sampled, media_hash("video", "RGB", sampled.frames.shape, data)


def _given_frames(source: Any) -> tuple[Any, float | None]:
    if isinstance(source, Mapping):
        if "frames" not in source or not set(source) <= {"frames", "fps"}:
            raise MediaRefused("A video given as a mapping has `frames` and optionally `fps`; nothing else.")
        return source["frames"], source.get("fps")
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], int | float):
        return source[0], float(source[1])
    if isinstance(source, np.ndarray | list | tuple):
        return source, None
    return None, None


def _bytes(
    source: Any, limits: MediaLimits, kind: MediaKind, trusted: bool, cancel: CancelToken | None
) -> bytes:
    most = limits.max_bytes if kind == "image" else limits.max_video_bytes
    if isinstance(source, str) and (not trusted or source[:8].lower().startswith(_URL_SCHEMES)):
        if source[:8].partition(":")[0].lower() == "data":
            return decode_data_uri(source, kind, most)
        return fetch.fetch_bytes(source, limits, kind, cancel=cancel)
    if trusted and isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if trusted and isinstance(source, str | Path):
        return _read(Path(source), most)
    raise MediaRefused(f"A {type(source).__name__} cannot be read as {kind}.")


def _read(path: Path, most: int) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise MediaRefused(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > most:
        raise MediaRefused(f"{path} has more than the {most} bytes allowed; raise the limit to load it.")
    return data


def decode_data_uri(url: str, kind: MediaKind, most: int) -> bytes:
    """The bytes of a data URI, which must be of `kind` and at most `most`."""
    match = _DATA_URI.match(url[:256])
    if match is None or match[2].lower().split(";")[-1] != "base64":
        raise MediaRefused(f"The data URI is not of the form data:{kind}/...;base64,...")
    mime = match[1].lower()
    if mime not in _MIME or not (mime.startswith(f"{kind}/") or (kind, mime) == ("video", "image/gif")):
        raise MediaRefused(f"The data URI holds {mime}, which is not taken as {kind}.")
    if len(url) - match.end() > 4 * (most // 3 + 1):
        raise MediaRefused(f"The {kind} has more than the {most} bytes allowed.")
    data = bytearray()
    try:
        for start in range(match.end(), len(url), _BASE64_SLICE):
            piece = url[start : start + _BASE64_SLICE]
            if "=" in piece and start + _BASE64_SLICE < len(url):
                raise ValueError("padding in the middle")
            data += base64.b64decode(piece, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaRefused("The data URI is not valid base64.") from error
    if not data:
        raise MediaRefused("The data URI is empty.")
    if len(data) > most:
        raise MediaRefused(f"The {kind} has more than the {most} bytes allowed.")
    found = bytes(data)
    if (decode.sniff(found) or video.sniff_video(found)) != _MIME[mime]:
        raise MediaRefused(f"The data URI says {mime}, but its bytes are something else.")
    return found


# --- content hashes: equal exactly if kind, mode, size, bytes and tenant are equal --------------------------


def media_hash(kind: str, mode: str, size: Sequence[int], data: bytes | bytearray | memoryview) -> bytes:
    """Hash of one source, the same for every tenant. Clients may refer to an image by it.

    kind: how `data` is read ("jpeg", "array", ...); mode: its colour mode; size: every dimension, so that the
    same bytes in another shape have another hash.
    """
    parts = (kind.encode(), mode.encode(), ",".join(map(str, size)).encode())
    header = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    with decode.all_cores(len(data)) as granted:
        hasher = blake3(derive_key_context=_HASH_CONTEXT, max_threads=blake3.AUTO if granted else 1)
        hasher.update(header + len(data).to_bytes(8, "little"))
        hasher.update(data)
        return hasher.digest(length=32)


def tenant_hash(digest: bytes, salt: bytes = b"") -> bytes:
    """The identity of a source for one tenant, who cannot produce it for another."""
    if not salt:
        return digest
    key = blake3(salt, derive_key_context=_HASH_CONTEXT).digest(length=32)
    return blake3(digest, key=key).digest(length=32)


def image_reference(digest: bytes, width: int, height: int) -> str:
    """What a client may send in place of the image; `image_names.parse_reference` reads it."""
    return f"{digest.hex()}-{width}x{height}"
