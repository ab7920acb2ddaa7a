"""Pixel uploads: pinned staging buffers, and device copies that all views of an image share."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from saccade.inputs.media.decode import words_of_rgb
from saccade.request import Pixels

STAGING_BYTES = 256 << 20
MIN_BUFFER_BYTES = 1 << 20  # buffer sizes are powers of two, so that few buffers serve all images
UPLOADED_BYTES = 128 << 20  # about 40 images of 1024 x 1024
MAX_DELETED = 4096  # deleted images remembered: more than there can be requests in flight


class CopyEvent(Protocol):
    """Recorded on the stream behind a copy."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class PinnedStaging:
    """Pinned host buffers for uploads. A buffer is reused once its copy has finished; the host waits for a
    copy only when all `max_bytes` are in use."""

    def __init__(
        self,
        device: torch.device,
        max_bytes: int = STAGING_BYTES,
        *,
        allocate: Callable[[int], Tensor] | None = None,
        record: Callable[[], CopyEvent] | None = None,
    ) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._allocate = allocate if allocate is not None else _allocate_pinned
        self._record = record if record is not None else _record_event
        self._buffers: list[tuple[Tensor, CopyEvent]] = []  # least recently used first

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _ in self._buffers)

    def send(self, pixels: Pixels) -> Tensor:
        """A copy on the device, ready for whatever the current stream does next."""
        words = words_of_rgb(pixels)
        source = pixels if words is None else words.view(np.uint8).reshape(*pixels.shape[:3], 4)
        buffer = self._take_buffer(max(source.nbytes, 1))
        host = buffer[: source.nbytes].view(source.shape)
        host.numpy()[...] = source  # the array may be read-only shared memory, which torch does not wrap
        sent = host.to(self._device, non_blocking=True, copy=True)
        self._buffers.append((buffer, self._record()))
        return sent if words is None else sent[..., :3].contiguous()

    def _take_buffer(self, nbytes: int) -> Tensor:
        """Take the smallest idle buffer that fits out of the list, or allocate one."""
        size = max(1 << (nbytes - 1).bit_length(), MIN_BUFFER_BYTES)
        fitting = [item for item in self._buffers if item[0].nbytes >= size]
        for item in sorted(fitting, key=lambda one: one[0].nbytes):
            if item[1].query():
                self._remove(item)
                return item[0]
        while self._buffers and self.nbytes + size > self._max_bytes:
            oldest = self._buffers[0]
            oldest[1].synchronize()
            self._remove(oldest)
            if oldest[0].nbytes >= size:
                return oldest[0]
        return self._allocate(size)

    def _remove(self, item: tuple[Tensor, CopyEvent]) -> None:
        self._buffers = [other for other in self._buffers if other is not item]


def _allocate_pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _record_event() -> CopyEvent:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class PixelUploads:
    """Device copies of pixels, LRU within `max_bytes`, shared by the global view, the texture and zoomed
    views.

    The key is the image's content hash, since every question brings an array of its own. Images without a
    hash and deleted images are keyed by their array and live as long as it. The cache never keeps an array
    alive: pixels are in shared memory, which is returned when the request ends.
    """

    def __init__(self, send: Callable[[Pixels], Tensor], max_bytes: int = UPLOADED_BYTES) -> None:
        self._send = send
        self._max_bytes = max_bytes
        self._copies: OrderedDict[bytes | int, tuple[weakref.ref[Pixels], Tensor]] = OrderedDict()
        self._deleted: OrderedDict[bytes, None] = OrderedDict()  # oldest first

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._copies.values())

    def send(self, pixels: Pixels, content: bytes = b"") -> Tensor:
        """A copy on the device, to be read only. `content` is the image's hash, if it has one."""
        name = content if content and content not in self._deleted else id(pixels)
        known = self._copies.get(name)
        if known is not None and (
            known[1].shape == pixels.shape if name == content else known[0]() is pixels
        ):
            self._copies.move_to_end(name)
            return known[1]
        # Dead arrays are found here, not by a weakref callback, which could run in any thread.
        arrays = [(other, array) for other, (array, _) in self._copies.items() if isinstance(other, int)]
        for other in [other for other, array in arrays if array() is None]:
            del self._copies[other]
        copy = self._send(pixels)
        self._copies[name] = weakref.ref(pixels), copy
        while self.nbytes > self._max_bytes:
            self._copies.popitem(last=False)
        return copy

    def forget(self, content: bytes) -> None:
        """The image was deleted. Requests in flight may still upload it; no copy outlives their arrays."""
        self._copies.pop(content, None)
        self._deleted[content] = None
        self._deleted.move_to_end(content)
        while len(self._deleted) > MAX_DELETED:
            self._deleted.popitem(last=False)

    def check(self) -> None:
        """Raise unless the bound holds, each copy matches its array, and no deleted image is kept by hash."""
        if self.nbytes > self._max_bytes:
            raise RuntimeError(f"{self.nbytes} bytes of pixels are kept; the limit is {self._max_bytes}")
        for name, (array, copy) in self._copies.items():
            alive = array()
            other = isinstance(name, int) and id(alive) != name
            if alive is not None and (other or tuple(copy.shape) != alive.shape):
                raise RuntimeError("a copy is kept under another array's name")
            if name in self._deleted:
                raise RuntimeError("a copy of a deleted image is kept under its hash")
