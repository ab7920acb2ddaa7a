"""A step plan in the making: collects what the scheduler decides, within the step's budgets.

takes   rows, block copies and encodes, one decision at a time
gives   the StepPlan
never   decides
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.plan import Encode, Enter, Row, Span, StepPlan
from saccade.request import Pixels
from saccade.schedule.sequence import Sequence


class Planned(NamedTuple):
    """A row and whose it is; the epoch tells whether the sequence is still in the same stay on that row."""

    sequence: Sequence
    epoch: int
    row: Row


@dataclass
class Step:
    tokens_left: int
    patches_left: int
    enter: list[Enter] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)  # (row, index, block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target)
    encodes: list[Encode] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)

    def encode(self, span: Span, pixels: Pixels) -> bool:
        """Encode a view if this step affords it. The first is always afforded, or a huge one never were."""
        patches = span.view.grid[0] * span.view.grid[1]
        if self.encodes and patches > self.patches_left:
            return False
        self.encodes.append(Encode(span.view, span.key, pixels))
        self.patches_left -= patches
        return True

    def run(self, sequence: Sequence, row: Row, changed: Ordered[int]) -> None:
        """Compute the row; `changed` are the block indices that its device table does not have yet."""
        self.table += [(row.row, index, sequence.blocks[index]) for index in changed]
        self.planned.append(Planned(sequence, sequence.epoch, row))
        self.tokens_left -= row.count

    def plan(self, number: int) -> StepPlan:
        self.planned.sort(key=lambda item: item.row.count != 1)  # single tokens first: attended in one batch
        return StepPlan(
            number=number,
            enter=tuple(self.enter),
            table=tuple(self.table),
            copies=tuple(self.copies),
            encodes=tuple(self.encodes),
            rows=tuple(item.row for item in self.planned),
        )
