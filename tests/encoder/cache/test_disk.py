"""The disk tier: files any reader opens, that survive restarts, sharing, damage and deletion."""

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.encoder.cache.disk import DiskTier
from saccade.encoder.cache.feature_files import FeatureBytes, FeatureFolder
from saccade.encoder.cache.transfer import CpuTransfer, HostFeatures
from saccade.errors import ConfigError

KEY, OTHER, IMAGE_HASH = b"k" * 32, b"o" * 32, b"p" * 32
TRANSFER = CpuTransfer()
LONG = 1000.0  # seconds between two looks into the folder, where a test looks itself


def features(seed: int = 0, dtype: torch.dtype = torch.float32, rows: int = 4) -> HostFeatures:
    torch.manual_seed(seed)
    return HostFeatures(torch.randn(rows, 6).to(dtype))


def folder(
    root: Path, budget: int = 1 << 20, identity: str = "weights", ttl: float | None = None
) -> FeatureFolder:
    return FeatureFolder(root, identity, budget, ttl)


def save(
    where: FeatureFolder, key: bytes = KEY, content: bytes = IMAGE_HASH, kept: HostFeatures | None = None
) -> int:
    return where.write(key, content, TRANSFER.to_bytes(kept or features()), time.time())


def load(where: FeatureFolder, key: bytes = KEY, content: bytes = IMAGE_HASH) -> Any:
    return where.read(key, content, TRANSFER.allocate_host)


def only_file(root: Path) -> Path:
    (found,) = root.rglob("*.safetensors")
    return found


@contextmanager
def disk(where: FeatureFolder, **options: Any) -> Iterator[DiskTier]:
    made = DiskTier(where, TRANSFER.to_bytes, TRANSFER.allocate_host, **{"refresh": LONG, **options})
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come about")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_come_back_bit_for_bit_and_any_reader_opens_them(tmp_path: Path, dtype: torch.dtype) -> None:
    kept = features(dtype=dtype)
    assert save(folder(tmp_path), kept=kept) == only_file(tmp_path).stat().st_size
    again = load(folder(tmp_path))
    assert again.tensor.dtype == dtype
    assert torch.equal(again.tensor, kept.tensor)
    assert torch.equal(load_file(only_file(tmp_path))["features"], kept.tensor)


def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    save(folder(tmp_path / "new"))
    file = only_file(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_other_weights_or_another_dtype_never_answer(tmp_path: Path) -> None:
    save(folder(tmp_path))
    assert load(folder(tmp_path, identity="others")) is None
    assert not folder(tmp_path, identity="others").list().views


def _flip(data: bytearray, place: int) -> bytes:
    data[place] ^= 1
    return bytes(data)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in the header": lambda data: data[:20],
    "cut in the data": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "one bit of the data": lambda data: _flip(bytearray(data), len(data) - 3),
    "one bit of the header": lambda data: _flip(bytearray(data), 30),
    "a huge header": lambda data: b"\xff" * 8 + data[8:],
    "no json": lambda data: data[:8] + b"x" * 40 + data[48:],
    "another shape": lambda data: data.replace(b"[4, 6]", b"[6, 4]"),
    "another dtype": lambda data: data.replace(b'"F32"', b'"F31"'),
    "an endless shape": lambda data: data.replace(b"[4, 6]", b"[9e99]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, damage: str) -> None:
    where = folder(tmp_path)
    save(where)
    file = only_file(tmp_path)
    data = DAMAGE[damage](file.read_bytes())
    assert data != file.read_bytes()
    file.write_bytes(data)
    assert load(where) is None
    assert not file.exists()


def test_a_file_of_another_view_under_this_name_is_a_miss(tmp_path: Path) -> None:
    where = folder(tmp_path)
    save(where, OTHER)
    only_file(tmp_path).rename(only_file(tmp_path).parent / f"{IMAGE_HASH.hex()}.{KEY.hex()}.safetensors")
    assert load(where) is None


def test_a_foreign_file_with_the_right_name_and_a_link_are_misses(tmp_path: Path) -> None:
    where = folder(tmp_path)
    save(where)
    file = only_file(tmp_path)
    file.unlink()
    save_file({"features": torch.zeros(4, 6)}, file)
    assert load(where) is None
    (tmp_path / "elsewhere").write_text("secret")
    file.symlink_to(tmp_path / "elsewhere")
    assert load(where) is None
    assert (tmp_path / "elsewhere").read_text() == "secret"


def test_the_folder_stays_within_its_budget_and_evicts_what_was_read_longest_ago(tmp_path: Path) -> None:
    size = save(folder(tmp_path))
    only_file(tmp_path).unlink()
    where = folder(tmp_path, budget=3 * size)
    for number in range(5):
        save(where, bytes([number]) * 32)
        for file in tmp_path.rglob("*.safetensors"):  # a second goes by
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 1))
        assert load(where, bytes([0]) * 32) is not None  # the first is read all the time
        assert where.make_room().nbytes <= 3 * size
    assert sorted(key[0] for key in where.list().views) == [0, 3, 4]


