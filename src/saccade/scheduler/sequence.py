"""A request's state in the scheduler, and its sequences: one per answer (`n`)."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from msgspec.structs import replace
from numpy.typing import NDArray

from saccade.kv_cache.pool_sizing import VisionBlocks
from saccade.kv_cache.prefix_cache import HashChain, PrefixCache, overlapping_spans
from saccade.request import (
    Delta,
    EngineTimes,
    FinishReason,
    Media,
    Pixels,
    Request,
    Sampling,
    TokenLogprobs,
    ZoomResult,
)
from saccade.scheduler.host_decision import HostDecision
from saccade.scheduler.policy import Rank, SchedulerConfig
from saccade.step_plan import PromptLayout, RelevanceTarget, ScheduledSequence, SlotInit, Span


@dataclass(eq=False)
class RequestState:
    request: Request
    layout: PromptLayout
    arrival_time: float  # on the scheduler's clock, as all times here
    pixels: dict[bytes, Pixels] = field(init=False)  # by view key; evicted features are encoded again
    pixel_bytes: int = field(init=False)
    sequences: list["Sequence"] = field(default_factory=list)  # unfinished ones, lowest index first
    num_slots: int = 0  # slots its sequences have now
    started: bool = False  # whether any sequence has ever had a slot
    started_at: float = 0.0
    first_token_at: float | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; 0 again once reported
    encode_seconds: float = 0.0  # step time spent on its views
    num_preemptions: int = 0
    look_seconds: float = 0.0  # as in EngineTimes
    vision_blocks: VisionBlocks | None = None  # of the layout; computed when it is needed
    deleted: set[bytes] = field(default_factory=set)  # images (content hashes) deleted since its arrival
    decision: HostDecision | None = None  # pending: the prompt ends where it applies
    zoomed: ZoomResult | None = None  # None again once reported

    def __post_init__(self) -> None:
        self.pixels = pixels_by_view(self.request, self.layout)
        self.pixel_bytes = sum(item.pixels.nbytes for item in self.request.media)
        self.names_images = any(item.without_pixels for item in self.request.media)

    def times(self, clock: Callable[[], float], *, last: bool) -> EngineTimes | None:
        """For the first delta and the last one."""
        if self.first_token_at is None:
            self.first_token_at = clock()
        elif not last:
            return None
        encode, look = self.encode_seconds, self.look_seconds
        return EngineTimes(
            self.arrival_time, self.started_at, self.first_token_at, encode, self.num_preemptions, look
        )


def pixels_by_view(request: Request, layout: PromptLayout) -> dict[bytes, Pixels]:
    """By view key. Zoomed views have their image's pixels. Where an image is both named and given, the given
    pixels count."""
    given = {item.placeholder: item.pixels for item in request.media}
    media = sorted(request.media, key=lambda item: item.placeholder)  # the order of the layout's spans
    shown = sorted(zip(media, layout.spans, strict=True), key=lambda one: not one[0].without_pixels)
    return {span.key: given[image_placeholder(item)] for item, span in shown}


def image_placeholder(item: Media) -> int:
    """The placeholder of the image that a view shows."""
    return item.placeholder if item.origin is None else item.origin


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer, on its way from `num_computed_tokens` to `num_tokens`."""

    seq_id: int  # grows with arrival
    state: RequestState
    index: int  # which of the n answers
    seed: int
    max_tokens: int  # prompt and output together
    chain: HashChain | None  # None without a prefix cache
    tokens: list[int]  # known ids: the prompt, then the output
    rank: Rank = (0.0, 0)

    prompt_length: int = field(init=False)  # the longest it can become while a decision is pending
    prompt_changed: bool = False  # since it was last sent to the device
    encoding: bool = False  # its class: whether a view must be encoded, as of when it was queued
    pending: int = 0  # tokens sampled at most by steps whose output is not known yet
    finished: bool = False
    awaited_block: bytes = b""  # key of a block that another sequence computes and this one waits for
    # The prefix cache's last answer (blocks, tokens), and the cache version and token count it is valid for.
    prefix_match: tuple[tuple[int, int], tuple[list[int], int]] | None = None
    epoch: int = 0  # grows when it leaves its slot, to tell apart the outputs of an earlier stay

    # While it has a slot:
    slot: int | None = None
    num_computed_tokens: int = 0  # including the steps planned so far
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0  # leading blocks known to the prefix cache
    dirty_blocks: list[int] = field(default_factory=list)  # indices not yet in the device's block table
    pins: dict[int, Span] = field(default_factory=dict)  # pinned views, by start
    awaits_output: bool = False  # nothing is scheduled before the output of its step is known
    arriving: bool = False  # the step that gives it a slot is being planned; its blocks are not filled yet
    host_blocks: tuple[int, ...] = ()  # to swap in, in the step it returns with
    swapped: bool = False  # it was swapped out before

    def __post_init__(self) -> None:
        state = self.state
        undecided = state.decision is not None
        self.prompt_length = state.request.max_length if undecided else len(state.layout.tokens)

    @property
    def num_tokens(self) -> int:
        """Including those not known yet."""
        return len(self.tokens) + self.pending

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens it needs blocks for when it starts: of a prompt that may grow, the most."""
        return max(self.num_tokens, self.prompt_length)

    @property
    def remaining(self) -> int:
        """Positions that can be scheduled; 0 while its last token or a host decision is awaited."""
        length = len(self.tokens) + self.pending
        if length >= self.max_tokens or self.awaits_output:
            return 0
        return length - self.num_computed_tokens

    def prompt_donor(self) -> "Sequence | None":
        """Another sequence of the request that has the whole prompt computed before the next step."""
        if self.state.decision is not None:
            return None
        for item in self.state.sequences:
            if item.slot is not None and not item.arriving and item.num_computed_tokens >= item.prompt_length:
                return item
        return None

    def spans(self, start: int, stop: int) -> Ordered[Span]:
        if start >= self.prompt_length:
            return ()
        return overlapping_spans(self.state.layout.spans, start, stop)

    def slot_init(self) -> SlotInit:
        output = tuple(self.tokens[self.prompt_length :])
        prompt = self.state.layout.tokens
        return SlotInit(self._slot(), self.state.request.sampling, self.seed, prompt, output)

    def _slot(self) -> int:
        if self.slot is None:
            raise RuntimeError(f"sequence {self.seq_id} has no slot")
        return self.slot

    def next_slice(self, count: int) -> ScheduledSequence:
        """Its next `count` positions; the last one samples when no known token follows it."""
        start, prompt, state = self.num_computed_tokens, self.prompt_length, self.state
        stop = start + count
        last = stop == len(self.tokens) + self.pending
        slot = self._slot()
        if count == 1 and start >= prompt and state.decision is None:  # decode: most slices of most steps
            known = (self.tokens[start],) if start < len(self.tokens) else ()
            column = text_position(start + state.layout.delta)
            return ScheduledSequence(self.seq_id, slot, start, 1, known, column, (), last, stop - prompt)
        return ScheduledSequence(
            self.seq_id,
            slot,
            start,
            count,
            tuple(self.tokens[start:stop]),
            _positions(state.layout, start, stop),
            tuple(self.spans(start, stop)),
            last and state.decision is None,
            max(stop - prompt, 0),
            self._relevance_targets(state.decision) if last and state.decision is not None else (),
        )

    def draft_slice(self, drafts: tuple[int, ...]) -> ScheduledSequence:
        """Its last token and drafts of the next ones, which the device verifies."""
        last, count = self.next_slice(1), 1 + len(drafts)
        return replace(
            last,
            num_tokens=count,
            tokens=(*last.tokens, *drafts),
            positions=_positions(self.state.layout, last.start, last.start + count),
            num_draft_tokens=len(drafts),
        )

    def _relevance_targets(self, decision: HostDecision) -> tuple[RelevanceTarget, ...]:
        state = self.state
        return tuple(
            RelevanceTarget(span, state.pixels[span.key], span.view.content not in state.deleted)
            for span in decision.probe(state.request, state.layout)
        )

    def append(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Add sampled tokens up to the first that finishes the sequence; gives how many were added."""
        if len(tokens) == 1:
            self.tokens.append(tokens[0])
            return 1, self.finish_reason()
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if finish := self.finish_reason():
                return count, finish
        return len(tokens), None

    def finish_reason(self) -> FinishReason | None:
        """Whether the last known token finishes it."""
        length, sampling = len(self.tokens), self.state.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids and length - self.prompt_length >= sampling.min_tokens:
            return "stop"
        return "length" if length >= self.max_tokens else None


