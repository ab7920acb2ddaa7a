"""A plan becomes tensors: one packed upload per step, none where the device knows everything already.

takes   a StepPlan
gives   the step's inputs on the device (`Inputs`), or a captured step's buffers filled; the order its samples
        come out in
never   reads anything back from the device
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.kv_cache.pages import Paged, Pages
from saccade.step_plan import ScheduledSequence, StepPlan
from saccade.worker.buckets import Division, Shape
from saccade.worker.graph_step import FixedStep, pack
from saccade.worker.slots import DeviceRows

Ints = NDArray[np.int32]

NONE = np.empty(0, dtype=np.int32)

# Blocks copied one by one, a kernel for K and one for V. More go together, in a dozen launches: a question
# about a known picture, which has one to copy, would wait for those.
FEW_COPIES = 4


@dataclass(frozen=True)
class Inputs:
    """One step as the model wants it. T tokens of R rows, S of which sample."""

    rows: tuple[ScheduledSequence, ...]
    tokens: Tensor  # [T] int64
    positions: Tensor  # [3, T] float32
    paged: Paged
    sample_at: Tensor  # [S] int64, which of the T tokens' outputs are sampled
    sample_rows: Tensor  # [S] int64, device rows
    output_positions: Tensor  # [S] int64
    sampled: tuple[ScheduledSequence, ...]  # the S rows on the host, in this order
    ahead: Tensor  # [3, S] int32: what these rows go on from, as `DeviceRows.settle` takes it


class Upload:
    """Collects integer arrays and moves them to the device in one copy."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._size = 0

    def add(self, values: Sequence[int] | Ints) -> slice:
        if not len(values):  # of most steps' table changes and copies there are none
            return slice(self._size, self._size)
        part = np.asarray(values, dtype=np.int32).reshape(-1)
        self._parts.append(part)
        self._size += part.size
        return slice(self._size - part.size, self._size)

    def send(self, device: torch.device) -> Tensor:
        parts = self._parts
        packed = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate((*parts, NONE)))
        if device.type != "cuda":
            return packed
        return packed.pin_memory().to(device, non_blocking=True)


