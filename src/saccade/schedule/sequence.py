"""One choice of one request on its way from `computed` to `length`.

takes   a request, its layout, and the tokens sampled for it
gives   the rows that carry it on, and when it ends
owns    its tokens; what it holds of the pool, the rows and the feature store (the scheduler does the holding)
never   decides when or how far it runs
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from saccade.cache.prefix import Chain, overlapping
from saccade.plan import Enter, Layout, Row, Span
from saccade.request import FinishReason, Pixels, Request, Sampling

Rank = tuple[float, int]  # when it came, moved by its priority; its handle


@dataclass(eq=False)
class Group:
    """A request: its choices that have not ended yet, lowest index first."""

    request: Request
    layout: Layout
    pixels: dict[bytes, Pixels]  # by view key
    since: float = 0.0  # seconds on the scheduler's clock when it came
    choices: list["Sequence"] = field(default_factory=list)
    rows: int = 0  # device rows its choices have now
    started: bool = False  # whether any choice has ever had a row
    cached: int = 0  # prompt tokens found in the prefix cache; zero again once told


@dataclass(eq=False, slots=True)
class Sequence:
    handle: int  # grows with arrival
    group: Group
    index: int  # which of the n choices
    seed: int
    limit: int  # tokens at which it ends, prompt and output together
    chain: Chain | None  # None without a prefix cache
    tokens: list[int]  # known ids: the prompt, then the output
    rank: Rank = (0.0, 0)  # its place in every line, for good

    prompt_length: int = field(init=False)
    encoding: bool = False  # its class: whether a view of it must be encoded, as of when it joined the queue
    pending: int = 0  # tokens sampled by steps whose results are not known yet
    ended: bool = False
    epoch: int = 0  # grows whenever it leaves its row, so that results of an earlier stay are told apart

    # While it has a row:
    row: int | None = None
    computed: int = 0  # positions whose KV is computed by the steps planned so far
    blocks: list[int] = field(default_factory=list)
    sealed: int = 0  # leading blocks known to the prefix cache
    stale: list[int] = field(default_factory=list)  # block indices the device's table does not have yet
    pins: dict[int, Span] = field(default_factory=dict)  # views kept for it, by their start

    def __post_init__(self) -> None:
        self.prompt_length = len(self.group.layout.tokens)

    @property
    def length(self) -> int:
        """Tokens it has, those still unknown included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions to compute before it can know more; none once its last token is on the way."""
        length = len(self.tokens) + self.pending
        return length - self.computed if length < self.limit else 0

    @property
    def streams(self) -> bool:
        """Whether all that remains is the next token of its answer."""
        return self.computed >= self.prompt_length and self.remaining == 1

    def donor(self) -> "Sequence | None":
        """Another choice of its request that holds the whole prompt, computed."""
        holding = (item for item in self.group.choices if item.row is not None)
        return next((item for item in holding if item.computed >= item.prompt_length), None)

    def may_enter(self) -> bool:
        """Its tokens must be known; its prompt is computed by the first choice of its request, for all."""
        return not self.pending and (self is self.group.choices[0] or self.donor() is not None)

    def spans(self, start: int, stop: int) -> Ordered[Span]:
        return overlapping(self.group.layout.spans, start, stop) if start < self.prompt_length else ()

    def enter(self) -> Enter:
        if self.row is None:
            raise RuntimeError(f"sequence {self.handle} has no row to enter")
        layout = self.group.layout
        output = tuple(self.tokens[self.prompt_length :])
        return Enter(self.row, self.group.request.sampling, self.seed, layout.tokens, output)

    def next_row(self, count: int) -> Row:
        """Its next `count` positions; the last yields a token when nothing remains behind it."""
        if self.row is None:
            raise RuntimeError(f"sequence {self.handle} has no row to run in")
        start, stop = self.computed, self.computed + count
        return Row(
            sequence=self.handle,
            row=self.row,
            start=start,
            count=count,
            tokens=tuple(self.tokens[start:stop]),
            positions=_positions(self.group.layout, start, stop),
            spans=tuple(self.spans(start, stop)),
            sample=stop == len(self.tokens) + self.pending,
            output_position=max(stop - self.prompt_length, 0),
        )

    def finish(self) -> FinishReason | None:
        """Whether the last known token ends it."""
        sampling = self.group.request.sampling
        produced = len(self.tokens) - self.prompt_length
        if produced >= sampling.min_tokens and self.tokens[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None


def _positions(layout: Layout, start: int, stop: int) -> NDArray[np.int32]:
    """Rotary positions of tokens start .. stop: [3, stop - start]."""
    prompt = len(layout.tokens)
    if stop <= prompt:
        return layout.positions[:, start:stop]
    first = max(start, prompt)
    behind = _straight(first + layout.delta, stop + layout.delta)
    return behind if start >= prompt else np.concatenate((layout.positions[:, start:], behind), axis=1)


# The same position on all three axes, as text has it; a slice costs a tenth of making one anew.
_LINE = np.broadcast_to(np.arange(1 << 18, dtype=np.int32), (3, 1 << 18))


def _straight(first: int, stop: int) -> NDArray[np.int32]:
    if stop <= _LINE.shape[1]:
        return _LINE[:, first:stop]
    return np.broadcast_to(np.arange(first, stop, dtype=np.int32), (3, stop - first))


def derive_seed(sampling: Sampling, root: int, request_id: str, index: int) -> int:
    """63 bits: from the request's own seed when it names one, else from the engine's and the request's id."""
    origin = f"root {root} request {request_id}" if sampling.seed is None else f"seed {sampling.seed}"
    return int.from_bytes(blake3(f"{origin} choice {index}".encode()).digest(length=8), "little") >> 1
