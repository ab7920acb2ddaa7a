"""Data URIs are strict; everything that changes an image changes its content hash."""

import base64
import io
from typing import Any

import pytest
from PIL import Image

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.media import decode, loader
from saccade.inputs.media.loader import decode_data_uri, media_hash, tenant_hash
from saccade.inputs.qwen_vl_processor import frames_hash

MOST = MediaLimits().max_bytes
BASE = ("PNG", "RGB", (4, 6), b"x" * 72)


def content_hash(kind: str, mode: str, size: tuple[int, ...], data: bytes, salt: bytes = b"") -> bytes:
    return tenant_hash(media_hash(kind, mode, size, data), salt)


def png(size: tuple[int, int] = (3, 2)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


# --- data URIs ---------------------------------------------------------------------------------------------


def test_a_data_uri_is_decoded() -> None:
    assert decode_data_uri(data_uri(png()), "image", MOST) == png()
    assert decode_data_uri(data_uri(png(), "IMAGE/PNG;charset=x"), "image", MOST) == png()


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,AAA",
        "data:image/png;base64,iVBO\nRw0K",
        "data:image/png,abc",
        "data:,abc",
        "data:image/png;base64",
        "data:text/html;base64,PGI+",
        "data:image/svg+xml;base64,PHN2Zy8+",
        data_uri(png(), "image/jpeg"),
        data_uri(b"GIF89a" + b"\0" * 20, "image/png"),
        data_uri(png(), "video/mp4"),
        data_uri(b"\x00\x00\x00\x18ftypmp42", "image/png"),
    ],
)
def test_data_uris_that_are_junk_or_contradict_themselves_are_refused(url: str) -> None:
    with pytest.raises(MediaRefused):
        decode_data_uri(url, "image", MOST)


def test_a_data_uri_is_decoded_in_slices_and_padded_only_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = base64.b64decode

    def noted(text: str, **options: Any) -> bytes:
        sizes.append(len(text))
        return real(text, **options)

    monkeypatch.setattr(loader, "_BASE64_SLICE", 8)
    monkeypatch.setattr(base64, "b64decode", noted)
    for rest in (b"", b"a", b"ab"):
        assert decode_data_uri(data_uri(png() + rest), "image", MOST) == png() + rest
    assert max(sizes) == 8
    encoded = base64.b64encode(png()[:6] + b"a").decode()  # padded, at the end of a slice
    with pytest.raises(MediaRefused, match="base64"):
        decode_data_uri(
            "data:image/png;base64," + encoded[:8] + "AA==AAAA" + encoded[8:],
            "image",
            MOST,
        )
    with pytest.raises(MediaRefused, match="base64"):
        decode_data_uri("data:image/png;base64," + "AAAAAA==" * 2, "image", MOST)


def test_a_data_uri_over_the_limit_is_refused_before_and_after_decoding() -> None:
    for size in (101, 5000):
        with pytest.raises(MediaRefused, match="100 bytes"):
            decode_data_uri(data_uri(png() + b"\0" * size), "image", 100)


# --- content hashes ----------------------------------------------------------------------------------------


def test_every_part_is_in_the_hash() -> None:
    others = [
        ("WEBP", "RGB", (4, 6), b"x" * 72),
        ("PNG", "L", (4, 6), b"x" * 72),
        ("PNG", "RGB", (6, 4), b"x" * 72),
        ("PNG", "RGB", (46,), b"x" * 72),
        ("PNG", "RGB", (4, 6), b"x" * 71 + b"y"),
        ("PNGR", "GB", (4, 6), b"x" * 72),  # the same letters, cut elsewhere
    ]
    hashes = {content_hash(*BASE), *(content_hash(*other) for other in others)}
    assert len(hashes) == len(others) + 1
    assert all(len(one) == 32 for one in hashes)
    assert content_hash(*BASE) == content_hash(*BASE)


def test_hashing_on_all_cores_gives_the_same_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("PNG", "RGB", (4, 6), bytes(range(256)) * 8192)
    monkeypatch.setattr(decode, "PARALLEL_BYTES", 1 << 30)
    alone = media_hash(*given)
    monkeypatch.setattr(decode, "PARALLEL_BYTES", 1)
    assert media_hash(*given) == alone
    with decode._all_cores_lock:  # another thread has the cores
        assert media_hash(*given) == alone


def test_tenants_do_not_share_hashes() -> None:
    assert len({content_hash(*BASE, salt) for salt in (b"", b"a", b"b", b"a" * 99)}) == 4
    assert content_hash(*BASE, b"a") == content_hash(*BASE, b"a")


def test_a_digest_gives_no_access_to_another_tenants_image() -> None:
    """The digest is the same for all, the identity made of it is the tenant's own."""
    digest = media_hash(*BASE)
    assert tenant_hash(digest, b"a") == content_hash(*BASE, b"a")
    assert len({tenant_hash(digest, salt) for salt in (b"", b"a", b"b")}) == 3
    assert tenant_hash(tenant_hash(digest, b"a"), b"b") != tenant_hash(digest, b"b")


def test_pairs_of_frames_have_hashes_of_their_own() -> None:
    one, other = content_hash(*BASE), content_hash(*BASE, b"a")
    assert (
        len(
            {
                frames_hash(one, [0, 1]),
                frames_hash(one, [1, 0]),
                frames_hash(one, [2, 3]),
                frames_hash(other, [0, 1]),
            }
        )
        == 4
    )
