"""One choice of one request on its way from `computed` to `length`.

takes   a request, its layout, and the tokens sampled for it
gives   the rows that carry it on, and when it ends
owns    its tokens; what it holds of the pool, the rows and the feature store (the scheduler does the holding)
never   decides when or how far it runs
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from saccade.kv_cache.pool_sizing import VisionBlocks
from saccade.kv_cache.prefix_cache import HashChain, overlapping_spans
from saccade.request import EngineTimes, FinishReason, Media, Pixels, Request, Sampling, ZoomResult
from saccade.step_plan import PromptLayout, RelevanceTarget, ScheduledSequence, SlotInit, Span

Rank = tuple[float, int]  # when it came, moved by its priority; its handle


@dataclass(eq=False)
class Group:
    """A request: its choices that have not ended yet, lowest index first."""

    request: Request
    layout: PromptLayout
    pixels: dict[bytes, Pixels]  # by view key; kept to the end, for what is evicted is encoded again
    pixel_bytes: int = 0
    since: float = 0.0  # seconds on the scheduler's clock when it came
    choices: list["Sequence"] = field(default_factory=list)
    rows: int = 0  # device rows its choices have now
    started: bool = False  # whether any choice has ever had a row
    cached: int = 0  # prompt tokens found in the prefix cache; zero again once told
    started_at: float = 0.0  # on the scheduler's clock, as `since`
    first_at: float | None = None  # when its first token was known
    encode_seconds: float = 0.0  # of steps, spent on its views
    preempted: int = 0  # times a choice of it gave way
    look_seconds: float = 0.0  # as EngineTimes has it
    kinds: tuple[PromptLayout, VisionBlocks] | None = (
        None  # of its blocks, once asked for; of the layout it has now
    )
    deleted: set[bytes] = field(default_factory=set)  # contents of its pictures deleted since it came
    zoomed: ZoomResult | None = None  # what was chosen after a look; None again once told

    @property
    def undecided(self) -> bool:
        """Whether views are still to be chosen: the layout ends where they go."""
        return self.request.zooming is not None

    def times(self, clock: Callable[[], float], *, last: bool) -> EngineTimes | None:
        """Where its time went, for its first news and its last ones; the others cost nothing."""
        if self.first_at is None:
            self.first_at = clock()
        elif not last:
            return None
        encode, look = self.encode_seconds, self.look_seconds
        return EngineTimes(self.since, self.started_at, self.first_at, encode, self.preempted, look)

    def looked(self, now: float) -> None:
        """Its views are chosen: what went before was looking, and encoding what was looked at."""
        self.look_seconds = max(now - self.started_at - self.encode_seconds, 0.0)


def group_of(request: Request, layout: PromptLayout, since: float) -> Group:
    """A request that has just come. ZoomResult views show the pixels of their picture."""
    given = {item.placeholder: item.pixels for item in request.media}
    pixels = pixels_of(request, layout)
    return Group(request, layout, pixels, sum(one.nbytes for one in given.values()), since=since)


def pixels_of(request: Request, layout: PromptLayout) -> dict[bytes, Pixels]:
    """By view key; those of a picture that is named and also given are the given ones."""
    given = {item.placeholder: item.pixels for item in request.media}
    media = sorted(
        request.media, key=lambda item: item.placeholder
    )  # as the layout has them, which knows their keys
    shown = sorted(zip(media, layout.spans, strict=True), key=lambda one: not one[0].without_pixels)
    return {span.key: given[slot_of(item)] for item, span in shown}


def slot_of(item: Media) -> int:
    """Where the picture stands that a view shows."""
    return item.placeholder if item.origin is None else item.origin


@dataclass(eq=False, slots=True)
class Sequence:
    handle: int  # grows with arrival
    group: Group
    index: int  # which of the n choices
    seed: int
    limit: int  # tokens at which it ends, prompt and output together
    chain: HashChain | None  # None without a prefix cache
    tokens: list[int]  # known ids: the prompt, then the output
    rank: Rank = (0.0, 0)  # its place in every line, for good

    prompt_length: int = field(init=False)
    renewed: bool = False  # its prompt has changed since its row was told of it
    encoding: bool = False  # its class: whether a view of it must be encoded, as of when it joined the queue
    pending: int = 0  # tokens sampled by steps whose results are not known yet
    ended: bool = False
    awaits: bytes = b""  # key of a block for which it is to wait while another computes it
    # What the prefix cache had of it (blocks, tokens) when it was last asked, and how things stood then.
    known: tuple[tuple[int, int], tuple[list[int], int]] | None = None
    epoch: int = 0  # grows whenever it leaves its row, so that results of an earlier stay are told apart

    # While it has a row:
    row: int | None = None
    computed: int = 0  # positions whose KV is computed by the steps planned so far
    blocks: list[int] = field(default_factory=list)
    sealed: int = 0  # leading blocks known to the prefix cache
    stale: list[int] = field(default_factory=list)  # block indices the device's table does not have yet
    pins: dict[int, Span] = field(default_factory=dict)  # views kept for it, by their start
    looking: bool = False  # a brief look is on its way; nothing of it runs before that
    arriving: bool = False  # the step it got the row in is being planned: its blocks are still to be filled
    host: tuple[int, ...] = ()  # host slots of its next blocks, in the step it returns with

    def __post_init__(self) -> None:
        self.set_prompt()

    def set_prompt(self) -> None:
        """The prompt is the group's; while its views are undecided, as long as it can become."""
        group = self.group
        self.prompt_length = group.request.max_length if group.undecided else len(group.layout.tokens)

    @property
    def length(self) -> int:
        """Tokens it has, those still unknown included."""
        return len(self.tokens) + self.pending

    @property
    def claim(self) -> int:
        """Tokens it needs places for when it enters: of a prompt that may grow, the most it can have."""
        return max(self.length, self.prompt_length)

    @property
    def remaining(self) -> int:
        """Positions to compute before it can know more; none while its last token or a look is on the way."""
        length = len(self.tokens) + self.pending
        return length - self.computed if length < self.limit and not self.looking else 0

    def donor(self) -> "Sequence | None":
        """Another choice of its request that holds the whole prompt, computed before the next step."""
        if self.group.undecided:  # what the prompt is to end in
            return None
        holding = (item for item in self.group.choices if item.row is not None and not item.arriving)
        return next((item for item in holding if item.computed >= item.prompt_length), None)

    def may_enter(self) -> bool:
        """Its tokens must be known; its prompt is computed by the first choice of its request, for all."""
        return not self.pending and (self is self.group.choices[0] or self.donor() is not None)

    def spans(self, start: int, stop: int) -> Ordered[Span]:
        return overlapping_spans(self.group.layout.spans, start, stop) if start < self.prompt_length else ()

    def enter(self) -> SlotInit:
        if self.row is None:
            raise RuntimeError(f"sequence {self.handle} has no row to enter")
        layout = self.group.layout
        output = tuple(self.tokens[self.prompt_length :])
        return SlotInit(self.row, self.group.request.sampling, self.seed, layout.tokens, output)

    def next_row(self, count: int) -> ScheduledSequence:
        """Its next `count` positions; the last yields a token when nothing remains behind it."""
        if self.row is None:
            raise RuntimeError(f"sequence {self.handle} has no row to run in")
        start, stop, prompt = self.computed, self.computed + count, self.prompt_length
        if count == 1 and start >= prompt:  # the next token of an answer: most rows of most steps
            known = (self.tokens[start],) if start < len(self.tokens) else ()
            column = text_position(start + self.group.layout.delta)
            last = stop == len(self.tokens) + self.pending
            return ScheduledSequence(self.handle, self.row, start, 1, known, column, (), last, stop - prompt)
        undecided = self.group.undecided
        end = stop == len(self.tokens) + self.pending
        return ScheduledSequence(
            self.handle,
            self.row,
            start,
            count,
            tuple(self.tokens[start:stop]),
            _positions(self.group.layout, start, stop),
            tuple(self.spans(start, stop)),
            end and not undecided,
            stop - prompt if stop > prompt else 0,
            self._sights() if end and undecided else (),
        )

    def _sights(self) -> tuple[RelevanceTarget, ...]:
        """What is looked at where the known part of an undecided prompt ends."""
        group = self.group
        zooming = group.request.zooming
        slots = sorted(item.placeholder for item in group.request.media)  # in the order of the spans
        spans = dict(zip(slots, group.layout.spans, strict=True))
        wanted = [spans[slot] for slot in zooming.placeholders] if zooming else []
        return tuple(
            RelevanceTarget(span, group.pixels[span.key], span.view.content not in group.deleted)
            for span in wanted
        )

    def finish(self) -> FinishReason | None:
        """Whether the last known token ends it."""
        length, sampling = len(self.tokens), self.group.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids and length - self.prompt_length >= sampling.min_tokens:
            return "stop"
        return "length" if length >= self.limit else None