def test_files_of_other_models_count_and_are_evicted_too(tmp_path: Path) -> None:
    size = save(folder(tmp_path, identity="old"))
    old = only_file(tmp_path)
    os.utime(old, (0, 0))
    where = folder(tmp_path, budget=size)
    save(where)
    assert where.make_room().nbytes == size
    assert not old.exists()


def test_a_view_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    assert save(folder(tmp_path, budget=50)) == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_files_unread_for_their_time_to_live_and_abandoned_files_are_removed(tmp_path: Path) -> None:
    where = folder(tmp_path, ttl=100.0)
    save(where)
    leftover = only_file(tmp_path).parent / ".writing-1-abc"
    leftover.write_bytes(b"half")
    assert where.list().views
    for file in (only_file(tmp_path), leftover):
        os.utime(file, (0, time.time() - 5000))
    assert not where.list().views
    assert not leftover.exists()


def test_deleting_removes_every_view_and_older_features_cannot_come_back(tmp_path: Path) -> None:
    where, slab = folder(tmp_path), TRANSFER.to_bytes(features())
    made = time.time()
    save(where)
    save(where, OTHER)
    save(where, content=b"q" * 32)
    folder(tmp_path).delete(IMAGE_HASH)  # another server
    assert {found.content for found in where.list().views.values()} == {b"q" * 32}
    assert where.write(KEY, IMAGE_HASH, slab, made) == 0
    assert IMAGE_HASH in where.list().deleted
    assert where.write(KEY, IMAGE_HASH, slab, time.time()) > 0  # encoded since: somebody sent it again


def test_deleting_unknown_images_fills_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.encoder.cache.feature_files.MAX_MARKS", 3)
    where = folder(tmp_path)
    save(where)
    for number in range(9):
        where.delete(bytes([number]) * 32)
    assert len(where.list().deleted) == 3
    where.delete(IMAGE_HASH)
    assert not where.list().views
    assert IMAGE_HASH in where.list().deleted  # other servers are told all the same


def test_a_deletion_in_the_middle_of_a_write_wins(tmp_path: Path) -> None:
    where, made = folder(tmp_path), time.time()

    slab = TRANSFER.to_bytes(features())
    original = where._deleted_since
    looks = []

    def delete_after_the_first_look(content: bytes, since: float) -> bool:
        looks.append(original(content, since))
        if len(looks) == 1:
            folder(tmp_path).delete(content)
        return looks[-1] if len(looks) == 1 else original(content, since)

    where._deleted_since = delete_after_the_first_look  # type: ignore[method-assign,assignment]
    assert where.write(KEY, IMAGE_HASH, slab, made) == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_unusable_folder_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        folder(tmp_path / "file")


# Behind threads


def test_a_restarted_server_and_another_one_find_what_was_written(tmp_path: Path) -> None:
    with disk(folder(tmp_path)) as first:
        assert first.write(KEY, IMAGE_HASH, features(), 96, time.time())
    with disk(folder(tmp_path)) as again:
        assert again.size(KEY)
        assert again.views(IMAGE_HASH) == [KEY]
        begun = again.read(KEY)
        again.wait(5.0)
        (landed,) = again.completed_reads()
        assert (landed.key, landed.content, landed.nbytes) == (KEY, IMAGE_HASH, 96)
        assert landed is begun
        assert landed.host is not None
        assert torch.equal(landed.host.tensor, features().tensor)


def test_the_listing_is_refreshed(tmp_path: Path) -> None:
    with disk(folder(tmp_path), refresh=0.01) as mine:
        save(folder(tmp_path))
        until(lambda: mine.size(KEY) is not None)
        only_file(tmp_path).unlink()
        until(lambda: mine.size(KEY) is None)
        folder(tmp_path).delete(IMAGE_HASH)
        until(lambda: IMAGE_HASH in mine.deleted)


def test_what_another_server_deleted_is_a_miss_though_the_listing_has_it(tmp_path: Path) -> None:
    save(folder(tmp_path))
    with disk(folder(tmp_path)) as mine:
        folder(tmp_path).delete(IMAGE_HASH)
        assert mine.read(KEY)
        mine.wait(5.0)
        assert mine.completed_reads()[0].host is None
        assert mine.size(KEY) is None


def test_writes_beyond_the_queue_are_dropped_without_waiting(tmp_path: Path) -> None:
    gate = threading.Event()

    def slow(kept: HostFeatures) -> FeatureBytes:
        gate.wait(10)
        return TRANSFER.to_bytes(kept)

    made = DiskTier(folder(tmp_path), slow, TRANSFER.allocate_host, refresh=LONG, queued_bytes=200)
    try:
        taken = [made.write(bytes([n]) * 32, IMAGE_HASH, features(n), 96, time.time()) for n in range(5)]
        assert taken == [True, True, False, False, False]
        assert made.dropped_writes == 3
        assert not made.write(bytes(32), IMAGE_HASH, features(0), 96, time.time())  # on its way already
        gate.set()
        until(lambda: made.written == 2)
        assert made.write(bytes([9]) * 32, IMAGE_HASH, features(9), 96, time.time())
    finally:
        gate.set()
        made.close()


