"""The slots of sequences on the device, and from a step plan to the inputs of an eager step in one upload."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kernels.sampling.slot_state import SlotState
from saccade.kv_cache.pages import Paged, Pages
from saccade.step_plan import ScheduledSequence, StepPlan

Ints = NDArray[np.int32]

NONE = np.empty(0, dtype=np.int32)

# Block copies launched one by one, with a kernel for K and one for V. More are batched, in a dozen launches:
# too many for a question about a cached image, which has one copy.
FEW_COPIES = 4
UNKNOWN = -1


class Slots:
    """The slots of running sequences: their state on the device, and what the host knows about it.

    A decode adds one to everything in its slot, so the host can keep count and nothing is read back.
    """

    def __init__(self, count: int, blocks_per_seq: int, device: torch.device, groups: int = 1) -> None:
        self.count, self.blocks_per_seq = count, blocks_per_seq
        self.lines = lines = count + 1  # padding writes to the last one
        # Block tables of all KV cache groups; `state` has those of group 0.
        self._tables = torch.zeros(groups * lines, blocks_per_seq, dtype=torch.int32, device=device)
        self.state = SlotState(
            tables=self.tables(0),
            last=torch.zeros(lines, dtype=torch.int64, device=device),
            lengths=torch.zeros(lines, dtype=torch.int32, device=device),
            positions=torch.zeros(lines, dtype=torch.float32, device=device),
            outputs=torch.zeros(lines, dtype=torch.int32, device=device),
        )
        self._next = [UNKNOWN] * count  # index of the token that the slot's state is ready to compute
        # Position in that state until a plan has confirmed it: a prompt may end at any position, decodes then
        # continue by ones.
        self._unconfirmed: list[float | None] = [None] * count

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.state)

    def reset(self, slot: int) -> None:
        """Another sequence takes the slot."""
        self._next[slot] = UNKNOWN

    def is_current(self, decode: ScheduledSequence) -> bool:
        """Whether the state on the device is all that this decode needs."""
        if self._next[decode.slot] != decode.start:
            return False
        position = self._unconfirmed[decode.slot]
        return position is None or position == float(decode.positions[0, 0])

    def advance(self, one: ScheduledSequence, *, uploaded: bool) -> None:
        """The launched step leaves the slot ready for the next token. `uploaded`: the device was given the
        sequence's state; otherwise it continued with its own."""
        if not one.sample:
            self._next[one.slot] = UNKNOWN
            return
        self._next[one.slot] = one.start + one.num_tokens
        self._unconfirmed[one.slot] = float(one.positions[0, -1]) + 1 if uploaded else None

    def corrections(self, decodes: Sequence[ScheduledSequence]) -> list[int]:
        """The argument of `correct`, flat, for decodes whose slots are not current."""
        entries = []
        for one in decodes:
            position = int(np.float32(one.positions[0, 0]).view(np.int32))
            token = one.tokens[0] if one.tokens else UNKNOWN
            entries += [one.slot, one.start, position, one.output_position, token]
        return entries

    def correct(self, entries: Tensor) -> None:
        """[n, 5] int32: slot, length, position (bits of float32), output position, token or -1 to keep it."""
        slots = entries[:, 0].long()
        state = self.state
        state.lengths[slots] = entries[:, 1]
        state.positions[slots] = entries[:, 2].contiguous().view(torch.float32)
        state.outputs[slots] = entries[:, 3]
        tokens = entries[:, 4].long()
        state.last[slots] = torch.where(tokens < 0, state.last[slots], tokens)

    def tables(self, group: int) -> Tensor:
        """The block tables of a KV cache group, [slots + 1, blocks]."""
        return self._tables[group * self.lines : (group + 1) * self.lines]

    def update_tables(self, indices: Tensor, blocks: Tensor) -> None:
        """[n] int32 each; block i of a slot has index (group * lines + slot) * blocks_per_seq + i."""
        if len(indices):
            self._tables.view(-1).index_copy_(0, indices.long(), blocks)

    def store(self, slots: Tensor, tokens: Tensor, following: Tensor) -> None:
        """After an eager step: tokens [S] int64 sampled for slots [S] int64, and the state of the following
        token [3, S] int32: length, position (bits of float32), output position."""
        state = self.state
        state.last[slots] = tokens
        state.lengths[slots] = following[0]
        state.positions[slots] = following[1].view(torch.float32)
        state.outputs[slots] = following[2]


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
        return self._inputs(host, self.upload(plan, host.arrays()))

    def apply_updates(self, plan: StepPlan) -> None:
        """Block table updates and block copies alone, of a plan without sequences."""
        self.upload(plan, {})

    def store_outputs(self, inputs: ModelInputs, tokens: Tensor) -> None:
        """After an eager step: store the state of the following tokens, which the next step reads on the
        device."""
        if inputs.sampled:
            self.slots.store(inputs.sample_slots, tokens, inputs.following)
        for one in inputs.scheduled:
            self.slots.advance(one, uploaded=True)

    def upload(self, plan: StepPlan, arrays: dict[str, Sequence[int] | Ints]) -> dict[str, Tensor]:
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
        rows = AttentionMetadata(
            block_tables=state.tables[piece["slots"].long(), :width],
            seq_lens=piece["lengths"],
            query_start_loc=piece["offsets"],
            query_lens=host.counts,
            seq_lens_cpu=host.contexts,
            num_decodes=sum(count == 1 for count in host.counts),
            block_size=block_size,
        )
        return ModelInputs(
            scheduled=host.scheduled,
            tokens=tokens,
            positions=piece["positions"].view(torch.float32).view(3, -1),
            paged=Paged(self._pages, blocks * block_size + index % block_size, rows),
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
