"""A picture or video in whatever form it was given, to pixels and an identity.

takes   URLs; from the library also paths, bytes, PIL images, arrays, lists of frames
gives   pixels and the content hash, keyed by the tenant's salt
never   reads a path or an object for a caller that is not trusted: those may only give URLs
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.media import decode, fetch, video
from saccade.media.geometry import VideoProcessing
from saccade.media.hashing import content_hash
from saccade.request import Pixels

_URL_SCHEMES = ("data:", "http:", "https:", "file:")


@dataclass(frozen=True)
class Picture:
    pixels: Pixels  # [1, height, width, 3]
    content: bytes


@dataclass(frozen=True)
class Video:
    frames: Pixels  # [count, height, width, 3]
    indices: tuple[int, ...]
    fps: float
    content: bytes  # of the whole video


def load_picture(source: Any, limits: MediaLimits, salt: bytes = b"", *, trusted: bool = False) -> Picture:
    """One picture."""
    if trusted and isinstance(source, Image.Image):
        pixels = decode.from_image(source, limits)
        return Picture(pixels, content_hash("pil", source.mode, source.size, pixels.tobytes(), salt))
    if trusted and isinstance(source, np.ndarray):
        pixels = decode.from_array(source, limits)
        data = np.ascontiguousarray(source).tobytes()
        return Picture(pixels, content_hash("array", str(source.dtype), source.shape, data, salt))
    data = _bytes(source, limits, "image", trusted)
    found = decode.decode(data, limits)
    return Picture(found.pixels, content_hash(found.format, found.mode, found.size, data, salt))


def load_video(
    source: Any, processing: VideoProcessing, limits: MediaLimits, salt: bytes = b"", *, trusted: bool = False
) -> Video:
    """One video. The library's user may give frames: an array, a list, or a mapping of `frames` and `fps`."""
    frames, fps = _given_frames(source) if trusted else (None, None)
    if frames is not None:
        sampled = video.from_frames(frames, fps, processing, limits)
        content = content_hash("frames", str(fps), sampled.frames.shape, sampled.frames.tobytes(), salt)
    else:
        data = _bytes(source, limits, "video", trusted)
        sampled = video.decode_video(data, processing, limits)
        content = content_hash("video", "RGB", sampled.frames.shape, data, salt)
    return Video(sampled.frames, sampled.indices, sampled.fps, content)


def _given_frames(source: Any) -> tuple[Any, float | None]:
    if isinstance(source, Mapping):
        if "frames" not in source or not set(source) <= {"frames", "fps"}:
            raise MediaRefused("A video given as a mapping has `frames` and, if known, `fps`; nothing else.")
        return source["frames"], source.get("fps")
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], int | float):
        return source[0], float(source[1])
    if isinstance(source, np.ndarray | list | tuple):
        return source, None
    return None, None


def _bytes(source: Any, limits: MediaLimits, kind: fetch.Kind, trusted: bool) -> bytes:
    if isinstance(source, str) and (not trusted or source.lower().startswith(_URL_SCHEMES)):
        return fetch.load(source, limits, kind)
    if trusted and isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if trusted and isinstance(source, str | Path):
        return _read(Path(source), limits.max_bytes if kind == "image" else limits.max_video_bytes)
    raise MediaRefused(f"A {type(source).__name__} cannot be read as {kind}.")


def _read(path: Path, most: int) -> bytes:
    """A file of the library's user."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise MediaRefused(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > most:
        raise MediaRefused(f"{path} has more than the {most} bytes allowed; raise the limit if it is meant.")
    return data
