"""From a step plan to the model's inputs: one packed upload per step, none if the device knows everything."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.kv_cache.pages import Paged, Pages
from saccade.step_plan import ScheduledSequence, StepPlan
from saccade.worker.buckets import SplitBatch, StepShape
from saccade.worker.graph_step import GraphStep, pack_prefills
from saccade.worker.slots import Slots

Ints = NDArray[np.int32]

NONE = np.empty(0, dtype=np.int32)

# Block copies launched one by one, with a kernel for K and one for V. More are batched, in a dozen launches:
# too many for a question about a cached image, which has one copy.
FEW_COPIES = 4


@dataclass(frozen=True)
class ModelInputs:
    """T tokens of R sequences, S of which sample."""

    scheduled: tuple[ScheduledSequence, ...]
    tokens: Tensor  # [T] int64
    positions: Tensor  # [3, T] float32
    paged: Paged
    sample_at: Tensor  # [S] int64, which of the T tokens sample
    sample_slots: Tensor  # [S] int64
    output_positions: Tensor  # [S] int64
    sampled: tuple[ScheduledSequence, ...]  # the S sequences, in this order
    following: Tensor  # [3, S] int32, state of the following token, as `Slots.store` takes it


class PackedUpload:
    """Collects integer arrays and moves them to the device in one copy."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._size = 0

    def add(self, values: Sequence[int] | Ints) -> slice:
        if not len(values):
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


