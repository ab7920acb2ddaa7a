"""Messages between the API server and the engine core, and the channel that carries them.

Messages are msgspec structs over an inherited socket pair; pixels travel in anonymous shared memory. Nothing
is unpickled, no file is named and no port is opened.
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
from saccade.inputs.media.decode import OPAQUE, contiguous, rgb_of_words, words_of_rgb
from saccade.metrics import EngineStats
from saccade.request import Delta, Pixels, Request


class EngineInfo(msgspec.Struct, frozen=True):
    """What the API server needs to know about a running engine core."""

    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    device: str
    dtype: str
    weight_bytes: int
    quantization: dict[str, str]  # the scheme of each stage: decoder, vision, head


class Start(msgspec.Struct, frozen=True, tag=True):
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class ImageQuery(msgspec.Struct, frozen=True, tag=True):
    """Ask how many views of an image each cache tier holds; with `delete`, delete them."""

    query_id: int
    content: bytes  # content hash
    delete: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine core could not start, or stopped for a known reason."""

    message: str


class RequestRejected(msgspec.Struct, frozen=True, tag=True):
    """The engine core cannot accept a request; `code` names the error class (errors.py)."""

    request_id: str
    code: str
    message: str
    param: str | None


class ImageQueryReply(msgspec.Struct, frozen=True, tag=True):
    """Views of the image by cache tier, counted before a deletion."""

    query_id: int
    tiers: dict[str, int]


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """The output of one step."""

    deltas: tuple[Delta, ...]
    stats: EngineStats


ToEngine = Start | Submit | Cancel | ImageQuery | Stop
ToFrontend = EngineReady | EngineFailed | RequestRejected | ImageQueryReply | StepOutputs

_HEADER = struct.Struct("<QQ")  # bytes of the message, bytes of shared memory (0: none)
ALIGNMENT = 16  # bytes, of arrays in the shared memory


class Channel:
    """One end of the pair. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: ToEngine | ToFrontend) -> None:
        arrays: list[tuple[int, np.ndarray[Any, Any]]] = []
        size = 0  # of the shared memory

        def encode_array(value: Any) -> dict[str, Any]:
            nonlocal size
            if isinstance(value, np.ndarray) and value.dtype == np.float32:  # relevance maps: small
                return {"float32": value.tobytes(), "shape": list(value.shape)}
            if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
                raise TypeError(f"{type(value).__name__} cannot be sent to another process")
            words = words_of_rgb(value)  # RGBX is sent as it is: dropping the fourth byte costs more
            array = contiguous(value) if words is None else words
            offset = -(-size // ALIGNMENT) * ALIGNMENT
            arrays.append((offset, array))
            size = offset + array.nbytes
            return {"offset": offset, "shape": list(value.shape), "words": words is not None}

        body = msgspec.msgpack.encode(message, enc_hook=encode_array)
        memory = _shared_copy(arrays, size) if size else None  # outside the lock
        header = _HEADER.pack(len(body), size)
        try:
            with self._sending:
                if memory is None:
                    self._sock.sendall(header + body)
                else:
                    socket.send_fds(self._sock, [header], [memory])
                    self._sock.sendall(body)
        except OSError as error:
            raise EngineDied("the other process has closed the channel") from error
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

        def decode_array(type_: Any, value: Any) -> Any:
            if "float32" in value:
                return np.frombuffer(value["float32"], dtype=np.float32).reshape(value["shape"])
            return _restore_pixels(shared, value["offset"], tuple(value["shape"]), words=value["words"])

        return msgspec.msgpack.decode(body, type=kind, dec_hook=decode_array)

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
    """Copy the arrays to their offsets in anonymous memory; return its file descriptor.

    Written and read as a file: unlike a copy into a mapping, that releases the GIL.
    """
    memory = _anonymous_memory()
    try:
        os.ftruncate(memory, size)
        for offset, array in arrays:
            left = array.reshape(-1).view(np.uint8).data  # empty for a named image
            while left:
                count = os.pwrite(memory, left, offset)
                left, offset = left[count:], offset + count
    except BaseException:
        os.close(memory)
        raise
    return memory


def _read_all(memory: int, size: int) -> mmap.mmap:
    # Not on the heap: pixels live as long as their request and would fragment it.
    content = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset, whole = 0, memoryview(content)
    while offset < size:
        count = os.preadv(memory, [whole[offset:]], offset)
        if not count:
            raise OSError(f"shared memory ends after {offset} of {size} bytes")
        offset += count
    return content


def _restore_pixels(shared: mmap.mmap | bytes, offset: int, shape: tuple[int, ...], *, words: bool) -> Pixels:
    """Pixels as a view of the shared memory that came with the message."""
    count = math.prod(shape) // 3 * 4 if words else math.prod(shape)
    if offset < 0 or min(shape, default=0) < 0 or offset + count > len(shared):
        raise ValueError("a message names pixels that did not come with it")
    if not count:
        return np.empty(shape, dtype=np.uint8)
    if not words:
        return np.ndarray(shape, dtype=np.uint8, buffer=shared, offset=offset)
    if len(shape) != 4 or shape[0] != 1 or shape[3] != 3 or offset % ALIGNMENT:
        raise ValueError(f"pixels of the shape {shape} at {offset} are no words")
    return rgb_of_words(np.ndarray(shape[1:3], dtype=OPAQUE.dtype, buffer=shared, offset=offset))


def _anonymous_memory() -> int:
    """A file descriptor of unnamed memory, which nothing can leak and no other process can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saccade-pixels", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())
