"""A picture or video as it was given, before anything of it is loaded."""

from dataclasses import dataclass
from typing import Any, Literal

from saccade.lod.types import Detail

MediaKind = Literal["image", "video"]


@dataclass(frozen=True)
class MediaPart:
    kind: MediaKind
    source: Any  # a URL, or a `Named`; for the library also bytes, a path, a PIL image, an array
    where: str = ""  # what its place is called in errors, as in "messages[0].content[1]"
    detail: Detail | None = None  # of a picture, where its part names one
    uuid: str | None = None  # what its owner will call it