def new_sequences(
    state: RequestState, config: SchedulerConfig, prefix: PrefixCache | None, seq_ids: Iterator[int]
) -> list[Sequence]:
    """One for each of the request's n answers."""
    request, layout = state.request, state.layout
    max_tokens = config.max_tokens_of(request)
    made = []
    for index, seq_id in zip(range(request.sampling.n), seq_ids, strict=False):
        seed = derive_seed(request.sampling, config.seed, request.id, index)
        chain = prefix.new_chain(request.salt, layout.spans) if prefix is not None else None
        rank = state.arrival_time + request.priority * config.patience, seq_id
        made.append(Sequence(seq_id, state, index, seed, max_tokens, chain, list(layout.tokens), rank))
    return made


def make_delta(
    sequence: Sequence,
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprobs | None, ...],
    finish: FinishReason | None,
    kept: tuple[int, ...],
    clock: Callable[[], float],
) -> Delta:
    """New tokens of a sequence, and once per request what else has become known. `kept`: placeholders of the
    images whose features a later request would find."""
    state = sequence.state
    cached, state.cached_tokens = state.cached_tokens, 0
    zoomed, state.zoomed = state.zoomed, None
    return Delta(
        request_id=state.request.id,
        index=sequence.index,
        tokens=tokens,
        logprobs=tuple(filter(None, logprobs)),
        finish=finish,
        cached_tokens=cached,
        times=state.times(clock, last=finish is not None),
        zoomed=zoomed,
        kept=kept,
    )