def test_a_deletion_reaches_queued_writes(tmp_path: Path) -> None:
    gate = threading.Event()

    def slow(kept: HostFeatures) -> FeatureBytes:
        gate.wait(10)
        return TRANSFER.to_bytes(kept)

    made = DiskTier(folder(tmp_path), slow, TRANSFER.allocate_host, refresh=LONG)
    made.write(KEY, IMAGE_HASH, features(), 96, time.time())
    made.write(OTHER, IMAGE_HASH, features(), 96, time.time())
    time.sleep(0.02)  # the first is being written, the second waits
    made.delete(IMAGE_HASH)
    gate.set()
    made.close()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert made.entries == 0


class SlowFolder(FeatureFolder):
    """Whose deletions begin when the test says so, in a thread that is not the test's."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "weights", 1 << 20)
        self.gate = threading.Event()
        self.deletions: list[set[bytes]] = []

    def delete_all(self, deleted: Mapping[bytes, float]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.deletions.append({*deleted})
        self.gate.wait(10)
        super().delete_all(deleted)


def test_files_of_deleted_images_are_removed_together_in_the_background(tmp_path: Path) -> None:
    where = SlowFolder(tmp_path)
    save(where)
    told: list[bytes] = []
    with disk(where) as mine:
        mine.delete(IMAGE_HASH, lambda: told.append(IMAGE_HASH))
        assert (mine.size(KEY), mine.views(IMAGE_HASH), mine.entries) == (None, [], 0)
        until(lambda: where.deletions == [{IMAGE_HASH}])
        for number in range(200):  # a flood of names made up
            mine.delete(b"%032d" % number, partial(told.append, b"%032d" % number))
        mine._list_folder()
        assert mine.size(KEY) is None  # though the file is still there
        assert only_file(tmp_path).exists()
        assert not told
        where.gate.set()
        until(lambda: len(told) == 201)
        assert not list(tmp_path.rglob("*.safetensors"))
        assert len(where.deletions) == 2


def test_features_created_after_a_deletion_stay(tmp_path: Path) -> None:
    where = SlowFolder(tmp_path)
    save(where)
    with disk(where) as mine:
        mine.delete(IMAGE_HASH)
        assert mine.write(KEY, IMAGE_HASH, features(1), 96, time.time())
        time.sleep(0.01)
        where.gate.set()
        until(lambda: mine.written == 1)
        assert torch.equal(load(where).tensor, features(1).tensor)
        mine._list_folder()
        assert mine.size(KEY)


def test_deletions_come_before_queued_writes(tmp_path: Path) -> None:
    gate, order = threading.Event(), []

    def slow(kept: HostFeatures) -> FeatureBytes:
        order.append("write")
        gate.wait(10)
        return TRANSFER.to_bytes(kept)

    made = DiskTier(folder(tmp_path), slow, TRANSFER.allocate_host, refresh=LONG)
    for number in range(3):
        made.write(bytes([number]) * 32, IMAGE_HASH, features(), 96, time.time())
    until(lambda: order == ["write"])
    made.delete(OTHER, lambda: order.append("deleted"))
    gate.set()
    made.close()
    assert order == ["write", "deleted", "write", "write"]


def test_a_deletion_mark_never_becomes_older(tmp_path: Path) -> None:
    where, now = folder(tmp_path), time.time()
    where.delete_all({IMAGE_HASH: now})
    where.delete_all({IMAGE_HASH: now - 100})
    assert where.list().deleted[IMAGE_HASH] == pytest.approx(now, abs=0.01)


def test_a_stale_listing_does_not_undo_a_deletion(tmp_path: Path) -> None:
    """The look into the folder began before the deletion and ends after it."""
    where = folder(tmp_path)
    save(where)
    with disk(where) as mine:
        listing = where.list()

        def stale() -> Any:
            mine.delete(IMAGE_HASH)
            return listing

        where.make_room = stale  # type: ignore[method-assign]
        mine._list_folder()
        assert mine.size(KEY) is None


def test_two_servers_writing_reading_and_deleting_at_once_only_ever_hit_or_miss(tmp_path: Path) -> None:
    truth = {bytes([n]) * 32: features(n) for n in range(6)}
    faults: list[str] = []
    size = save(folder(tmp_path / "size"))

    def serve(seed: int) -> None:
        where = folder(tmp_path / "shared", budget=4 * size)
        for turn in range(60):
            key = list(truth)[(turn * 7 + seed) % 6]
            where.write(key, key, TRANSFER.to_bytes(truth[key]), time.time())
            got = load(where, list(truth)[(turn + seed) % 6], list(truth)[(turn + seed) % 6])
            if got is not None and not torch.equal(got.tensor, truth[list(truth)[(turn + seed) % 6]].tensor):
                faults.append("wrong features")
            if turn % 10 == seed:
                where.delete(key)
            where.make_room()

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert folder(tmp_path / "shared", budget=4 * size).make_room().nbytes <= 4 * size


def test_the_header_names_the_view_and_its_image(tmp_path: Path) -> None:
    save(folder(tmp_path))
    data = only_file(tmp_path).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"]["view"] == KEY.hex()
    assert header["__metadata__"]["content"] == IMAGE_HASH.hex()