class Batch:
    """The way from a plan to what a step reads."""

    def __init__(self, pages: Pages, rows: DeviceRows, device: torch.device) -> None:
        self._pages = pages
        self._rows = rows
        self._block_size = pages.k.shape[2]
        self._device = device

    @property
    def longest(self) -> int:
        """Tokens of a context that the tables hold."""
        return self._rows.width * self._block_size

    def prepare(self, plan: StepPlan) -> Inputs:
        """Apply the plan's table changes and block copies, and lay out its rows."""
        host = _HostInputs(plan.scheduled)
        return self._inputs(host, self._send(plan, host.arrays()))

    def change(self, plan: StepPlan) -> None:
        """Table changes and block copies alone, of a plan without rows."""
        self._send(plan, {})

    def settle(self, inputs: Inputs, tokens: Tensor) -> None:
        """After an ordinary step: keep what its rows go on from; the next step may not wait for the host."""
        if inputs.sampled:
            self._rows.settle(inputs.sample_rows, tokens, inputs.ahead)
        for row in inputs.rows:
            self._rows.ran(row, told=True)

    def fill(
        self, plan: StepPlan, divided: Division, shape: Shape, step: FixedStep
    ) -> tuple[int, ...] | None:
        """Ready the buffers of a captured step; gives the lines of the plan's samples, None if in order."""
        unknown = [row for row in divided.decodes if not self._rows.knows(row)]
        parts: dict[str, Sequence[int] | Ints] = {}
        if unknown:
            parts["corrections"] = self._rows.corrections(unknown)
        rows = (*[row.slot for row in divided.decodes], *[-1] * (shape.decodes - len(divided.decodes)))
        if rows and step.held != rows:
            parts["rows"] = rows
        if divided.chunks:
            parts["feed"] = pack(divided.chunks, shape)
        sent = self._send(plan, parts) if parts or plan.block_table_updates or plan.block_copies else {}
        if "corrections" in sent:
            self._rows.correct(sent["corrections"].view(-1, 5))
        if "rows" in sent:
            step.step_rows[: len(rows)].copy_(sent["rows"])
            step.held = rows
        if "feed" in sent:
            step.feed[: len(sent["feed"])].copy_(sent["feed"])
        told = {row.slot for row in (*unknown, *divided.chunks)}
        for row in plan.scheduled:
            self._rows.ran(row, told=row.slot in told)
        return sample_lines(plan.scheduled, divided, shape) if divided.chunks else None

    def _send(self, plan: StepPlan, arrays: dict[str, Sequence[int] | Ints]) -> dict[str, Tensor]:
        """The arrays on the device, in one copy with the plan's table changes and block copies, made here."""
        upload = Upload()
        lines, width = self._rows.lines, self._rows.width
        places = upload.add(
            [(group * lines + row) * width + index for row, index, _, group in plan.block_table_updates]
        )
        blocks = upload.add([block for _, _, block, _ in plan.block_table_updates])
        few = len(plan.block_copies) <= FEW_COPIES
        ordered, plain = self._pages.in_order(() if few else plan.block_copies)
        copies = upload.add([block for pair in ordered for block in pair])
        pieces = {name: upload.add(values) for name, values in arrays.items()}
        packed = upload.send(self._device)
        if plan.block_table_updates:
            self._rows.change_tables(packed[places], packed[blocks])
        for source, target in plan.block_copies if few else ():
            self._pages.copy_block(source, target)
        if ordered:
            pairs = packed[copies].view(-1, 2).long()
            self._pages.copy_blocks(pairs[:, 0], pairs[:, 1], plain)
        return {name: packed[piece] for name, piece in pieces.items()}

    def _inputs(self, host: "_HostInputs", piece: dict[str, Tensor]) -> Inputs:
        tokens, state = piece["tokens"].long(), self._rows.state
        if len(host.unknown_at):
            tokens[piece["unknown_at"].long()] = state.last[piece["unknown_rows"].long()]
        block_size = self._block_size
        index = piece["index"].long()
        blocks = state.tables[piece["token_rows"].long(), index // block_size].long()
        width = -(-max(host.contexts) // block_size)
        paged = Paged(
            pages=self._pages,
            slots=blocks * block_size + index % block_size,
            tables=state.tables[piece["rows"].long(), :width],
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
            ahead=piece["ahead"].view(3, -1),
        )


class _HostInputs:
    """The integers of a step, still on the host."""

    def __init__(self, rows: tuple[ScheduledSequence, ...]) -> None:
        self.rows = rows
        self.counts = tuple(row.num_tokens for row in rows)
        self.contexts = tuple(row.start + row.num_tokens for row in rows)
        self.offsets = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64))).astype(np.int32)
        self.sampled = tuple(row for row in rows if row.sample)
        ends = self.offsets[1:] - 1
        self.sample_at = ends[[row.sample for row in rows]]
        short = [len(row.tokens) < row.num_tokens for row in rows]
        self.unknown_at = ends[short]
        self.unknown_rows = [row.slot for row, is_short in zip(rows, short, strict=True) if is_short]

    def arrays(self) -> dict[str, Sequence[int] | Ints]:
        rows = self.rows
        device_rows = np.array([row.slot for row in rows], dtype=np.int32)
        starts = np.array([row.start for row in rows], dtype=np.int32)
        within = np.arange(self.offsets[-1], dtype=np.int32) - np.repeat(self.offsets[:-1], self.counts)
        positions = np.concatenate([row.positions for row in rows], axis=1)
        outputs = np.array([row.output_position for row in self.sampled], dtype=np.int32)
        lengths = np.array([row.start + row.num_tokens for row in self.sampled], dtype=np.int32)
        behind = (positions[0, self.sample_at] + 1).astype(np.float32).view(np.int32)
        return {
            "tokens": [
                token for row in rows for token in (*row.tokens, *[0] * (row.num_tokens - len(row.tokens)))
            ],
            # Bits of float32 among the integers: one upload for all.
            "positions": positions.view(np.int32),
            "index": within + np.repeat(starts, self.counts),
            "token_rows": np.repeat(device_rows, self.counts),
            "rows": device_rows,
            "lengths": self.contexts,
            "offsets": self.offsets,
            "sample_at": self.sample_at,
            "sample_rows": [row.slot for row in self.sampled],
            "output_positions": outputs,
            "ahead": np.concatenate((lengths, behind, outputs + 1)),
            "unknown_at": self.unknown_at,
            "unknown_rows": self.unknown_rows,
        }


def sample_lines(rows: Sequence[ScheduledSequence], divided: Division, shape: Shape) -> tuple[int, ...]:
    """Where a captured step leaves the samples of a plan's rows: decodes first, then behind their padding the
    prompts."""
    lines = {row.slot: line for line, row in enumerate(divided.decodes)}
    lines |= {row.slot: shape.decodes + line for line, row in enumerate(divided.chunks)}
    return tuple(lines[row.slot] for row in rows if row.sample)
