"""KV blocks in host memory, and the swap copies between them and the pages.

On CUDA all steps run on one stream, the main one; copies over the link run on a copy stream.

- Out: this very step may overwrite the block. So the main stream first gathers the blocks into a staging
  buffer, at memory speed; the copy stream waits for that and copies the buffer to the slots. There are two
  buffers; the main stream waits only for a buffer whose copy is still running.
- In: the blocks belong to a sequence that does not run in this step (unless `wait`). The copy stream waits
  for the main stream, behind everything that used those blocks, copies slots to a staging buffer and from
  there into the blocks, while the main stream runs the step. The next step, or this one with `wait`, waits.
- Slots: the copy stream runs both directions in the order of the plans, so a slot is read before it is
  written again.

On a CPU copies are made at once.
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
    """Bytes of the largest kind of block, and of a slot."""
    return max(sum(_width(tensor) for tensor in part.tensors) for part in pages.parts())


def _width(tensor: Tensor) -> int:
    """Bytes of one block in [layers, blocks, ...]."""
    return tensor[:, 0].numel() * tensor.element_size()


@dataclass
class _StagingBuffer:
    rows: Tensor  # [STAGED, slot bytes] uint8 on the device
    copied: torch.cuda.Event  # recorded behind the copy that reads it


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
                f"host memory has no {slots * width} bytes for the KV of preempted requests; "
                "lower --swap-bytes"
            ) from None
        if self._on_cuda:
            self._copy_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._swapped_in: torch.cuda.Event | None = None  # until the main stream waits for it
            buffers = [torch.empty(STAGED, width, dtype=torch.uint8, device=self._device) for _ in range(3)]
            self._out_buffers = [_StagingBuffer(rows, _event()) for rows in buffers[:2]]
            self._in_buffer = buffers[2]

    @staticmethod
    def staging_bytes(block_bytes: int) -> int:
        """Device memory of the staging buffers on CUDA."""
        return 3 * STAGED * block_bytes

    @property
    def slots(self) -> int:
        return self._slots.shape[0]

    @property
    def slot_bytes(self) -> int:
        return self._slots.shape[1]

    @property
    def pending(self) -> bool:
        """Whether the next step must wait for blocks that the last one swapped in."""
        return self._on_cuda and self._swapped_in is not None

    def swap(self, out: Pairs, back: Pairs, *, wait: bool) -> None:
        """A step's swaps, (block, slot) out and (slot, block) in, before anything else it does. With `wait`
        the step reads the blocks that come in."""
        if not self._on_cuda:
            self._swap_at_once(out, back)
            return
        main = torch.cuda.current_stream(self._device)
        if self._swapped_in is not None:
            main.wait_event(self._swapped_in)
            self._swapped_in = None
        self._swap_out(out, main)
        if back:
            swapped_in = self._swap_in(back, main)
            if wait:
                main.wait_event(swapped_in)
            else:
                self._swapped_in = swapped_in

    def _swap_at_once(self, out: Pairs, back: Pairs) -> None:
        for part, pairs in self._by_part(out, 0):
            blocks, slots = _columns(pairs)
            rows = _gather(part, blocks)
            self._slots[slots, : rows.shape[1]] = rows
        for part, pairs in self._by_part(back, 1):
            slots, blocks = _columns(pairs)
            _scatter(part, blocks, self._slots[slots])

    def _swap_out(self, out: Pairs, main: torch.cuda.Stream) -> None:
        for part, pairs in self._by_part(out, 0):
            for chunk in _chunks(pairs):
                buffer = self._out_buffers[0]
                self._out_buffers.reverse()
                main.wait_event(buffer.copied)  # of the copy before the last; no wait if never recorded
                blocks = torch.tensor([block for block, _ in chunk]).pin_memory()
                rows = _gather(part, blocks.to(self._device, non_blocking=True))
                width = rows.shape[1]
                buffer.rows[: len(chunk), :width] = rows
                self._copy_stream.wait_stream(main)
                with torch.cuda.stream(self._copy_stream):
                    for row, (_, slot) in enumerate(chunk):
                        self._slots[slot, :width].copy_(buffer.rows[row, :width], non_blocking=True)
                    buffer.copied.record(self._copy_stream)

    def _swap_in(self, back: Pairs, main: torch.cuda.Stream) -> torch.cuda.Event:
        self._copy_stream.wait_stream(main)
        with torch.cuda.stream(self._copy_stream):
            for part, pairs in self._by_part(back, 1):
                for chunk in _chunks(pairs):
                    for row, (slot, _) in enumerate(chunk):
                        self._in_buffer[row].copy_(self._slots[slot], non_blocking=True)
                    blocks = torch.tensor([block for _, block in chunk]).pin_memory()
                    on_device = blocks.to(self._device, non_blocking=True)
                    _scatter(part, on_device, self._in_buffer[: len(chunk)])
            swapped_in = _event()
            swapped_in.record(self._copy_stream)
        return swapped_in

    def _by_part(self, pairs: Pairs, block_at: int) -> Iterator[tuple[BlockStorage, list[tuple[int, int]]]]:
        """The pairs by the storage of their blocks."""
        for part in self._parts:
            inside = [p for p in pairs if part.first <= p[block_at] < part.first + part.blocks]
            if inside:
                yield part, inside

    def measure_rate(self) -> float:
        """Bytes/s of blocks swapped out and in, measured on blocks that are not in use yet. The one call that
        waits for the device."""
        count = min(STAGED, self.slots, self._parts[0].blocks)
        first = self._parts[0].first
        out = [(first + index, index) for index in range(count)]
        back = [(slot, block) for block, slot in out]
        self.swap(out, back, wait=True)  # the first time is slower
        self._synchronize()
        began = time.perf_counter()
        self.swap(out, back, wait=True)
        self._synchronize()
        moved = 2 * count * sum(_width(tensor) for tensor in self._parts[0].tensors)
        return moved / max(time.perf_counter() - began, 1e-9)

    def _synchronize(self) -> None:
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
    index = blocks - part.first
    pieces = [
        tensor.index_select(1, index).transpose(0, 1).reshape(len(blocks), -1).view(torch.uint8)
        for tensor in part.tensors
    ]
    return torch.cat(pieces, dim=1)


def _scatter(part: BlockStorage, blocks: Tensor, rows: Tensor) -> None:
    """Write rows of bytes from `_gather` into blocks [n]."""
    index = blocks - part.first
    start = 0
    for tensor in part.tensors:
        stop = start + _width(tensor)
        layers, inner = tensor.shape[0], tensor.shape[2:]
        values = rows[:, start:stop].contiguous().view(tensor.dtype).view(len(blocks), layers, *inner)
        tensor.index_copy_(1, index, values.transpose(0, 1))
        start = stop
