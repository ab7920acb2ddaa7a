"""The slots of running sequences: their state on the device, and what the host knows about it without asking.

A decode adds one to everything in its slot, so the host can keep count and nothing is read back.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from saccade.kernels.sampling.slot_state import SlotState
from saccade.step_plan import ScheduledSequence

UNKNOWN = -1


class Slots:
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
