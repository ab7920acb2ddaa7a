"""The memory behind kv_cache/swap_space.py: KV blocks in host memory, and the copies there and back.

takes   a step's swaps: (block, slot) out, (slot, block) in
gives   the copies, in an order that lets every block be written again at once
owns    the host memory (pinned on CUDA), the copy stream and its staging buffers
never   decides what is copied, or waits for the device (but once, to measure the rate)

On CUDA all work of steps is on one stream, the main one; the slow copies over the link are on another.

out   A block may be written by this very step. So the main stream gathers the blocks into a staging buffer
      first, in front of everything else the step does: that is a copy at memory speed. The copy stream
      waits for the gathering (an event) and copies the buffer to the slots. There are two buffers; the main
      stream waits for a buffer whose copy is still under way, nothing else.
in    The blocks belong to a sequence that does not run in this step (unless the step is told to wait). The
      copy stream waits for the main stream as it stands behind the gathering (everyone who ever used those
      blocks is before that), copies slots to a staging buffer, and from there into the blocks, while the
      main stream runs the step. The next step, or this one if it is to wait, begins by waiting for it.
slots Both directions are on the copy stream, in the order of the plans: a slot is read before it is written
      again, and written before it is read.

Elsewhere (CPU) the copies are made at once. Written for CUDA with care, but not yet run on a chip.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kv_cache.pages import BlockStorage, Pages

STAGED = 32  # blocks of a staging buffer; there are three
Pairs = Sequence[tuple[int, int]]


def bytes_of_block(pages: Pages) -> int:
    """Of the largest kind of block: the size of a slot."""
    return max(sum(_width(tensor) for tensor in part.tensors) for part in pages.parts())


def _width(tensor: Tensor) -> int:
    """Bytes of one block in [layers, blocks, ...]."""
    return tensor[:, 0].numel() * tensor.element_size()


@dataclass
class _Buffer:
    rows: Tensor  # [STAGED, slot bytes] uint8 on the device
    done: torch.cuda.Event  # recorded when whoever reads it has finished


class HostPages:
    def __init__(self, pages: Pages, slots: int) -> None:
        self._parts = pages.parts()
        self._device = pages.k.device
        self._on_cuda = self._device.type == "cuda"
        width = bytes_of_block(pages)
        try:
            self._slots = torch.empty(slots, width, dtype=torch.uint8, pin_memory=self._on_cuda)
        except (RuntimeError, MemoryError):
            raise ConfigError(
                f"host memory has no {slots * width} bytes for the KV of requests that give way; lower "
                "--swap-bytes"
            ) from None
        if self._on_cuda:
            self._copying = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._arrived: torch.cuda.Event | None = None  # blocks that come in, until somebody has waited
            buffers = [torch.empty(STAGED, width, dtype=torch.uint8, device=self._device) for _ in range(3)]
            self._leaving = [_Buffer(rows, _event()) for rows in buffers[:2]]
            self._coming = buffers[2]

    @staticmethod
    def staging_bytes(block_bytes: int) -> int:
        """Of device memory, on CUDA."""
        return 3 * STAGED * block_bytes

    @property
    def slots(self) -> int:
        return self._slots.shape[0]

    @property
    def slot_bytes(self) -> int:
        return self._slots.shape[1]

    def swap(self, out: Pairs, back: Pairs, *, wait: bool) -> None:
        """The swaps of a step, before anything else it does. With `wait` its rows read what comes back."""
        if not self._on_cuda:
            for part, pairs in self._by_part(out, 0):
                slots, blocks = _columns([(slot, block) for block, slot in pairs])
                rows = _gather(part, blocks)
                self._slots[slots, : rows.shape[1]] = rows
            for part, pairs in self._by_part(back, 1):
                slots, blocks = _columns(pairs)
                _scatter(part, blocks, self._slots[slots])
            return
        main = torch.cuda.current_stream(self._device)
        if self._arrived is not None:
            main.wait_event(self._arrived)
            self._arrived = None
        self._send(out, main)
        if back:
            arrived = self._fetch(back)
            self._arrived = None if wait else arrived
            if wait:
                main.wait_event(arrived)

    def _send(self, out: Pairs, main: torch.cuda.Stream) -> None:
        for part, pairs in self._by_part(out, 0):
            for chunk in _chunks(pairs):
                buffer = self._leaving[0]
                self._leaving.reverse()
                main.wait_event(buffer.done)  # of the copy before the last; nothing if never recorded
                blocks = torch.tensor([block for block, _ in chunk]).pin_memory()
                rows = _gather(part, blocks.to(self._device, non_blocking=True))
                width = rows.shape[1]
                buffer.rows[: len(chunk), :width] = rows
                self._copying.wait_stream(main)
                with torch.cuda.stream(self._copying):
                    for row, (_, slot) in enumerate(chunk):
                        self._slots[slot, :width].copy_(buffer.rows[row, :width], non_blocking=True)
                    buffer.done.record(self._copying)

    def _fetch(self, back: Pairs) -> torch.cuda.Event:
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            for part, pairs in self._by_part(back, 1):
                for chunk in _chunks(pairs):
                    for row, (slot, _) in enumerate(chunk):
                        self._coming[row].copy_(self._slots[slot], non_blocking=True)
                    blocks = torch.tensor([block for _, block in chunk]).pin_memory()
                    _scatter(part, blocks.to(self._device, non_blocking=True), self._coming[: len(chunk)])
            arrived = _event()
            arrived.record(self._copying)
        return arrived

    def _by_part(self, pairs: Pairs, block_at: int) -> Iterator[tuple[BlockStorage, list[tuple[int, int]]]]:
        """The pairs whose blocks are in each part."""
        for part in self._parts:
            inside = [p for p in pairs if part.first <= p[block_at] < part.first + part.blocks]
            if inside:
                yield part, inside

    def measure_rate(self) -> float:
        """Bytes/s of blocks going out and coming back, measured on some that nobody uses yet."""
        count = min(STAGED, self.slots, self._parts[0].blocks)
        first = self._parts[0].first
        out = [(first + index, index) for index in range(count)]
        back = [(slot, block) for block, slot in out]
        self.swap(out, back, wait=True)  # the first time is not typical
        self._finish()
        began = time.perf_counter()
        self.swap(out, back, wait=True)
        self._finish()
        moved = 2 * count * sum(_width(tensor) for tensor in self._parts[0].tensors)
        return moved / max(time.perf_counter() - began, 1e-9)

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _chunks(pairs: Pairs) -> Iterator[Pairs]:
    return (pairs[start : start + STAGED] for start in range(0, len(pairs), STAGED))


def _columns(pairs: Pairs) -> tuple[Tensor, Tensor]:
    numbers = torch.tensor(pairs)
    return numbers[:, 0], numbers[:, 1]


def _gather(part: BlockStorage, blocks: Tensor) -> Tensor:
    """The blocks [n] as rows of bytes, [n, bytes], tensor behind tensor."""
    places = blocks - part.first
    pieces = [
        tensor.index_select(1, places).transpose(0, 1).reshape(len(blocks), -1).view(torch.uint8)
        for tensor in part.tensors
    ]
    return torch.cat(pieces, dim=1)


def _scatter(part: BlockStorage, blocks: Tensor, rows: Tensor) -> None:
    """What `_gather` gave, back into blocks [n]."""
    places = blocks - part.first
    start = 0
    for tensor in part.tensors:
        stop = start + _width(tensor)
        layers, inner = tensor.shape[0], tensor.shape[2:]
        values = rows[:, start:stop].contiguous().view(tensor.dtype).view(len(blocks), layers, *inner)
        tensor.index_copy_(1, places, values.transpose(0, 1))
        start = stop
