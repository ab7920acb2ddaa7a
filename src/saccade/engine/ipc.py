"""The words front and engine say to each other, and the channel they travel on.

takes   messages (msgspec structs)
gives   the same messages in the other process; pixels arrive as shared memory, not as bytes
owns    one end of a socket pair
never   unpickles, names a file or listens: the socket pair is inherited, the memory is anonymous
"""

import contextlib
import math
import mmap
import os
import socket
import struct
import tempfile
import threading
from typing import Any

import msgspec
import numpy as np

from saccade.config import EngineConfig
from saccade.errors import EngineDied
from saccade.inputs.media.rgbx import OPAQUE, contiguous, rgb_of_words, words_of_rgb
from saccade.metrics import EngineStats
from saccade.request import Delta, Pixels, Request


class EngineInfo(msgspec.Struct, frozen=True):
    """What the front needs to know of an engine that is ready."""

    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    device: str
    dtype: str


class Start(msgspec.Struct, frozen=True, tag=True):
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Recall(msgspec.Struct, frozen=True, tag=True):
    """What is kept of a picture? With `drop`, forget it."""

    number: int  # of the question
    content: bytes
    drop: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or stopped for a reason it can tell."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request the engine cannot take; `code` names the error class (errors.py)."""

    request_id: str
    code: str
    message: str
    param: str | None


class Recalled(msgspec.Struct, frozen=True, tag=True):
    """How many views of the picture each tier keeps; or had, when they were dropped."""

    number: int
    tiers: dict[str, int]


class News(msgspec.Struct, frozen=True, tag=True):
    """What one step brought."""

    deltas: tuple[Delta, ...]
    stats: EngineStats


ToEngine = Start | Submit | Cancel | Recall | Stop
ToFront = Ready | Failed | Refused | Recalled | News

_HEADER = struct.Struct("<QQ")  # bytes of the message, bytes of shared memory (0: none)
ALIGNED = 16  # bytes: where an array may begin in it


class Channel:
    """One end of the pair. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: ToEngine | ToFront) -> None:
        arrays: list[tuple[int, np.ndarray[Any, Any]]] = []
        size = 0  # of the shared memory

        def place(value: Any) -> dict[str, Any]:
            nonlocal size
            if isinstance(value, np.ndarray) and value.dtype == np.float32:  # maps of a look: small
                return {"float32": value.tobytes(), "shape": list(value.shape)}
            if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
                raise TypeError(f"{type(value).__name__} cannot cross the link")
            words = words_of_rgb(value)  # they go as they lie: to take the fourth byte out is more work
            lying = contiguous(value) if words is None else words
            here = -(-size // ALIGNED) * ALIGNED
            arrays.append((here, lying))
            size = here + lying.nbytes
            return {"offset": here, "shape": list(value.shape), "words": words is not None}

        body = msgspec.msgpack.encode(message, enc_hook=place)
        memory = _shared_copy(arrays, size) if size else None  # before the lock: others need not wait
        header = _HEADER.pack(len(body), size)
        try:
            with self._sending:
                if memory is None:
                    self._sock.sendall(header + body)
                else:
                    socket.send_fds(self._sock, [header], [memory])
                    self._sock.sendall(body)
        except OSError as error:
            raise EngineDied("the other end of the link is gone") from error
        finally:
            if memory is not None:
                os.close(memory)

    def receive(self, kind: Any) -> Any:
        """The next message, decoded as the union `kind`; None once the other end is closed."""
        memory: int | None = None
        shared: mmap.mmap | bytes = b""
        try:
            header, memory = self._receive_header()
            if header is None:
                return None
            length, size = _HEADER.unpack(header)
            body = self._read(length)
            if memory is not None:
                shared = _read_all(memory, size)
        except OSError:
            return None
        finally:
            if memory is not None:
                os.close(memory)
        if body is None:
            return None

        def restore(type_: Any, value: Any) -> Any:
            if "float32" in value:
                return np.frombuffer(value["float32"], dtype=np.float32).reshape(value["shape"])
            return _restored(shared, value["offset"], tuple(value["shape"]), words=value["words"])

        return msgspec.msgpack.decode(body, type=kind, dec_hook=restore)

    def _receive_header(self) -> tuple[bytes | None, int | None]:
        first, fds, _, _ = socket.recv_fds(self._sock, _HEADER.size, 1)
        if not first:
            return None, None
        rest = self._read(_HEADER.size - len(first))
        return (None if rest is None else first + rest), (fds[0] if fds else None)

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        # Wakes a receive() that is blocked in another thread, which close() alone would not.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _shared_copy(arrays: list[tuple[int, np.ndarray[Any, Any]]], size: int) -> int:
    """The arrays, each at its place, in anonymous memory of that size; gives its file descriptor.

    Written and read as a file is: unlike copies into a mapping, that leaves other threads running.
    """
    memory = _anonymous_memory()
    try:
        os.ftruncate(memory, size)
        for place, array in arrays:
            left = array.reshape(-1).view(np.uint8).data  # empty, of a named picture
            while left:
                count = os.pwrite(memory, left, place)
                left, place = left[count:], place + count
    except BaseException:
        os.close(memory)
        raise
    return memory


def _read_all(memory: int, size: int) -> mmap.mmap:
    # Not of the heap: pixels wait as long as their request, and would leave holes among what lives shortly.
    content = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place, whole = 0, memoryview(content)
    while place < size:
        count = os.preadv(memory, [whole[place:]], place)
        if not count:
            raise OSError(f"shared memory ends after {place} of {size} bytes")
        place += count
    return content


def _restored(shared: mmap.mmap | bytes, offset: int, shape: tuple[int, ...], *, words: bool) -> Pixels:
    """Pixels where they lie in what came with a message."""
    count = math.prod(shape) // 3 * 4 if words else math.prod(shape)
    if offset < 0 or min(shape, default=0) < 0 or offset + count > len(shared):
        raise ValueError("a message names pixels that did not come with it")
    if not count:
        return np.empty(shape, dtype=np.uint8)
    if not words:
        return np.ndarray(shape, dtype=np.uint8, buffer=shared, offset=offset)
    if len(shape) != 4 or shape[0] != 1 or shape[3] != 3 or offset % ALIGNED:
        raise ValueError(f"pixels of the shape {shape} at {offset} are no words")
    return rgb_of_words(np.ndarray(shape[1:3], dtype=OPAQUE.dtype, buffer=shared, offset=offset))


def _anonymous_memory() -> int:
    """A file descriptor of memory without a name, so nothing can leak or be opened by others."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saccade-pixels", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())
