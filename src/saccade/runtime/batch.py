"""A plan becomes tensors: one packed upload per step.

takes   a StepPlan
gives   the step's inputs on the device (`Inputs`), and the order its samples come out in
owns    the block table of every device row, and the last token each row sampled
never   reads anything back from the device
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.cache.pages import Paged, Pages
from saccade.plan import Row, StepPlan

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Inputs:
    """One step as the model wants it. T tokens of R rows, S of which sample."""

    rows: tuple[Row, ...]
    tokens: Tensor  # [T] int64
    positions: Tensor  # [3, T] float32
    paged: Paged
    sample_at: Tensor  # [S] int64, which of the T tokens' outputs are sampled
    sample_rows: Tensor  # [S] int64, device rows
    output_positions: Tensor  # [S] int64
    sampled: tuple[Row, ...]  # the S rows on the host, in this order


class Upload:
    """Collects integer arrays and moves them to the device in one copy."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._size = 0

    def add(self, values: Sequence[int] | Ints) -> slice:
        part = np.asarray(values, dtype=np.int32).reshape(-1)
        self._parts.append(part)
        self._size += part.size
        return slice(self._size - part.size, self._size)

    def send(self, device: torch.device) -> Tensor:
        packed = torch.from_numpy(np.concatenate(self._parts))
        if device.type != "cuda":
            return packed
        return packed.pin_memory().to(device, non_blocking=True)


class Batch:
    """Fixed rows on the device, and the way from a plan to `Inputs`."""

    def __init__(self, pages: Pages, rows: int, blocks_per_row: int, device: torch.device) -> None:
        self._pages = pages
        self._block_size = pages.k.shape[2]
        self._device = device
        self._tables = torch.zeros(rows, blocks_per_row, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def prepare(self, plan: StepPlan) -> Inputs:
        """Apply the plan's table changes and block copies, and lay out its rows."""
        upload = Upload()
        table = upload.add([number for entry in plan.table for number in entry])
        ordered, plain = self._pages.in_order(plan.copies)
        copies = upload.add([block for pair in ordered for block in pair])
        host = _HostInputs(plan.rows)
        pieces = {name: upload.add(values) for name, values in host.arrays().items()}
        packed = upload.send(self._device)
        self._change_tables(packed[table].view(-1, 3).long())
        if plan.copies:
            pairs = packed[copies].view(-1, 2).long()
            self._pages.copy_blocks(pairs[:, 0], pairs[:, 1], plain)
        return self._inputs(host, {name: packed[piece] for name, piece in pieces.items()})

    def remember(self, rows: Tensor, tokens: Tensor) -> None:
        """Keep the tokens just sampled for the next step, which may not wait for the host."""
        self._last_tokens[rows] = tokens

    def _change_tables(self, entries: Tensor) -> None:
        if len(entries):
            self._tables[entries[:, 0], entries[:, 1]] = entries[:, 2].int()

    def _inputs(self, host: "_HostInputs", piece: dict[str, Tensor]) -> Inputs:
        tokens = piece["tokens"].long()
        if len(host.unknown_at):
            tokens[piece["unknown_at"].long()] = self._last_tokens[piece["unknown_rows"].long()]
        block_size = self._block_size
        index = piece["index"].long()
        blocks = self._tables[piece["token_rows"].long(), index // block_size].long()
        width = -(-max(host.contexts) // block_size)
        paged = Paged(
            pages=self._pages,
            slots=blocks * block_size + index % block_size,
            tables=self._tables[piece["rows"].long(), :width],
            lengths=piece["lengths"],
            offsets=piece["offsets"],
            counts=host.counts,
            contexts=host.contexts,
            decodes=sum(count == 1 for count in host.counts),
        )
        return Inputs(
            rows=host.rows,
            tokens=tokens,
            positions=piece["positions"].view(torch.float32).view(3, -1),
            paged=paged,
            sample_at=piece["sample_at"].long(),
            sample_rows=piece["sample_rows"].long(),
            output_positions=piece["output_positions"].long(),
            sampled=host.sampled,
        )


class _HostInputs:
    """The integers of a step, still on the host."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows
        self.counts = tuple(row.count for row in rows)
        self.contexts = tuple(row.start + row.count for row in rows)
        self.offsets = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64))).astype(np.int32)
        self.sampled = tuple(row for row in rows if row.sample)
        ends = self.offsets[1:] - 1
        self.sample_at = ends[[row.sample for row in rows]]
        short = [len(row.tokens) < row.count for row in rows]
        self.unknown_at = ends[short]
        self.unknown_rows = [row.row for row, is_short in zip(rows, short, strict=True) if is_short]

    def arrays(self) -> dict[str, Sequence[int] | Ints]:
        rows = self.rows
        device_rows = np.array([row.row for row in rows], dtype=np.int32)
        starts = np.array([row.start for row in rows], dtype=np.int32)
        within = np.arange(self.offsets[-1], dtype=np.int32) - np.repeat(self.offsets[:-1], self.counts)
        return {
            "tokens": [
                token for row in rows for token in (*row.tokens, *[0] * (row.count - len(row.tokens)))
            ],
            # Bits of float32 among the integers: one upload for all.
            "positions": np.concatenate([row.positions for row in rows], axis=1).view(np.int32),
            "index": within + np.repeat(starts, self.counts),
            "token_rows": np.repeat(device_rows, self.counts),
            "rows": device_rows,
            "lengths": self.contexts,
            "offsets": self.offsets,
            "sample_at": self.sample_at,
            "sample_rows": [row.row for row in self.sampled],
            "output_positions": [row.output_position for row in self.sampled],
            "unknown_at": self.unknown_at,
            "unknown_rows": self.unknown_rows,
        }
