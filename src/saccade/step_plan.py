"""One engine step as data: the scheduler's `StepPlan` and the device's `StepOutput`. No tensors, no torch.

There are no prefill and decode phases: a scheduled sequence computes positions start .. start+num_tokens,
whether that is a whole prompt, a chunk of one, or the next token.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from saccade.lod.types import RelevanceMaps
from saccade.request import Pixels, Sampling, TokenLogprobs, View

# Of a view: a whole image or frame, a whole image at less than full detail, a region of one.
Role = Literal["whole", "global", "zoom"]


class Span(msgspec.Struct, frozen=True):
    """The token range of a view in a sequence."""

    start: int  # first token index
    view: View
    key: bytes  # view.key, computed once
    # What its positions depend on besides view and start; part of the prefix cache's keys.
    position_key: bytes = b""
    role: Role = "whole"
    is_target: bool = False  # a question may ask for its relevance

    @property
    def stop(self) -> int:
        return self.start + self.view.tokens


class PromptLayout(msgspec.Struct, frozen=True):
    """A prompt with every placeholder expanded: what the engine really computes."""

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]  # in order, disjoint
    positions: NDArray[np.float32]  # [3, len(tokens)] rotary (time, row, column); whole numbers are exact
    delta: int  # token i >= len(tokens) stands at position i + delta on all three axes


class SlotInit(msgspec.Struct, frozen=True):
    """What the device keeps in a slot for as long as a sequence has it."""

    slot: int
    sampling: Sampling
    seed: int  # resolved; with the output position it determines the noise
    prompt: tuple[int, ...]  # for repetition penalties
    output: tuple[int, ...]  # tokens already generated (after a preemption)


class RelevanceTarget(msgspec.Struct, frozen=True, gc=False):
    """An image whose relevance to the question is read: the span of its view, and its pixels."""

    span: Span
    pixels: Pixels
    keep: bool = True  # whether question-independent maps may be cached: not for an image deleted meanwhile


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):  # no reference cycles possible
    """Compute `num_tokens` positions of one sequence, from `start`."""

    seq_id: int
    slot: int
    start: int
    num_tokens: int
    # Known ids of start .. start+len(tokens). When one is missing, it is the token this slot sampled in the
    # previous step, which only the device knows yet.
    tokens: tuple[int, ...]
    positions: NDArray[np.float32]  # [3, num_tokens]
    spans: tuple[Span, ...]  # those that overlap start .. start+num_tokens
    sample: bool  # whether the last position yields a token
    output_position: int  # number of output tokens before the one sampled here
    relevance_targets: tuple[RelevanceTarget, ...] = ()  # read at the last position, the question's end
    num_draft_tokens: int = 0  # the last ids of `tokens` are drafts to verify


class EncodeTask(msgspec.Struct, frozen=True):
    """Run a view through layers `first_layer` .. `stop_layer` of the vision tower. The last slice of a view
    yields its features, which go to the encoder cache."""

    view: View
    key: bytes
    pixels: Pixels
    first_layer: int = 0  # 0 begins with the pixels
    stop_layer: int | None = None  # None: the last

    @property
    def patches(self) -> int:
        return self.view.grid[0] * self.view.grid[1]

    def share(self, layers: int) -> float:
        """The fraction of the view's work, in a tower of `layers` layers."""
        return ((layers if self.stop_layer is None else self.stop_layer) - self.first_layer) / layers


# (slot, index, block, KV cache group)
BlockTableEntry = tuple[int, int, int, int]


class StepPlan(msgspec.Struct, frozen=True):
    """Everything one step does, in this order: swaps out, swaps in, encodes, new slots, block table updates,
    block copies, scheduled sequences."""

    number: int
    new_slots: tuple[SlotInit, ...]
    block_table_updates: tuple[BlockTableEntry, ...]
    block_copies: tuple[tuple[int, int], ...]  # (source, target): copy-on-write
    encodes: tuple[EncodeTask, ...]
    scheduled: tuple[ScheduledSequence, ...]  # at least one; those of a single token first
    swap_outs: tuple[tuple[int, int], ...] = ()  # (block, host block); this very step may write the block
    swap_ins: tuple[tuple[int, int], ...] = ()  # (host block, block)
    await_swaps: bool = False  # whether this step reads what it swaps in, or only the next one does
    expected_ms: float = 0.0
    # The step only reads relevance and stops after the last layer that needs. Its KV is incomplete, so the
    # same positions are computed again later.
    early_exit: bool = False


class StepOutput(msgspec.Struct, frozen=True):
    """What a step produced, in the order of the plan's sequences that sample."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]  # one per token
    nonfinite: tuple[int, ...] = ()  # indices of sampling sequences whose logits were NaN or infinite
    relevance: tuple[tuple[RelevanceMaps, ...], ...] = ()  # per sequence with targets, one per target
    # Tokens of each sampling sequence: accepted drafts and the one after them, or none. Empty: one each.
    num_tokens: tuple[int, ...] = ()
