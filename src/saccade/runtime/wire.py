"""The words front and engine say to each other, and the channel they travel on.

takes   messages (msgspec structs)
gives   the same messages in the other process; pixels arrive as shared memory, not as bytes
owns    one end of a socket pair
never   unpickles, names a file or listens: the socket pair is inherited, the memory is anonymous
"""

import contextlib
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
from saccade.metrics import EngineStats
from saccade.raster import contiguous
from saccade.request import Delta, Request


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


class Channel:
    """One end of the pair. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: ToEngine | ToFront) -> None:
        arrays: list[np.ndarray[Any, Any]] = []
        offset = 0

        def place(value: Any) -> dict[str, Any]:
            nonlocal offset
            if isinstance(value, np.ndarray) and value.dtype == np.float32:  # maps of a look: small
                return {"float32": value.tobytes(), "shape": list(value.shape)}
            if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
                raise TypeError(f"{type(value).__name__} cannot cross the link")
            arrays.append(value)
            here, offset = offset, offset + value.nbytes
            return {"offset": here, "shape": list(value.shape)}

        body = msgspec.msgpack.encode(message, enc_hook=place)
        memory = _shared_copy(arrays) if offset else None  # before the lock: others need not wait
        header = _HEADER.pack(len(body), offset)
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
        memory, pixels = None, np.empty(0, dtype=np.uint8)
        try:
            header, memory = self._receive_header()
            if header is None:
                return None
            length, shared = _HEADER.unpack(header)
            body = self._read(length)
            if memory is not None:
                pixels = _read_all(memory, shared)
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
            start, shape = value["offset"], tuple(value["shape"])
            count = int(np.prod(shape, dtype=np.int64))
            if start < 0 or start + count > len(pixels):
                raise ValueError("a message names pixels that did not come with it")
            return pixels[start : start + count].reshape(shape)

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


def _shared_copy(arrays: list[np.ndarray[Any, Any]]) -> int:
    """The arrays one after the other in anonymous memory; gives its file descriptor.

    Written and read as a file is: unlike copies into a mapping, that leaves other threads running.
    """
    memory = _anonymous_memory()
    try:
        for array in arrays:
            left = contiguous(array).reshape(-1).data  # empty, of a named picture
            while left:
                left = left[os.write(memory, left) :]
    except BaseException:
        os.close(memory)
        raise
    return memory


def _read_all(memory: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # Not of the heap: pixels wait as long as their request, and would leave holes among what lives shortly.
    content = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    place = 0
    while place < size:
        count = os.preadv(memory, [content.data[place:]], place)
        if not count:
            raise OSError(f"shared memory ends after {place} of {size} bytes")
        place += count
    return content


def _anonymous_memory() -> int:
    """A file descriptor of memory without a name, so nothing can leak or be opened by others."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saccade-pixels", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())
