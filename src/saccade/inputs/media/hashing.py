"""Content hashes of images and videos: equal exactly if kind, mode, size, bytes and tenant are equal."""

from collections.abc import Sequence

from blake3 import blake3

from saccade.inputs.media.rgbx import all_cores

_CONTEXT = "saccade 2026 media content hash, keyed per tenant"


def media_hash(kind: str, mode: str, size: Sequence[int], data: bytes | bytearray | memoryview) -> bytes:
    """Hash of one source, the same for every tenant. Clients may refer to an image by it.

    kind: how `data` is read ("jpeg", "array", ...); mode: its colour mode; size: every dimension, so that the
    same bytes in another shape have another hash.
    """
    header = b"".join(_framed(part.encode()) for part in (kind, mode, ",".join(map(str, size))))
    with all_cores(len(data)) as granted:
        hasher = blake3(derive_key_context=_CONTEXT, max_threads=blake3.AUTO if granted else 1)
        hasher.update(header + len(data).to_bytes(8, "little"))
        hasher.update(data)
        return hasher.digest(length=32)


def tenant_hash(digest: bytes, salt: bytes = b"") -> bytes:
    """The identity of a source for one tenant, who cannot produce it for another."""
    if not salt:
        return digest
    key = blake3(salt, derive_key_context=_CONTEXT).digest(length=32)
    return blake3(digest, key=key).digest(length=32)


def content_hash(
    kind: str, mode: str, size: Sequence[int], data: bytes | bytearray | memoryview, salt: bytes = b""
) -> bytes:
    return tenant_hash(media_hash(kind, mode, size, data), salt)


def frames_hash(content: bytes, indices: Sequence[int]) -> bytes:
    """Hash of some frames of the video whose tenant hash is `content`."""
    numbers = b"".join(index.to_bytes(8, "little") for index in indices)
    return blake3(_framed(b"frames") + _framed(content) + _framed(numbers)).digest(length=32)


def image_reference(digest: bytes, width: int, height: int) -> str:
    """What a client may send in place of the image; `image_names.parse_reference` reads it."""
    return f"{digest.hex()}-{width}x{height}"


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
