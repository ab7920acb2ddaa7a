"""Features as files in a folder that several servers may share.

takes   features as bytes, by view key and content
gives   them back, or None: a file that is missing, damaged or somebody else's is a miss, never an error
owns    the names and the format of the files; the folder's budget of bytes
never   locks: what is written appears whole, by renaming; what is read is checked against its sum

    FOLDER/IDENTITY/CONTENT.KEY.safetensors    one view; any safetensors reader opens it
    FOLDER/IDENTITY/CONTENT.deleted            the picture was deleted then; older features must not come back
    FOLDER/IDENTITY/.writing-...               a file being written

IDENTITY names the weights and the dtype the features came from. The budget is for all of FOLDER, whatever
model wrote it; the file read longest ago goes first. All of this blocks: threads call it.
"""

import contextlib
import json
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from saccade.encoder.cache.transfer_api import Slab
from saccade.errors import ConfigError

_LENGTH = struct.Struct("<Q")  # of the header, in front of it
MOST_HEADER = 1 << 16
_VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
LEFTOVER_SECONDS = 3600.0  # after which a file being written has been abandoned
DELETED_SECONDS = 3600.0  # a mark of deletion is kept: far longer than a server takes to notice it
MOST_MARKS = 4096  # of deletions at any time, but for pictures that have files

Blank = Callable[[str, tuple[int, ...]], tuple[Any, memoryview]]  # dtype, shape -> memory, its bytes


class Found(NamedTuple):
    content: bytes
    nbytes: int  # of the file


@dataclass(frozen=True)
class Listing:
    """The folder as it was at one moment."""

    views: dict[bytes, Found]  # by key, of our identity
    deleted: dict[bytes, float]  # content -> when (Unix seconds)
    nbytes: int  # of everything, other identities included


@dataclass(frozen=True)
class _File:
    path: str
    name: str
    nbytes: int
    modified: float
    ours: bool


class Folder:
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

    def list(self) -> Listing:
        """What there is now; outlived files are removed on the way."""
        views: dict[bytes, Found] = {}
        deleted: dict[bytes, float] = {}
        total = 0
        now = time.time()
        for file in self._files():
            if self._outlived(file, now):
                _remove(file.path)
                continue
            total += file.nbytes
            if file.ours and (named := _named(file.name)):
                views[named[1]] = Found(named[0], file.nbytes)
            elif file.ours and file.name.endswith(".deleted") and (content := _hex(file.name[:-8])):
                deleted[content] = file.modified
        return Listing(views, deleted, total)

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

    def _outlived(self, file: _File, now: float) -> bool:
        age = now - file.modified
        if file.name.startswith(".writing-"):
            return age > LEFTOVER_SECONDS
        if file.name.endswith(".deleted"):
            return age > DELETED_SECONDS
        return self._ttl is not None and file.name.endswith(".safetensors") and age > self._ttl

    # One view

    def read(self, key: bytes, content: bytes, blank: Blank) -> Any | None:
        """The features in memory from `blank`, or None."""
        path = self._path(key, content)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            memory = self._read(file, key, blank)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            memory = None
        finally:
            os.close(file)
        if memory is None:
            _remove(path)  # damaged: it would only be read in vain again
        else:
            with contextlib.suppress(OSError):
                os.utime(path)  # read now, so the last to go
        return memory

    def _read(self, file: int, key: bytes, blank: Blank) -> Any:
        size = os.fstat(file).st_size
        (length,) = _LENGTH.unpack(os.pread(file, _LENGTH.size, 0).ljust(_LENGTH.size, b"\xff"))
        if length > MOST_HEADER:
            raise ValueError("not a header")
        header = json.loads(os.pread(file, length, _LENGTH.size))
        tensor, told = header["features"], header["__metadata__"]
        dtype, shape = tensor["dtype"], tuple(int(side) for side in tensor["shape"])
        begin = _LENGTH.size + length
        nbytes = _VALUE_BYTES[dtype] * _product(shape)
        if size - begin != nbytes or tensor["data_offsets"] != [0, nbytes]:
            raise ValueError("the file is cut off")
        memory, data = blank(dtype, shape)
        place = 0
        while place < nbytes:
            count = os.preadv(file, [data[place:]], begin + place)
            if not count:
                raise ValueError("the file is cut off")
            place += count
        if told["blake3"] != _sum(key, Slab(dtype, shape, data)):
            raise ValueError("the sum differs")
        return memory

    def write(self, key: bytes, content: bytes, slab: Slab, made: float) -> int:
        """Bytes of the new file; 0 if there is none: it was deleted after it was `made` (Unix seconds), it
        is larger than the whole budget, or the disk is full."""
        header = json.dumps(
            {
                "features": {
                    "dtype": slab.dtype,
                    "shape": list(slab.shape),
                    "data_offsets": [0, len(slab.data)],
                },
                "__metadata__": {"blake3": _sum(key, slab), "view": key.hex(), "content": content.hex()},
            }
        ).encode()
        header += b" " * (-len(header) % 8)  # the data is aligned, as the format has it
        nbytes = _LENGTH.size + len(header) + len(slab.data)
        if nbytes > self.budget or self._deleted_since(content, made):
            return 0
        temporary, path = self._temporary(), self._path(key, content)
        try:
            _write(temporary, [_LENGTH.pack(len(header)), header, slab.data])
            temporary.rename(path)
        except OSError:
            _remove(temporary)
            return 0
        # Whoever deletes leaves the mark first and looks for files then; whoever writes does it the other way
        # round. So one of the two sees the other.
        if self._deleted_since(content, made):
            _remove(path)
            return 0
        return nbytes

    def make_room(self) -> Listing:
        """Removes what was read longest ago until the folder is within its budget."""
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
        """Every view of some pictures, and for the other servers a mark that each is to be forgotten, with
        the time it was deleted (Unix seconds).

        Anybody may ask for this with names made up: it reads names alone, once for all pictures, and leaves
        no marks of unknown ones beyond `MOST_MARKS`."""
        contents = {content.hex(): content for content in deleted}
        names = list(self._names())
        here = {name.partition(".")[0] for name in names if name.endswith(".safetensors")}
        room = MOST_MARKS - sum(name.endswith(".deleted") for name in names)
        for shown, content in contents.items():
            if shown in here or room > 0:
                self._leave_mark(content, deleted[content])
                room -= shown not in here
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
            if new or mark.stat().st_mtime < when:  # another server may have deleted it since
                os.utime(mark, (when, when))  # the file system's own clock may lag behind

    def _deleted_since(self, content: bytes, made: float) -> bool:
        try:
            return (self._home / f"{content.hex()}.deleted").stat().st_mtime >= made
        except OSError:
            return False

    def _path(self, key: bytes, content: bytes) -> Path:
        return self._home / f"{content.hex()}.{key.hex()}.safetensors"

    def _temporary(self) -> Path:
        return self._home / f".writing-{os.getpid()}-{secrets.token_hex(8)}"


def _sum(key: bytes, slab: Slab) -> str:
    """Over everything a reader goes by: whose features these are, how to read them, and they themselves."""
    hasher = blake3(f"{key.hex()} {slab.dtype} {list(slab.shape)} ".encode())
    hasher.update(slab.data)
    return hasher.hexdigest()


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        if not 0 <= side < 1 << 40:
            raise ValueError("not a shape")
        product *= side
    return product


def _write(path: Path, parts: list[Any]) -> None:
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(file, left) :]
    finally:
        os.close(file)


def _named(name: str) -> tuple[bytes, bytes] | None:
    """Content and key of a file."""
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
