"""Features as files in a folder that several servers may share. Every call blocks: threads use it.

    FOLDER/IDENTITY/CONTENT.KEY.safetensors    one view; any safetensors reader opens it
    FOLDER/IDENTITY/CONTENT.deleted            the image was deleted then; older features must not come back
    FOLDER/IDENTITY/.writing-...               a file being written

IDENTITY names the weights and the dtype the features came from. The budget covers all of FOLDER, whatever
model wrote it; the file read longest ago is evicted first. There are no locks: a file appears by renaming,
and a read checks the hash. A file that is missing, damaged or foreign is a miss, never an error.
"""

import contextlib
import json
import math
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from saccade.errors import ConfigError

_LENGTH = struct.Struct("<Q")  # of the header, in front of it
MAX_HEADER = 1 << 16
_VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
ABANDONED_SECONDS = 3600.0  # age at which a file being written counts as abandoned
DELETED_SECONDS = 3600.0  # a deletion mark is kept, far longer than other servers need to notice it
MAX_MARKS = 4096  # deletion marks of images without files

AllocateHost = Callable[[str, tuple[int, ...]], tuple[Any, memoryview]]  # dtype, shape -> memory, its bytes


class FeatureBytes(NamedTuple):
    """Features as a file holds them."""

    dtype: str  # as safetensors spells it, "BF16"
    shape: tuple[int, ...]
    data: memoryview


class FeatureFile(NamedTuple):
    content: bytes
    nbytes: int  # of the file


@dataclass(frozen=True)
class FolderListing:
    views: dict[bytes, FeatureFile]  # by key, of this identity
    deleted: dict[bytes, float]  # content -> when (Unix seconds)
    nbytes: int  # of all files, other identities included


@dataclass(frozen=True)
class _File:
    path: str
    name: str
    nbytes: int
    modified: float
    ours: bool


