"""One image or video, in whatever form the caller gave it, to pixels and a content hash.

Callers that are not trusted (HTTP) may only give URLs; the library also takes paths, bytes, PIL images,
arrays and lists of frames.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.image_processor import VideoProcessor
from saccade.inputs.media import decode, fetch, video
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.media.fetch import MediaKind
from saccade.inputs.media.hashing import content_hash, media_hash, tenant_hash
from saccade.inputs.media.rgbx import words_of_rgb
from saccade.inputs.media.video import SampledFrames
from saccade.request import NO_PIXELS, Pixels

_URL_SCHEMES = ("data:", "http:", "https:", "file:")

Admit = Callable[[int, int, int], None]  # count, width and height of frames; raises if they do not fit


@dataclass(frozen=True)
class LoadedImage:
    pixels: Pixels  # [1, height, width, 3]
    digest: bytes  # `hashing.media_hash`
    content: bytes  # `hashing.tenant_hash` of the digest


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
    source: Any,
    limits: MediaLimits,
    salt: bytes = b"",
    *,
    trusted: bool = False,
    cancel: CancelToken | None = None,
) -> OpenedImage:
    """Fetches an image, reads its size and checks it."""
    if trusted and isinstance(source, SharedImage) and not salt:
        return source.open(limits)
    if trusted and isinstance(source, Image.Image):
        decode.check_area(source.size, limits)
        return OpenedImage(source.size, lambda: _from_image(source, limits, salt))
    if trusted and isinstance(source, np.ndarray):
        return OpenedImage(decode.array_size(source, limits), lambda: _from_array(source, limits, salt))
    data = _bytes(source, limits, "image", trusted, cancel)
    return OpenedImage(decode.stored_size(data, limits), lambda: _from_bytes(data, limits, salt))


def open_named_image(digest: bytes, width: int, height: int, salt: bytes) -> OpenedImage:
    """An image of which only the name was sent."""
    image = LoadedImage(NO_PIXELS, digest, tenant_hash(digest, salt))
    return OpenedImage((width, height), lambda: image, without_pixels=True)


def _from_image(image: Image.Image, limits: MediaLimits, salt: bytes) -> LoadedImage:
    pixels = decode.from_image(image, limits)
    words = words_of_rgb(pixels)
    data = pixels if words is None else words
    digest = media_hash("pil" if words is None else "pil words", image.mode, image.size, _flat(data))
    return LoadedImage(pixels, digest, tenant_hash(digest, salt))


def _from_array(array: NDArray[np.generic], limits: MediaLimits, salt: bytes) -> LoadedImage:
    pixels = decode.from_array(array, limits)
    # With three bands `pixels` is a copy of the array, which the caller cannot change meanwhile.
    data = pixels if array.shape == pixels.shape[1:] else np.ascontiguousarray(array)
    digest = media_hash("array", str(array.dtype), array.shape, _flat(data))
    return LoadedImage(pixels, digest, tenant_hash(digest, salt))


def _flat(array: NDArray[np.generic]) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _from_bytes(data: bytes, limits: MediaLimits, salt: bytes) -> LoadedImage:
    found = decode.decode(data, limits)
    digest = media_hash(found.format, found.mode, found.size, data)
    return LoadedImage(found.pixels, digest, tenant_hash(digest, salt))


def load_video(
    source: Any,
    processor: VideoProcessor,
    limits: MediaLimits,
    salt: bytes = b"",
    *,
    trusted: bool = False,
    cancel: CancelToken | None = None,
    admit: Admit | None = None,
) -> tuple[SampledFrames, bytes]:
    """Sampled frames and the content hash of a video.

    The library may give frames: an array, a list, or a mapping with `fps`.
    """
    frames, fps = _given_frames(source) if trusted else (None, None)
    if frames is not None:
        sampled = video.from_frames(frames, fps, processor, limits, admit)
        content = content_hash("frames", str(fps), sampled.frames.shape, sampled.frames.tobytes(), salt)
    else:
        data = _bytes(source, limits, "video", trusted, cancel)
        sampled = video.decode_video(data, processor, limits, cancel, admit)
        content = content_hash("video", "RGB", sampled.frames.shape, data, salt)
    return sampled, content


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
    if isinstance(source, str) and (not trusted or source.lower().startswith(_URL_SCHEMES)):
        return fetch.fetch_bytes(source, limits, kind, cancel=cancel)
    if trusted and isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if trusted and isinstance(source, str | Path):
        return _read(Path(source), limits.max_bytes if kind == "image" else limits.max_video_bytes)
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
