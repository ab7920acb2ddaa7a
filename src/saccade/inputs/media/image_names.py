"""Named images: what a client may send instead of the bytes of an image it sent before.

A reference (`loader.image_reference`) says everything about an image but its pixels and outlives the server.
A uuid is the client's own name for an image; it is looked up with the tenant's salt and forgotten when it is
the least recently used. The engine core knows whether features of the image are still cached.
"""

import re
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from saccade.errors import ImageNotFound, InvalidValue
from saccade.inputs.media.loader import image_reference

MAX_IDS = 1 << 16
MAX_UUID_LENGTH = 256
_FORM = re.compile(r"([0-9a-f]{64})-([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


class ImageReference(NamedTuple):
    digest: bytes  # `loader.media_hash`
    width: int  # after applying the EXIF orientation
    height: int

    def __str__(self) -> str:
        return image_reference(*self)


def parse_reference(text: str) -> ImageReference | None:
    found = _FORM.fullmatch(text)
    return ImageReference(bytes.fromhex(found[1]), int(found[2]), int(found[3])) if found else None


class ImageName(NamedTuple):
    """The source of a `MediaPart` without bytes: either a reference or a uuid."""

    hash: str | None = None
    uuid: str | None = None


def image_not_found(name: str, param: str | None = None) -> ImageNotFound:
    return ImageNotFound(
        f"The image {name[:80]!r} is not kept here, or no longer; send the request again with its bytes.",
        param=param,
    )


class ImageNames:
    """Which uuid names which image, for each tenant. Thread-safe."""

    def __init__(self, most: int = MAX_IDS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, str], ImageReference] = OrderedDict()  # by salt and uuid

    def learn(self, salt: bytes, uuid: str, reference: ImageReference) -> None:
        """Names the image `uuid`, whatever that named before."""
        with self._lock:
            self._known[salt, uuid] = reference
            self._known.move_to_end((salt, uuid))
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def forget(self, salt: bytes, uuid: str, reference: str) -> None:
        """Forgets the uuid if it still names that image."""
        with self._lock:
            if str(self._known.get((salt, uuid))) == reference:
                del self._known[salt, uuid]

    def find(self, salt: bytes, named: ImageName, param: str | None = None) -> ImageReference:
        """The image of a name; ImageNotFound if this tenant has none."""
        if named.hash is not None:
            reference = parse_reference(named.hash)
            if reference is None:
                raise InvalidValue(
                    f"{named.hash[:80]!r} is not the hash of an image; give one as `usage` reports it: 64"
                    " hexadecimal digits and the size",
                    param=param,
                )
            return reference
        uuid = named.uuid or ""
        with self._lock:
            reference = self._known.get((salt, uuid))
            if reference is not None:
                self._known.move_to_end((salt, uuid))
        if reference is None:
            raise image_not_found(uuid, param)
        return reference

    def find_any(self, salt: bytes, name: str) -> ImageReference:
        """The image of a uuid or, if there is no such uuid, of a reference."""
        with self._lock:
            reference = self._known.get((salt, name))
        reference = reference or parse_reference(name)
        if reference is None:
            raise image_not_found(name)
        return reference


def check_uuid(uuid: Any, param: str) -> str:
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise InvalidValue(f"an image's uuid is a text of 1 to {MAX_UUID_LENGTH} characters", param=param)
    return uuid