class FeatureFolder:
    def __init__(self, root: Path, identity: str, budget: int, ttl: float | None = None) -> None:
        self.budget = budget
        self._root = root
        self._home = root / identity
        self._ttl = ttl
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._home.mkdir(exist_ok=True, mode=0o700)
            self._home.chmod(0o700)
            probe = self._temporary()
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the vision cache's dir {root} cannot be used: {error.strerror}; choose a folder that this"
                " user owns, or leave out disk and dir"
            ) from error

    def list(self) -> FolderListing:
        """List the folder; expired files are removed on the way."""
        views: dict[bytes, FeatureFile] = {}
        deleted: dict[bytes, float] = {}
        total = 0
        now = time.time()
        for file in self._files():
            if self._is_expired(file, now):
                _remove(file.path)
                continue
            total += file.nbytes
            if file.ours and (named := _parse_name(file.name)):
                views[named[1]] = FeatureFile(named[0], file.nbytes)
            elif file.ours and file.name.endswith(".deleted") and (content := _hex(file.name[:-8])):
                deleted[content] = file.modified
        return FolderListing(views, deleted, total)

    def _files(self) -> Iterator[_File]:
        with contextlib.suppress(OSError):
            for home in os.scandir(self._root):
                if home.is_dir(follow_symlinks=False):
                    yield from self._files_of(home.path)

    def _files_of(self, home: str) -> Iterator[_File]:
        with contextlib.suppress(OSError):  # another server may remove anything at any time
            for entry in os.scandir(home):
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False):
                        state = entry.stat(follow_symlinks=False)
                        ours = home == str(self._home)
                        yield _File(entry.path, entry.name, state.st_size, state.st_mtime, ours)

    def _is_expired(self, file: _File, now: float) -> bool:
        age = now - file.modified
        if file.name.startswith(".writing-"):
            return age > ABANDONED_SECONDS
        if file.name.endswith(".deleted"):
            return age > DELETED_SECONDS
        return self._ttl is not None and file.name.endswith(".safetensors") and age > self._ttl

    def read(self, key: bytes, content: bytes, allocate: AllocateHost) -> Any | None:
        """The features in host memory from `allocate`, None on a miss."""
        path = self._path(key, content)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            with os.fdopen(descriptor, "rb") as file:
                memory = self._read(file, key, allocate)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            _remove(path)  # damaged: it would fail again
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # marks it as read last
        return memory

    def _read(self, file: BufferedReader, key: bytes, allocate: AllocateHost) -> Any:
        size = os.fstat(file.fileno()).st_size
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))
        if length > MAX_HEADER:
            raise ValueError("not a header")
        header = json.loads(file.read(length))
        tensor, metadata = header["features"], header["__metadata__"]
        dtype, shape = tensor["dtype"], tuple(int(side) for side in tensor["shape"])
        if not all(0 <= side < 1 << 40 for side in shape):
            raise ValueError("not a shape")
        nbytes = _VALUE_BYTES[dtype] * math.prod(shape)
        if size - _LENGTH.size - length != nbytes or tensor["data_offsets"] != [0, nbytes]:
            raise ValueError("the file is cut off")
        memory, data = allocate(dtype, shape)
        if file.readinto(data) != nbytes:
            raise ValueError("the file is cut off")
        if metadata["blake3"] != _hash(key, FeatureBytes(dtype, shape, data)):
            raise ValueError("the hash differs")
        return memory

    def write(self, key: bytes, content: bytes, features: FeatureBytes, created: float) -> int:
        """Bytes of the new file; 0 without one: the image was deleted after the features were `created` (Unix
        seconds), they are larger than the whole budget, or the disk is full."""
        header = json.dumps(
            {
                "features": {
                    "dtype": features.dtype,
                    "shape": list(features.shape),
                    "data_offsets": [0, len(features.data)],
                },
                "__metadata__": {"blake3": _hash(key, features), "view": key.hex(), "content": content.hex()},
            }
        ).encode()
        header += b" " * (-len(header) % 8)  # the format aligns the data
        nbytes = _LENGTH.size + len(header) + len(features.data)
        if nbytes > self.budget or self._deleted_since(content, created):
            return 0
        temporary, path = self._temporary(), self._path(key, content)
        try:
            _write(temporary, [_LENGTH.pack(len(header)), header, features.data])
            temporary.rename(path)
        except OSError:
            _remove(temporary)
            return 0
        # A deleter leaves the mark and then looks for files; a writer does the reverse. So one sees the
        # other.
        if self._deleted_since(content, created):
            _remove(path)
            return 0
        return nbytes

    def make_room(self) -> FolderListing:
        """Evict files, read longest ago first, until the folder is within its budget."""
        listing = self.list()
        if listing.nbytes <= self.budget:
            return listing
        total = listing.nbytes
        for file in sorted(self._files(), key=lambda file: file.modified):
            if total <= self.budget:
                break
            if file.name.endswith(".safetensors"):
                _remove(file.path)
                total -= file.nbytes
        return self.list()

    def delete(self, content: bytes) -> None:
        self.delete_all({content: time.time()})

    def delete_all(self, deleted: Mapping[bytes, float]) -> None:
        """Delete every view of these images, and mark each for the other servers with the time of its
        deletion (Unix seconds).

        A client may name images that do not exist. So only file names are read, once for all images, and at
        most `MAX_MARKS` marks of unknown images are left."""
        contents = {content.hex(): content for content in deleted}
        names = list(self._names())
        present = {name.partition(".")[0] for name in names if name.endswith(".safetensors")}
        room = MAX_MARKS - sum(name.endswith(".deleted") for name in names)
        for name, content in contents.items():
            if name in present or room > 0:
                self._leave_mark(content, deleted[content])
                room -= name not in present
        for name in self._names():
            if name.endswith(".safetensors") and name.partition(".")[0] in contents:
                _remove(self._home / name)

    def _names(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._home):
                yield entry.name

    def _leave_mark(self, content: bytes, when: float) -> None:
        mark = self._home / f"{content.hex()}.deleted"
        with contextlib.suppress(OSError):
            new = not mark.exists()
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
            if new or mark.stat().st_mtime < when:  # another server may have deleted it later
                os.utime(mark, (when, when))  # the file system's clock may lag

    def _deleted_since(self, content: bytes, created: float) -> bool:
        try:
            return (self._home / f"{content.hex()}.deleted").stat().st_mtime >= created
        except OSError:
            return False

    def _path(self, key: bytes, content: bytes) -> Path:
        return self._home / f"{content.hex()}.{key.hex()}.safetensors"

    def _temporary(self) -> Path:
        return self._home / f".writing-{os.getpid()}-{secrets.token_hex(8)}"


def _hash(key: bytes, features: FeatureBytes) -> str:
    """Covers everything a reader relies on: key, dtype, shape and data."""
    hasher = blake3(f"{key.hex()} {features.dtype} {list(features.shape)} ".encode())
    hasher.update(features.data)
    return hasher.hexdigest()


def _write(path: Path, parts: list[bytes | memoryview]) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for part in parts:
            file.write(part)


def _parse_name(name: str) -> tuple[bytes, bytes] | None:
    """Content and key in a file name."""
    content, _, rest = name.partition(".")
    key, _, end = rest.partition(".")
    found = _hex(content), _hex(key)
    return (found[0], found[1]) if end == "safetensors" and found[0] and found[1] else None


def _hex(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def _remove(path: str | Path) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()
