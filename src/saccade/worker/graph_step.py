"""A step over static buffers: the function a graph records, and the buffers it reads and writes.

takes   the device rows of the step (`step_rows`), short prompts as one packed array (`feed`)
gives   sampled tokens in a buffer that is always the same; the rows moved on by one token
owns    those buffers
never   looks at the host while it runs: the same call does the same work whatever is in the buffers
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.encoder.merge_embeddings import fill_visual_buffer, merge_visual_buffer, visual_slices
from saccade.kernels.sampling.greedy import greedy
from saccade.kernels.sampling.slot_state import advance_slots, gather_slots
from saccade.kv_cache.pages import FixedPaged, Pages
from saccade.models.interface import HiddenStateTap, LanguageModel
from saccade.sampling.sampler import Sampler
from saccade.step_plan import ScheduledSequence
from saccade.worker.buckets import CHUNKS, TOKENS, Division, Shape, most_lines
from saccade.worker.slots import DeviceRows

Ints = NDArray[np.int32]


class Feed(NamedTuple):
    """Short prompts as they lie in the packed array, int32: T tokens of R rows, padding included."""

    tokens: Tensor  # [T]
    positions: Tensor  # [3 * T], bits of float32
    rows: Tensor  # [T] device row of each token; -1: padding
    places: Tensor  # [T] in its sequence
    chunks: Tensor  # [R] device rows; -1: padding
    lengths: Tensor  # [R] tokens of the sequence after the step
    ends: Tensor  # [R + 1] where each row's tokens begin among all tokens of the step
    outputs: Tensor  # [R] output position of what it samples
    last: Tensor  # [R] position of the row's last token, bits of float32
    seen: Tensor  # [T] 1 where the token is visual: its embedding and deeper levels are in `FixedStep.visual`


def _sizes(tokens: int, chunks: int) -> list[int]:
    lines = [chunks, chunks, chunks + 1, chunks, chunks]
    return [tokens, 3 * tokens, tokens, tokens, *lines, tokens]


def pack(rows: Sequence[ScheduledSequence], shape: Shape) -> Ints:
    """The rows of a step's prompts as one array."""
    sizes = _sizes(shape.tokens, shape.chunks)
    packed = np.zeros(sum(sizes), dtype=np.int32)
    ends = accumulate(sizes)
    cut = [packed[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    tokens, positions, owners, places, chunks, lengths, ends_at, outputs, last, seen = cut
    axes = positions.view(np.float32).reshape(3, -1)
    owners.fill(-1)
    chunks.fill(-1)
    used = 0
    for line, row in enumerate(rows):
        some = slice(used, used + row.num_tokens)
        tokens[some] = row.tokens
        axes[:, some] = row.positions
        owners[some] = row.slot
        places[some] = np.arange(row.start, row.start + row.num_tokens)
        chunks[line], lengths[line], outputs[line] = row.slot, row.start + row.num_tokens, row.output_position
        used = some.stop
        ends_at[line + 1 :] = used
        last[line] = positions[used - 1]  # bits of the first axis
    ends_at += shape.decodes
    for _, _, count, place in visual_slices(rows):
        seen[place : place + count] = 1
    return packed


class FixedStep:
    def __init__(
        self,
        model: LanguageModel,
        pages: Pages,
        rows: DeviceRows,
        sampler: Sampler,
        most_rows: int,
        device: torch.device,
        *,
        early: bool = False,  # kernels are launched while the one before them ends
        sees: bool = True,  # prompts may have visual tokens: nobody wants their hidden states meanwhile
        watched: tuple[int, ...] = (),  # layers in order, before which the stream at ends of prompts is kept
    ) -> None:
        self._model, self._pages, self._rows, self._sampler = model, pages, rows, sampler
        self._device = device
        most_chunks = CHUNKS[-1]
        lines = most_lines(most_rows) + most_chunks
        self.step_rows = torch.full((lines - most_chunks,), -1, dtype=torch.int32, device=device)
        self.held: tuple[int, ...] | None = None  # what step_rows begins with, as far as the host knows
        self.feed = torch.zeros(sum(_sizes(TOKENS[-1], most_chunks)), dtype=torch.int32, device=device)
        self.tokens = torch.zeros(lines, dtype=torch.int64, device=device)
        self.sound = torch.zeros(lines, dtype=torch.bool, device=device)
        self._logits: Tensor | None = None  # [lines, vocab] of the model's dtype; made when first needed
        self._outputs = torch.zeros(lines, dtype=torch.int64, device=device)
        self.visual: Tensor | None = None  # [TOKENS[-1], (1 + levels) * hidden]: of prompts' visual tokens
        if sees and model.vision is not None:
            size = TOKENS[-1], (1 + model.vision.depth_levels) * model.hidden_size
            self.visual = torch.zeros(size, dtype=model.dtype, device=device)
        self._watched = watched if self.sees else ()
        dtype = model.dtype
        # Of the ends of prompts, for looks: [watched layers, chunks, hidden], [3, chunks]
        self._ends = torch.zeros(
            len(self._watched), most_chunks, model.hidden_size, dtype=dtype, device=device
        )
        self._ends_at = torch.zeros(3, most_chunks, device=device)
        self.counters = torch.zeros(lines * pages.group.kv_heads, dtype=torch.int32, device=device)
        self._mode = model.mode._replace(pdl=early, counters=self.counters)
        self._places = torch.arange(lines - most_chunks + TOKENS[-1], device=device)

    @property
    def sees(self) -> bool:
        """Whether it takes prompts with visual tokens."""
        return self.visual is not None

    @property
    def looks(self) -> bool:
        """Whether it keeps what looks need."""
        return bool(self._watched)

    def holds(self, divided: Division) -> bool:
        """Whether it has all that these rows need."""
        return (self.sees or not divided.sighted) and (self.looks or not divided.looking)

    def look(
        self, chunks: Sequence[ScheduledSequence], shape: Shape, features: Callable[[bytes], Tensor]
    ) -> None:
        """Copy the features of a step's visual tokens where the captured step reads them."""
        if self.visual is None:
            raise RuntimeError("a step with views, and the model has no vision tower")
        fill_visual_buffer(self.visual[: shape.tokens], chunks, features)

    def clear(self, shape: Shape) -> None:
        """Padding alone: running the shape then touches no row and no page."""
        self.step_rows.fill_(-1)
        self.held = None
        if shape.chunks:
            empty = torch.zeros(sum(_sizes(shape.tokens, shape.chunks)), dtype=torch.int32)
            feed = self._cut(empty, shape)
            for part in (feed.rows, feed.chunks):
                part.fill_(-1)
            feed.ends.fill_(shape.decodes)
            if self.visual is not None:
                self.visual.zero_()
            self.feed[: len(empty)] = empty.to(self._device)
        if shape.ending == "logits":
            self.logits(shape)

    def logits(self, shape: Shape) -> Tensor:
        """[lines, vocab] of the last step that ended in logits."""
        if self._logits is None:
            dtype = self._model.dtype
            size = len(self.tokens), self._model.vocab_size
            self._logits = torch.zeros(size, dtype=dtype, device=self._device)
        return self._logits[: shape.decodes + shape.chunks]

    def run(self, shape: Shape) -> None:
        """What is recorded."""
        hidden, outputs = self._forward(shape)
        if shape.ending != "look":
            self._sample(shape, hidden, outputs)

    def _sample(self, shape: Shape, hidden: Tensor, outputs: Tensor) -> None:
        rows = self.all_rows(shape)
        logits = self._model.raw_logits(hidden, self._mode)
        lines = len(rows)
        if shape.ending == "logits":
            self.logits(shape).copy_(logits)
            self._outputs[:lines].copy_(outputs)
            return
        if shape.ending == "greedy":
            tokens, sound = greedy(logits, self._mode)
        else:
            tokens, sound = self._sampler.draw(logits, rows, outputs, self._mode)
        advance_slots(rows, tokens, self._rows.state, self._mode)
        # Copies last: a kernel can be launched early behind another kernel alone.
        self.tokens[:lines].copy_(tokens)
        self.sound[:lines].copy_(sound)

    def all_rows(self, shape: Shape) -> Tensor:
        """[lines] int32: the device row of each line, -1 for padding."""
        decodes = self.step_rows[: shape.decodes]
        return torch.cat((decodes, self._cut(self.feed, shape).chunks)) if shape.chunks else decodes

    def ends(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """The stream before the watched layers at the ends of prompts [layers, chunks, hidden], and their
        positions [3, chunks]."""
        return self._ends[:, : shape.chunks], self._ends_at[:, : shape.chunks]

    def outputs(self, shape: Shape) -> Tensor:
        """[lines] int64: output positions of the last step that ended in logits."""
        return self._outputs[: shape.decodes + shape.chunks]

    def _forward(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Hidden states [lines, width] and output positions [lines] of what is sampled."""
        state, block_size = self._rows.state, self._pages.block_size
        if not shape.chunks:
            step = self.step_rows[: shape.decodes]
            got = gather_slots(step, state, block_size, self._mode)
            paged = FixedPaged(
                self._pages, got.slots, state.tables, step, got.contexts, None, shape.decodes, shape.longest
            )
            embeds = self._model.embed(got.tokens)
            hidden: Tensor = self._model(embeds, got.positions.expand(3, -1), paged, None, mode=self._mode)
            return hidden, got.outputs
        return self._forward_mixed(shape)

    def _forward_mixed(self, shape: Shape) -> tuple[Tensor, Tensor]:
        state, block_size, feed = self._rows.state, self._pages.block_size, self._cut(self.feed, shape)
        self._enter(feed)
        places, real = feed.places.long(), feed.rows >= 0
        blocks = state.tables[feed.rows.clamp(min=0).long(), places // block_size].long()
        slots = torch.where(real, blocks * block_size + places % block_size, -1)
        tokens, positions = feed.tokens.long(), feed.positions.view(torch.float32).view(3, -1)
        index, lengths, outputs = feed.chunks, feed.lengths, feed.outputs.long()
        at = (feed.ends[1:] - 1).clamp(min=0).long()
        if shape.decodes:
            step = self.step_rows[: shape.decodes]
            got = gather_slots(step, state, block_size, self._mode)
            slots, tokens = torch.cat((got.slots, slots)), torch.cat((got.tokens, tokens))
            positions = torch.cat((got.positions.expand(3, -1), positions), dim=1)
            index, lengths = torch.cat((step, index)), torch.cat((got.contexts, lengths))
            outputs = torch.cat((got.outputs, outputs))
        paged = FixedPaged(
            self._pages, slots, state.tables, index, lengths, feed.ends, shape.decodes, shape.longest
        )
        embeds, deep = self._model.embed(tokens), None
        if shape.sighted and self.visual is not None:
            index = self._places[shape.decodes : shape.decodes + shape.tokens]
            deep = merge_visual_buffer(embeds, self.visual[: shape.tokens], feed.seen > 0, index)
        watch = self._watch(shape, positions, at) if self._watched else None
        stop = self._watched[-1] if shape.ending == "look" else None
        hidden: Tensor = self._model(embeds, positions, paged, deep, watch, stop, self._mode)
        lines = hidden.index_select(0, at)
        return torch.cat((hidden[: shape.decodes], lines)) if shape.decodes else lines, outputs

    def _watch(self, shape: Shape, positions: Tensor, at: Tensor) -> HiddenStateTap:
        """Keeps the hidden states and positions of the last token of each prompt."""
        ends, places = self.ends(shape)
        torch.index_select(positions, 1, at, out=places)
        return HiddenStateTap(dict.fromkeys(self._watched, at), dict(zip(self._watched, ends, strict=True)))

    def _enter(self, feed: Feed) -> None:
        """Prompt rows as if their last token were a decode: the end of the step then moves all rows alike."""
        state = self._rows.state
        rows = torch.where(feed.chunks < 0, len(state.last) - 1, feed.chunks).long()
        state.lengths.index_copy_(0, rows, feed.lengths - 1)
        state.positions.index_copy_(0, rows, feed.last.view(torch.float32))
        state.outputs.index_copy_(0, rows, feed.outputs)

    def _cut(self, packed: Tensor, shape: Shape) -> Feed:
        sizes = _sizes(shape.tokens, shape.chunks)
        return Feed(*torch.split(packed[: sum(sizes)], sizes))
