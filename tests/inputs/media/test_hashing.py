"""The identity of media: everything that changes an image changes its hash."""

import pytest

from saccade.inputs.media import rgbx
from saccade.inputs.media.hashing import content_hash, frames_hash, media_hash, tenant_hash

BASE = ("PNG", "RGB", (4, 6), b"x" * 72)


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
    monkeypatch.setattr(rgbx, "PARALLEL_BYTES", 1 << 30)
    alone = media_hash(*given)
    monkeypatch.setattr(rgbx, "PARALLEL_BYTES", 1)
    assert media_hash(*given) == alone
    with rgbx._all_cores_lock:  # another thread has the cores
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
