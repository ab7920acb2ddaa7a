"""Pixels on their way up: pinned memory that is used again, instead of pinned anew for every picture.

takes   arrays of bytes
gives   their copies on the device, without waiting for them
owns    pinned buffers, each with a mark of when the device has read it
never   writes to a buffer the device may still be reading; waits, unless every byte of the bound is in use
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from saccade.inputs.media.rgbx import words_of_rgb
from saccade.request import Pixels

MOST_BYTES = 256 << 20
LEAST_BYTES = 1 << 20  # of a buffer; sizes are powers of two, so that few serve all pictures


class Mark(Protocol):
    """Stands in the stream behind a copy."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Staging:
    def __init__(
        self,
        device: torch.device,
        most_bytes: int = MOST_BYTES,
        *,
        allocate: Callable[[int], Tensor] | None = None,
        mark: Callable[[], Mark] | None = None,
    ) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._allocate = allocate if allocate is not None else _pinned
        self._mark = mark if mark is not None else _recorded
        self._buffers: list[tuple[Tensor, Mark]] = []  # last used longest ago first

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _ in self._buffers)

    def send(self, pixels: Pixels) -> Tensor:
        """A copy on the device; it is there for whatever the current stream does next."""
        words = words_of_rgb(pixels)
        source = pixels if words is None else words.view(np.uint8).reshape(*pixels.shape[:3], 4)
        buffer = self._free(max(source.nbytes, 1))
        host = buffer[: source.nbytes].view(source.shape)
        host.numpy()[...] = source  # the array may be read-only shared memory, which torch will not wrap
        sent = host.to(self._device, non_blocking=True, copy=True)
        self._buffers.append((buffer, self._mark()))
        return sent if words is None else sent[..., :3].contiguous()

    def _free(self, nbytes: int) -> Tensor:
        """A buffer nobody reads, out of the list: the smallest that fits and is free, or a new one."""
        size = max(1 << (nbytes - 1).bit_length(), LEAST_BYTES)
        fitting = [item for item in self._buffers if item[0].nbytes >= size]
        for item in sorted(fitting, key=lambda one: one[0].nbytes):
            if item[1].query():
                self._remove(item)
                return item[0]
        while self._buffers and self.nbytes + size > self._most_bytes:
            oldest = self._buffers[0]
            oldest[1].synchronize()
            self._remove(oldest)
            if oldest[0].nbytes >= size:
                return oldest[0]
        return self._allocate(size)

    def _remove(self, item: tuple[Tensor, Mark]) -> None:
        self._buffers = [other for other in self._buffers if other is not item]


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _recorded() -> Mark:
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record()
    return mark