class InputBatch:
    def __init__(self, pages: Pages, slots: Slots) -> None:
        self._pages = pages
        self.slots = slots
        self._block_size = pages.k.shape[2]
        self._device = pages.k.device

    @property
    def max_context(self) -> int:
        """Tokens that a block table holds."""
        return self.slots.blocks_per_seq * self._block_size

    def build_inputs(self, plan: StepPlan) -> ModelInputs:
        """Apply the plan's block table updates and block copies, and build the inputs of an eager step."""
        host = _HostInputs(plan.scheduled)
        return self._inputs(host, self._send(plan, host.arrays()))

    def apply_updates(self, plan: StepPlan) -> None:
        """Block table updates and block copies alone, of a plan without sequences."""
        self._send(plan, {})

    def store_outputs(self, inputs: ModelInputs, tokens: Tensor) -> None:
        """After an eager step: store the state of the following tokens, which the next step reads on the
        device."""
        if inputs.sampled:
            self.slots.store(inputs.sample_slots, tokens, inputs.following)
        for one in inputs.scheduled:
            self.slots.advance(one, uploaded=True)

    def fill_graph_inputs(
        self, plan: StepPlan, split: SplitBatch, shape: StepShape, step: GraphStep
    ) -> tuple[int, ...] | None:
        """Fill the buffers of a CUDA graph step; returns the lines of the plan's samples, None if in
        order."""
        stale = [one for one in split.decodes if not self.slots.is_current(one)]
        parts: dict[str, Sequence[int] | Ints] = {}
        if stale:
            parts["corrections"] = self.slots.corrections(stale)
        decodes = (*[one.slot for one in split.decodes], *[-1] * (shape.decodes - len(split.decodes)))
        if decodes and step.known_decode_slots != decodes:
            parts["decodes"] = decodes
        if split.prefills:
            parts["prefills"] = pack_prefills(split.prefills, shape)
        sent = self._send(plan, parts) if parts or plan.block_table_updates or plan.block_copies else {}
        if "corrections" in sent:
            self.slots.correct(sent["corrections"].view(-1, 5))
        if "decodes" in sent:
            step.decode_slots[: len(decodes)].copy_(sent["decodes"])
            step.known_decode_slots = decodes
        if "prefills" in sent:
            step.prefill_inputs[: len(sent["prefills"])].copy_(sent["prefills"])
        uploaded = {one.slot for one in (*stale, *split.prefills)}
        for one in plan.scheduled:
            self.slots.advance(one, uploaded=one.slot in uploaded)
        return sample_lines(plan.scheduled, split, shape) if split.prefills else None

    def _send(self, plan: StepPlan, arrays: dict[str, Sequence[int] | Ints]) -> dict[str, Tensor]:
        """Upload the arrays, and carry out the plan's block table updates and block copies with the same
        upload."""
        upload = PackedUpload()
        lines, width = self.slots.lines, self.slots.blocks_per_seq
        indices = upload.add(
            [(group * lines + slot) * width + index for slot, index, _, group in plan.block_table_updates]
        )
        blocks = upload.add([block for _, _, block, _ in plan.block_table_updates])
        few = len(plan.block_copies) <= FEW_COPIES
        ordered, plain = self._pages.in_order(() if few else plan.block_copies)
        copies = upload.add([block for pair in ordered for block in pair])
        pieces = {name: upload.add(values) for name, values in arrays.items()}
        packed = upload.send(self._device)
        if plan.block_table_updates:
            self.slots.update_tables(packed[indices], packed[blocks])
        for source, target in plan.block_copies if few else ():
            self._pages.copy_block(source, target)
        if ordered:
            pairs = packed[copies].view(-1, 2).long()
            self._pages.copy_blocks(pairs[:, 0], pairs[:, 1], plain)
        return {name: packed[piece] for name, piece in pieces.items()}

    def _inputs(self, host: "_HostInputs", piece: dict[str, Tensor]) -> ModelInputs:
        tokens, state = piece["tokens"].long(), self.slots.state
        if len(host.unknown_at):
            tokens[piece["unknown_at"].long()] = state.last[piece["unknown_slots"].long()]
        block_size = self._block_size
        index = piece["index"].long()
        blocks = state.tables[piece["token_slots"].long(), index // block_size].long()
        width = -(-max(host.contexts) // block_size)
        paged = Paged(
            pages=self._pages,
            slots=blocks * block_size + index % block_size,
            tables=state.tables[piece["slots"].long(), :width],
            lengths=piece["lengths"],
            offsets=piece["offsets"],
            counts=host.counts,
            contexts=host.contexts,
            decodes=sum(count == 1 for count in host.counts),
        )
        return ModelInputs(
            scheduled=host.scheduled,
            tokens=tokens,
            positions=piece["positions"].view(torch.float32).view(3, -1),
            paged=paged,
            sample_at=piece["sample_at"].long(),
            sample_slots=piece["sample_slots"].long(),
            output_positions=piece["output_positions"].long(),
            sampled=host.sampled,
            following=piece["following"].view(3, -1),
        )


class _HostInputs:
    """The inputs of an eager step as integers on the host."""

    def __init__(self, scheduled: tuple[ScheduledSequence, ...]) -> None:
        self.scheduled = scheduled
        self.counts = tuple(one.num_tokens for one in scheduled)
        self.contexts = tuple(one.start + one.num_tokens for one in scheduled)
        self.offsets = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64))).astype(np.int32)
        self.sampled = tuple(one for one in scheduled if one.sample)
        ends = self.offsets[1:] - 1
        self.sample_at = ends[[one.sample for one in scheduled]]
        short = [len(one.tokens) < one.num_tokens for one in scheduled]
        self.unknown_at = ends[short]
        self.unknown_slots = [one.slot for one, is_short in zip(scheduled, short, strict=True) if is_short]

    def arrays(self) -> dict[str, Sequence[int] | Ints]:
        scheduled = self.scheduled
        slots = np.array([one.slot for one in scheduled], dtype=np.int32)
        starts = np.array([one.start for one in scheduled], dtype=np.int32)
        within = np.arange(self.offsets[-1], dtype=np.int32) - np.repeat(self.offsets[:-1], self.counts)
        positions = np.concatenate([one.positions for one in scheduled], axis=1)
        outputs = np.array([one.output_position for one in self.sampled], dtype=np.int32)
        lengths = np.array([one.start + one.num_tokens for one in self.sampled], dtype=np.int32)
        behind = (positions[0, self.sample_at] + 1).astype(np.float32).view(np.int32)
        return {
            "tokens": [
                token
                for one in scheduled
                for token in (*one.tokens, *[0] * (one.num_tokens - len(one.tokens)))
            ],
            # Bits of float32 among the integers: one upload for all.
            "positions": positions.view(np.int32),
            "index": within + np.repeat(starts, self.counts),
            "token_slots": np.repeat(slots, self.counts),
            "slots": slots,
            "lengths": self.contexts,
            "offsets": self.offsets,
            "sample_at": self.sample_at,
            "sample_slots": [one.slot for one in self.sampled],
            "output_positions": outputs,
            "following": np.concatenate((lengths, behind, outputs + 1)),
            "unknown_at": self.unknown_at,
            "unknown_slots": self.unknown_slots,
        }


def sample_lines(
    scheduled: Sequence[ScheduledSequence], split: SplitBatch, shape: StepShape
) -> tuple[int, ...]:
    """Where a CUDA graph step leaves the samples of a plan: decodes, their padding, prefills."""
    lines = {one.slot: line for line, one in enumerate(split.decodes)}
    lines |= {one.slot: shape.decodes + line for line, one in enumerate(split.prefills)}
    return tuple(lines[one.slot] for one in scheduled if one.sample)
