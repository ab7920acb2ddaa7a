"""The identity of a picture or video: a hash nobody else's bytes, shape or reading can have.

takes   what kind of source it is, its mode and size, its bytes, the tenant's salt
gives   32 bytes; equal exactly when all of these are equal
"""

from collections.abc import Sequence

from blake3 import blake3

from saccade.inputs.media.parallel import alone

_CONTEXT = "saccade 2026 media content hash, keyed per tenant"


def media_hash(kind: str, mode: str, size: Sequence[int], data: bytes | bytearray | memoryview) -> bytes:
    """Hash of one source, the same for everybody: what its owner may be told, and call it by.

    kind: how `data` is to be read ("jpeg", "array", ...); mode: its colour mode; size: every dimension, so
    that the same bytes in another shape are another picture. Every part is framed by its length.
    """
    header = b"".join(_framed(part.encode()) for part in (kind, mode, ",".join(map(str, size))))
    header += len(data).to_bytes(8, "little")
    with alone(len(data)) as granted:
        return _digest(header, data, threads=blake3.AUTO if granted else 1)


def _digest(header: bytes, data: bytes | bytearray | memoryview, threads: int) -> bytes:
    hasher = blake3(derive_key_context=_CONTEXT, max_threads=threads)
    hasher.update(header)
    hasher.update(data)
    return hasher.digest(length=32)


def tenant_hash(digest: bytes, salt: bytes = b"") -> bytes:
    """The identity of a picture for one tenant: nobody else's, though they send the same bytes or name the
    same digest."""
    return blake3(digest, key=tenant_key(salt)).digest(length=32) if salt else digest


def content_hash(
    kind: str,
    mode: str,
    size: Sequence[int],
    data: bytes | bytearray | memoryview,
    salt: bytes = b"",
) -> bytes:
    """The identity of one source for one tenant."""
    return tenant_hash(media_hash(kind, mode, size, data), salt)


def frames_hash(content: bytes, indices: Sequence[int]) -> bytes:
    """Hash of some frames of a video whose own hash is `content` (already keyed)."""
    numbers = b"".join(index.to_bytes(8, "little") for index in indices)
    return blake3(_framed(b"frames") + _framed(content) + _framed(numbers)).digest(length=32)


def tenant_key(salt: bytes) -> bytes:
    """A blake3 key out of a salt of any length."""
    return blake3(salt, derive_key_context=_CONTEXT).digest(length=32)


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