def _positions(layout: PromptLayout, start: int, stop: int) -> NDArray[np.float32]:
    """Rotary positions of tokens start .. stop: [3, stop - start]."""
    prompt, delta = len(layout.tokens), layout.delta
    if start >= prompt:
        return _straight(start + delta, stop + delta)
    if stop <= prompt:
        return layout.positions[:, start:stop]
    behind = _straight(prompt + delta, stop + delta)
    return np.concatenate((layout.positions[:, start:], behind), axis=1)


def _straight(first: int, stop: int) -> NDArray[np.float32]:
    """Positions of text: the same on all three axes."""
    return np.broadcast_to(np.arange(first, stop, dtype=np.float32), (3, stop - first))


# Cut out of one array: making each anew took a third of the time of planning a step, and kept one by one they
# would lie all over the heap.
_LINE = _straight(0, 1 << 16)


def text_position(position: int) -> NDArray[np.float32]:
    """Of a token of an answer, [3, 1]; to be read only."""
    if 0 <= position < _LINE.shape[1]:
        return _LINE[:, position : position + 1]
    return _straight(position, position + 1)


def derive_seed(sampling: Sampling, root: int, request_id: str, index: int) -> int:
    """63 bits: from the request's own seed when it names one, else from the engine's and the request's id."""
    origin = f"root {root} request {request_id}" if sampling.seed is None else f"seed {sampling.seed}"
    return int.from_bytes(blake3(f"{origin} choice {index}".encode()).digest(length=8), "little") >> 1
