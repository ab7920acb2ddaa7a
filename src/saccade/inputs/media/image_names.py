"""Pictures by name: what a client may send in the place of a picture it has sent before.

takes   references as clients write them; ids clients give their pictures
gives   the digest and size they stand for
owns    which id names which picture, for each tenant; forgets the ids used longest ago
never   tells one tenant of another's: an id is looked up with the tenant's salt, and a digest becomes an
        identity only with it (`hashing.for_tenant`)

A reference says all there is to know of a picture but its pixels. Whether its features are still kept is
the engine's to say. References outlive the server, ids do not.
"""

import re
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from saccade.errors import ImageNotFound, InvalidValue

MOST_IDS = 1 << 16
MAX_UUID_LENGTH = 256  # of an id
_FORM = re.compile(r"([0-9a-f]{64})-([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


class ImageReference(NamedTuple):
    digest: bytes  # `hashing.picture_hash`
    width: int  # of the picture, turned as its EXIF orientation says
    height: int

    def __str__(self) -> str:
        return f"{self.digest.hex()}-{self.width}x{self.height}"


def parse_reference(text: str) -> ImageReference | None:
    """None if it does not look like one."""
    found = _FORM.fullmatch(text)
    return ImageReference(bytes.fromhex(found[1]), int(found[2]), int(found[3])) if found else None


class ImageName(NamedTuple):
    """A picture whose bytes were left out: the source of a `MediaPart`."""

    hash: str | None = None
    uuid: str | None = None


def image_not_found(name: str, param: str | None = None) -> ImageNotFound:
    return ImageNotFound(
        f"The picture {name[:80]!r} is not kept here, or no longer; send the request again with its bytes.",
        param=param,
    )


class ImageNames:
    """Thread-safe."""

    def __init__(self, most: int = MOST_IDS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, str], ImageReference] = OrderedDict()  # by salt and id

    def learn(self, salt: bytes, uuid: str, reference: ImageReference) -> None:
        """The id names this picture from here on, whatever it named before."""
        with self._lock:
            self._known[salt, uuid] = reference
            self._known.move_to_end((salt, uuid))
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def forget(self, salt: bytes, uuid: str, reference: str) -> None:
        """The id, if it still names that picture."""
        with self._lock:
            if str(self._known.get((salt, uuid))) == reference:
                del self._known[salt, uuid]

    def find(self, salt: bytes, named: ImageName, param: str | None = None) -> ImageReference:
        """What a name stands for; ImageNotFound if this tenant has given it to nothing."""
        if named.hash is not None:
            reference = parse_reference(named.hash)
            if reference is None:
                raise InvalidValue(
                    f"{named.hash[:80]!r} is no picture's hash; give one as `usage` told it: 64"
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
        """A name that may be either; an id comes first."""
        with self._lock:
            reference = self._known.get((salt, name))
        reference = reference or parse_reference(name)
        if reference is None:
            raise image_not_found(name)
        return reference


def check_uuid(uuid: Any, param: str) -> str:
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise InvalidValue(f"a picture's uuid is a text of 1 to {MAX_UUID_LENGTH} letters", param=param)
    return uuid
