"""One step of the engine, as data: the `StepPlan` the scheduler gives, the `StepResult` it gets back.

A plan names device rows, lengths and blocks; it holds no tensors and imports no torch. There are no
phases: a row says "compute positions start .. start+count of this sequence", whether that is a whole
prompt, a piece of one, or the next token.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from saccade.lod.types import RelevanceMaps
from saccade.request import Pixels, Sampling, TokenLogprobs, View

# Of a view: a whole picture or frame, a whole picture at less than full detail, a part of one.
Role = Literal["whole", "global", "zoom"]


class Span(msgspec.Struct, frozen=True):
    """Where a view's tokens stand in a sequence."""

    start: int  # first token index
    view: View
    key: bytes  # view.key, computed once
    place: bytes = b""  # what its positions depend on beside view and start; part of the prefix cache's keys
    role: Role = "whole"

    @property
    def stop(self) -> int:
        return self.start + self.view.tokens


class Layout(msgspec.Struct, frozen=True):
    """A prompt with every placeholder expanded: what the engine really computes."""

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]  # in order, disjoint
    positions: NDArray[np.float32]  # [3, len(tokens)] rotary (time, row, column); whole numbers are exact
    delta: int  # token i >= len(tokens) stands at position i + delta on all three axes


class Enter(msgspec.Struct, frozen=True):
    """A sequence takes a device row: what the row must know for as long as it is there."""

    row: int
    sampling: Sampling
    seed: int  # resolved; with the output position it determines the noise
    prompt: tuple[int, ...]  # for repetition penalties
    output: tuple[int, ...]  # tokens already produced (after a preemption)


class Sight(msgspec.Struct, frozen=True, gc=False):
    """A picture to be looked at: where its view stands in the sequence, and its pixels."""

    span: Span
    pixels: Pixels
    keep: bool = True  # what it says by itself, for later looks: not if it was deleted since its request came


class Row(msgspec.Struct, frozen=True, gc=False):  # holds nothing that could refer back to it
    """Compute `count` positions of one sequence, from `start`."""

    sequence: int  # scheduler's handle; comes back in the result
    row: int
    start: int
    count: int
    # Known ids of start .. start+len(tokens); when one short of `count`, the last id is the token this row
    # sampled in the step before, which only the device knows yet.
    tokens: tuple[int, ...]
    positions: NDArray[np.float32]  # [3, count]
    spans: tuple[Span, ...]  # the spans that overlap start .. start+count
    sample: bool  # whether the last position yields a token
    output_position: int  # how many output tokens precede the one sampled here
    sights: tuple[Sight, ...] = ()  # what its last position, the end of a question, is to look at


class Encode(msgspec.Struct, frozen=True):
    """Carry a view through layers `first` .. `stop` of the vision tower; the last slice of a view gives its
    features, which are kept in the store."""

    view: View
    key: bytes
    pixels: Pixels
    first: int = 0  # layers done by steps before; 0 begins with the pixels
    stop: int | None = None  # None: to the end

    @property
    def patches(self) -> int:
        return self.view.grid[0] * self.view.grid[1]

    def share(self, layers: int) -> float:
        """Of the work of the view, in a tower of so many layers."""
        return ((layers if self.stop is None else self.stop) - self.first) / layers


# (row, index, block, KV cache group)
BlockTableEntry = tuple[int, int, int, int]


class StepPlan(msgspec.Struct, frozen=True):
    """Everything one step does, in this order: swaps out, swaps in, encodes, enter, table, copies, rows."""

    number: int
    enter: tuple[Enter, ...]
    table: tuple[BlockTableEntry, ...]  # entries that changed
    copies: tuple[tuple[int, int], ...]  # (source block, target block): copy-on-write
    encodes: tuple[Encode, ...]
    rows: tuple[Row, ...]  # at least one; those of a single token first
    swap_outs: tuple[tuple[int, int], ...] = ()  # (block, host slot); this very step may write the block
    swap_ins: tuple[tuple[int, int], ...] = ()  # (host slot, block)
    # Whether this step reads what it swaps in; else that may come while it runs, and is there for the next.
    await_swaps: bool = False
    expected: float = 0.0  # ms it should take
    # All rows only look: no layer runs behind those that looks need. The KV of these rows is then not whole:
    # they are computed again.
    brief: bool = False


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced: one entry per row of the plan that sampled, in the plan's order."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    unsound: tuple[int, ...] = ()  # which of the tokens came from logits that were no numbers
    looks: tuple[tuple[RelevanceMaps, ...], ...] = ()  # one entry per row with sights, one look per sight