def _positions(layout: PromptLayout, start: int, stop: int) -> NDArray[np.float32]:
    """Rotary positions of tokens start .. stop: [3, stop - start]."""
    prompt, delta = len(layout.tokens), layout.delta
    if start >= prompt:
        return _text_positions(start + delta, stop + delta)
    if stop <= prompt:
        return layout.positions[:, start:stop]
    output = _text_positions(prompt + delta, stop + delta)
    return np.concatenate((layout.positions[:, start:], output), axis=1)


def _text_positions(first: int, stop: int) -> NDArray[np.float32]:
    """Positions of text: the same on all three axes."""
    return np.broadcast_to(np.arange(first, stop, dtype=np.float32), (3, stop - first))


# Slices of one array: building each anew took a third of the time of planning a step.
_ALL_POSITIONS = _text_positions(0, 1 << 16)


def text_position(position: int) -> NDArray[np.float32]:
    """Of one output token, [3, 1]; read-only."""
    if 0 <= position < _ALL_POSITIONS.shape[1]:
        return _ALL_POSITIONS[:, position : position + 1]
    return _text_positions(position, position + 1)


def derive_seed(sampling: Sampling, root: int, request_id: str, index: int) -> int:
    """63 bits: from the request's own seed when it names one, else from the engine's and the request's id."""
    origin = f"root {root} request {request_id}" if sampling.seed is None else f"seed {sampling.seed}"
    return int.from_bytes(blake3(f"{origin} choice {index}".encode()).digest(length=8), "little") >> 1
