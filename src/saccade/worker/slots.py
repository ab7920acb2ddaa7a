"""Fixed rows on the device, and what the host knows of them without asking.

takes   what every step did with which rows
gives   the buffers by device row (`SlotState`); which of a plan's rows the device can go on with by itself
owns    the buffers, and the host's picture of them: a decode adds one to everything, so it can count along
never   reads anything back from the device
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from saccade.kernels.sampling.slot_state import SlotState
from saccade.step_plan import ScheduledSequence

UNKNOWN = -1  # no place: whatever the row is to do next must be told to the device


class DeviceRows:
    def __init__(self, rows: int, blocks_per_row: int, device: torch.device, groups: int = 1) -> None:
        self.lines = lines = rows + 1  # the last is nobody's: padding writes there
        self.width = blocks_per_row
        # Block tables of all KV cache groups; `state` has those of group 0.
        self._tables = torch.zeros(groups * lines, blocks_per_row, dtype=torch.int32, device=device)
        self.state = SlotState(
            tables=self.tables(0),
            last=torch.zeros(lines, dtype=torch.int64, device=device),
            lengths=torch.zeros(lines, dtype=torch.int32, device=device),
            positions=torch.zeros(lines, dtype=torch.float32, device=device),
            outputs=torch.zeros(lines, dtype=torch.int32, device=device),
        )
        self._next = [UNKNOWN] * rows  # place of the token the device's line is ready for
        # Position that line says, until a plan has confirmed it: a prompt may end anywhere, an answer goes
        # on by ones.
        self._unconfirmed: list[float | None] = [None] * rows

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.state)

    def forget(self, row: int) -> None:
        """Somebody else has the row now."""
        self._next[row] = UNKNOWN

    def knows(self, row: ScheduledSequence) -> bool:
        """Whether the device's line says all there is to know of this row of one token."""
        if self._next[row.slot] != row.start:
            return False
        said = self._unconfirmed[row.slot]
        return said is None or said == float(row.positions[0, 0])

    def ran(self, row: ScheduledSequence, *, told: bool) -> None:
        """The step just launched leaves the row's line ready for the token after its last; `told`: the device
        was given its numbers, it did not go on by itself."""
        if not row.sample:
            self._next[row.slot] = UNKNOWN
            return
        self._next[row.slot] = row.start + row.num_tokens
        self._unconfirmed[row.slot] = float(row.positions[0, -1]) + 1 if told else None

    def corrections(self, rows: Sequence[ScheduledSequence]) -> list[int]:
        """Five numbers for each row of one token the device cannot know: what `correct` takes."""
        entries = []
        for row in rows:
            position = int(np.float32(row.positions[0, 0]).view(np.int32))
            token = row.tokens[0] if row.tokens else UNKNOWN
            entries += [row.slot, row.start, position, row.output_position, token]
        return entries

    def correct(self, entries: Tensor) -> None:
        """[n, 5] int32: row, place, position (bits of float32), output position, token or -1 to keep it."""
        rows = entries[:, 0].long()
        state = self.state
        state.lengths[rows] = entries[:, 1]
        state.positions[rows] = entries[:, 2].contiguous().view(torch.float32)
        state.outputs[rows] = entries[:, 3]
        tokens = entries[:, 4].long()
        state.last[rows] = torch.where(tokens < 0, state.last[rows], tokens)

    def tables(self, group: int) -> Tensor:
        """The block tables of a KV cache group, [rows + 1, blocks]."""
        return self._tables[group * self.lines : (group + 1) * self.lines]

    def change_tables(self, places: Tensor, blocks: Tensor) -> None:
        """[n] int32 each; block `index` of a row is at (group * lines + row) * width + index."""
        if len(places):
            self._tables.view(-1).index_copy_(0, places.long(), blocks)

    def settle(self, rows: Tensor, tokens: Tensor, ahead: Tensor) -> None:
        """After an ordinary step: tokens [S] int64 sampled for rows [S] int64, and what comes next there,
        ahead [3, S] int32: length, position (bits of float32), output position."""
        state = self.state
        state.last[rows] = tokens
        state.lengths[rows] = ahead[0]
        state.positions[rows] = ahead[1].view(torch.float32)
        state.outputs[rows] = ahead[2]
