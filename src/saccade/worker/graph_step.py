"""One step over static buffers: the function a CUDA graph captures, and the buffers it reads and writes.

It never reads device values on the host: a call does the same work whatever the buffers contain.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.encoder.encoder_runner import fill_visual_buffer, merge_visual_buffer, visual_slices
from saccade.kernels.attention.metadata import PaddedAttentionMetadata
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.sampling.greedy import greedy
from saccade.kernels.sampling.slot_state import advance_slots, gather_slots
from saccade.kv_cache.pages import Paged, Pages
from saccade.models.interface import HiddenStateTap, LanguageModel
from saccade.sampling.sampler import Sampler
from saccade.step_plan import ScheduledSequence, StepPlan
from saccade.worker.buckets import PREFILL_TOKENS, PREFILLS, SplitBatch, StepShape, max_decodes
from saccade.worker.input_batch import InputBatch, Ints, Slots


class PrefillInputs(NamedTuple):
    """Prefills as they lie in one packed int32 array: T tokens of R sequences, padding included."""

    tokens: Tensor  # [T]
    positions: Tensor  # [3 * T], bits of float32
    token_slots: Tensor  # [T] slot of each token's sequence; -1: padding
    indices: Tensor  # [T] of the token in its sequence
    slots: Tensor  # [R] -1: padding
    lengths: Tensor  # [R] tokens of the sequence after the step
    offsets: Tensor  # [R + 1] of each sequence's tokens among all tokens of the step
    outputs: Tensor  # [R] output position of the sampled token
    last_positions: Tensor  # [R] position of the last token, bits of float32
    is_visual: Tensor  # [T] 1 where embedding and DeepStack levels are read from `GraphStep.visual`


def _sizes(tokens: int, prefills: int) -> list[int]:
    per_sequence = [prefills, prefills, prefills + 1, prefills, prefills]
    return [tokens, 3 * tokens, tokens, tokens, *per_sequence, tokens]


def pack_prefills(prefills: Sequence[ScheduledSequence], shape: StepShape) -> Ints:
    """The prefills of a step as one array (`PrefillInputs`)."""
    sizes = _sizes(shape.prefill_tokens, shape.prefills)
    packed = np.zeros(sum(sizes), dtype=np.int32)
    parts = [packed[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    tokens, positions, token_slots, indices, slots, lengths, offsets, outputs, last, is_visual = parts
    axes = positions.view(np.float32).reshape(3, -1)
    token_slots.fill(-1)
    slots.fill(-1)
    used = 0
    for line, one in enumerate(prefills):
        some = slice(used, used + one.num_tokens)
        tokens[some] = one.tokens
        axes[:, some] = one.positions
        token_slots[some] = one.slot
        indices[some] = np.arange(one.start, one.start + one.num_tokens)
        slots[line], lengths[line], outputs[line] = one.slot, one.start + one.num_tokens, one.output_position
        used = some.stop
        offsets[line + 1 :] = used
        last[line] = positions[used - 1]  # bits of the first axis
    offsets += shape.decodes
    for visual in visual_slices(prefills):
        is_visual[visual.position : visual.position + visual.length] = 1
    return packed


class GraphStep:
    def __init__(
        self,
        model: LanguageModel,
        pages: Pages,
        slots: Slots,
        sampler: Sampler,
        *,
        pdl: bool = False,  # programmatic dependent launch
        visual: bool = True,  # takes prefills with visual tokens
        tapped_layers: tuple[int, ...] = (),  # in front of which the last hidden state of prefills is kept
    ) -> None:
        self._model, self._pages, self._slots, self._sampler = model, pages, slots, sampler
        self._device = device = pages.k.device
        prefills = PREFILLS[-1]
        decodes = max_decodes(slots.count)
        lines = decodes + prefills
        self.decode_slots = torch.full((decodes,), -1, dtype=torch.int32, device=device)
        self.known_decode_slots: tuple[int, ...] | None = None  # first values of decode_slots, if known
        self.prefill_inputs = torch.zeros(
            sum(_sizes(PREFILL_TOKENS[-1], prefills)), dtype=torch.int32, device=device
        )
        self.tokens = torch.zeros(lines, dtype=torch.int64, device=device)
        self.finite = torch.zeros(lines, dtype=torch.bool, device=device)
        self._logits: Tensor | None = None  # [lines, vocab], allocated at its first use
        self._output_positions = torch.zeros(lines, dtype=torch.int64, device=device)
        self.visual: Tensor | None = None  # [PREFILL_TOKENS[-1], (1 + levels) * hidden], of visual tokens
        if visual and model.vision is not None:
            size = PREFILL_TOKENS[-1], (1 + model.vision.depth_levels) * model.hidden_size
            self.visual = torch.zeros(size, dtype=model.dtype, device=device)
        self._tapped_layers = tapped_layers if self.takes_visual else ()
        tapped = len(self._tapped_layers), prefills, model.hidden_size
        self._last_states = torch.zeros(tapped, dtype=model.dtype, device=device)
        self._last_positions = torch.zeros(3, prefills, device=device)
        self.counters = torch.zeros(lines * pages.group.kv_heads, dtype=torch.int32, device=device)
        self._mode = model.mode._replace(pdl=pdl, counters=self.counters)
        self._token_indices = torch.arange(decodes + PREFILL_TOKENS[-1], device=device)

    @property
    def takes_visual(self) -> bool:
        return self.visual is not None

    @property
    def keeps_hidden_states(self) -> bool:
        """Whether relevance can be computed after it."""
        return bool(self._tapped_layers)

    def supports(self, split: SplitBatch) -> bool:
        if split.has_visual and not self.takes_visual:
            return False
        return self.keeps_hidden_states or not split.has_relevance_targets

    def fill_inputs(
        self, plan: StepPlan, split: SplitBatch, shape: StepShape, batch: InputBatch
    ) -> tuple[int, ...] | None:
        """Fill the buffers; returns the lines of the plan's samples, None if in order. Uploads nothing if the
        device knows everything."""
        stale = [one for one in split.decodes if not self._slots.is_current(one)]
        parts: dict[str, Sequence[int] | Ints] = {}
        if stale:
            parts["corrections"] = self._slots.corrections(stale)
        decodes = (*[one.slot for one in split.decodes], *[-1] * (shape.decodes - len(split.decodes)))
        if decodes and self.known_decode_slots != decodes:
            parts["decodes"] = decodes
        if split.prefills:
            parts["prefills"] = pack_prefills(split.prefills, shape)
        sent = batch.upload(plan, parts) if parts or plan.block_table_updates or plan.block_copies else {}
        if "corrections" in sent:
            self._slots.correct(sent["corrections"].view(-1, 5))
        if "decodes" in sent:
            self.decode_slots[: len(decodes)].copy_(sent["decodes"])
            self.known_decode_slots = decodes
        if "prefills" in sent:
            self.prefill_inputs[: len(sent["prefills"])].copy_(sent["prefills"])
        uploaded = {one.slot for one in (*stale, *split.prefills)}
        for one in plan.scheduled:
            self._slots.advance(one, uploaded=one.slot in uploaded)
        return sample_lines(plan.scheduled, split, shape) if split.prefills else None

    def load_features(
        self, prefills: Sequence[ScheduledSequence], shape: StepShape, features: Callable[[bytes], Tensor]
    ) -> None:
        """Copy the features of a step's visual tokens to where the graph reads them."""
        if self.visual is None:
            raise RuntimeError("a step with visual tokens, but no buffer for them")
        fill_visual_buffer(self.visual[: shape.prefill_tokens], prefills, features)

    def fill_with_padding(self, shape: StepShape) -> None:
        """Running the shape then writes to no slot and no page."""
        self.decode_slots.fill_(-1)
        self.known_decode_slots = None
        if shape.prefills:
            empty = torch.zeros(sum(_sizes(shape.prefill_tokens, shape.prefills)), dtype=torch.int32)
            inputs = self._unpack(empty, shape)
            for part in (inputs.token_slots, inputs.slots):
                part.fill_(-1)
            inputs.offsets.fill_(shape.decodes)
            if self.visual is not None:
                self.visual.zero_()
            self.prefill_inputs[: len(empty)] = empty.to(self._device)
        if shape.ending == "logits":
            self.logits(shape)

    def logits(self, shape: StepShape) -> Tensor:
        """[lines, vocab] of the last step that ended in logits."""
        if self._logits is None:
            size = len(self.tokens), self._model.vocab_size
            self._logits = torch.zeros(size, dtype=self._model.dtype, device=self._device)
        return self._logits[: shape.lines]

    def run(self, shape: StepShape, *, compile_only: bool = False) -> None:
        """What a graph captures; or, within `jit.compile_only`, what compiles its kernels."""
        mode = self._mode._replace(compile_only=compile_only)
        hidden, outputs = self._forward(shape, mode)
        if shape.ending != "early_exit":
            self._sample(shape, hidden, outputs, mode)

    def _sample(self, shape: StepShape, hidden: Tensor, outputs: Tensor, mode: KernelMode) -> None:
        slots = self.all_slots(shape)
        logits = self._model.raw_logits(hidden, mode)
        lines = len(slots)
        if shape.ending == "logits":
            self.logits(shape).copy_(logits)
            self._output_positions[:lines].copy_(outputs)
            return
        if shape.ending == "greedy":
            tokens, finite = greedy(logits, mode)
        else:
            tokens, finite = self._sampler.draw(logits, slots, outputs, mode)
        advance_slots(slots, tokens, self._slots.state, mode)
        # Copies come last: programmatic dependent launch works between two kernels only.
        self.tokens[:lines].copy_(tokens)
        self.finite[:lines].copy_(finite)

    def all_slots(self, shape: StepShape) -> Tensor:
        """[lines] int32, -1 for padding."""
        decodes = self.decode_slots[: shape.decodes]
        if not shape.prefills:
            return decodes
        return torch.cat((decodes, self._unpack(self.prefill_inputs, shape).slots))

    def last_hidden_states(self, shape: StepShape) -> tuple[Tensor, Tensor]:
        """In front of the tapped layers, of the last token of each prefill [layers, prefills, hidden], and
        their positions [3, prefills]."""
        return self._last_states[:, : shape.prefills], self._last_positions[:, : shape.prefills]

    def output_positions(self, shape: StepShape) -> Tensor:
        """[lines] int64, of the last step that ended in logits."""
        return self._output_positions[: shape.lines]

    def _forward(self, shape: StepShape, mode: KernelMode) -> tuple[Tensor, Tensor]:
        """Hidden states [lines, hidden] and output positions [lines] of the tokens to sample."""
        if shape.prefills:
            return self._forward_mixed(shape, mode)
        state, slots = self._slots.state, self.decode_slots[: shape.decodes]
        got = gather_slots(slots, state, self._pages.block_size, mode)
        paged = self._paged(shape, got.slots, slots, got.contexts, None)
        embeds = self._model.embed(got.tokens)
        hidden: Tensor = self._model(embeds, got.positions.expand(3, -1), paged, None, mode=mode)
        return hidden, got.outputs

    def _forward_mixed(self, shape: StepShape, mode: KernelMode) -> tuple[Tensor, Tensor]:
        state, block_size = self._slots.state, self._pages.block_size
        inputs = self._unpack(self.prefill_inputs, shape)
        self._enter_prefills(inputs)
        indices, real = inputs.indices.long(), inputs.token_slots >= 0
        blocks = state.tables[inputs.token_slots.clamp(min=0).long(), indices // block_size].long()
        kv_slots = torch.where(real, blocks * block_size + indices % block_size, -1)
        tokens, positions = inputs.tokens.long(), inputs.positions.view(torch.float32).view(3, -1)
        slots, lengths, outputs = inputs.slots, inputs.lengths, inputs.outputs.long()
        last = (inputs.offsets[1:] - 1).clamp(min=0).long()  # of each prefill, among all tokens
        if shape.decodes:
            decodes = self.decode_slots[: shape.decodes]
            got = gather_slots(decodes, state, block_size, mode)
            kv_slots, tokens = torch.cat((got.slots, kv_slots)), torch.cat((got.tokens, tokens))
            positions = torch.cat((got.positions.expand(3, -1), positions), dim=1)
            slots, lengths = torch.cat((decodes, slots)), torch.cat((got.contexts, lengths))
            outputs = torch.cat((got.outputs, outputs))
        paged = self._paged(shape, kv_slots, slots, lengths, inputs.offsets)
        embeds, deep = self._model.embed(tokens), None
        if shape.has_visual and self.visual is not None:
            index = self._token_indices[shape.decodes : shape.decodes + shape.prefill_tokens]
            deep = merge_visual_buffer(
                embeds, self.visual[: shape.prefill_tokens], inputs.is_visual > 0, index
            )
        tap = self._tap(shape, positions, last) if self._tapped_layers else None
        stop = self._tapped_layers[-1] if shape.ending == "early_exit" else None
        hidden: Tensor = self._model(embeds, positions, paged, deep, tap, stop, mode)
        lines = hidden.index_select(0, last)
        return torch.cat((hidden[: shape.decodes], lines)) if shape.decodes else lines, outputs

    def _paged(
        self, shape: StepShape, kv_slots: Tensor, slots: Tensor, lengths: Tensor, offsets: Tensor | None
    ) -> Paged:
        rows = PaddedAttentionMetadata(
            block_tables=self._slots.state.tables,
            table_index=slots,
            seq_lens=lengths,
            chunk_start_loc=offsets,
            num_decodes=shape.decodes,
            num_tokens=len(kv_slots),
            max_decode_len=shape.max_context,
            block_size=self._pages.block_size,
        )
        return Paged(self._pages, kv_slots, rows)

    def _tap(self, shape: StepShape, positions: Tensor, last: Tensor) -> HiddenStateTap:
        """Keeps the hidden states and positions of the last token of each prefill."""
        states, last_positions = self.last_hidden_states(shape)
        torch.index_select(positions, 1, last, out=last_positions)
        layers = self._tapped_layers
        return HiddenStateTap(dict.fromkeys(layers, last), dict(zip(layers, states, strict=True)))

    def _enter_prefills(self, inputs: PrefillInputs) -> None:
        """Set the slots of prefills as if their last token were a decode: `advance_slots` then fits both."""
        state = self._slots.state
        slots = torch.where(inputs.slots < 0, len(state.last) - 1, inputs.slots).long()
        state.lengths.index_copy_(0, slots, inputs.lengths - 1)
        state.positions.index_copy_(0, slots, inputs.last_positions.view(torch.float32))
        state.outputs.index_copy_(0, slots, inputs.outputs)

    def _unpack(self, packed: Tensor, shape: StepShape) -> PrefillInputs:
        sizes = _sizes(shape.prefill_tokens, shape.prefills)
        return PrefillInputs(*torch.split(packed[: sum(sizes)], sizes))


def sample_lines(
    scheduled: Sequence[ScheduledSequence], split: SplitBatch, shape: StepShape
) -> tuple[int, ...]:
    """Where a CUDA graph step leaves the samples of a plan: decodes, their padding, prefills."""
    lines = {one.slot: line for line, one in enumerate(split.decodes)}
    lines |= {one.slot: shape.decodes + line for line, one in enumerate(split.prefills)}
    return tuple(lines[one.slot] for one in scheduled if one.sample)
