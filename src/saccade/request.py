"""What crosses between the API server and the engine core: `Request` in, `Delta` out; the time it takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from typing import Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from saccade.lod.types import Grid, LodParams, Region, RelevanceMaps, ZoomChoice

FinishReason = Literal["stop", "length", "cancelled", "error"]
MeasuredStage = Literal["tokenise", "fetch", "unpack"]
Pixels = NDArray[np.uint8]
GrammarKind = Literal["json_schema", "regex", "lark", "choice"]
_NUMBERS = Struct("<7q")


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence may write: structured output, and tool calls that a request enforces.

    Put it into `Sampling.grammar`; that is all a caller does. Pass it through `GrammarCompiler.validate`
    (`saccade.grammar.compiler`) first, which raises `InvalidValue` with the request's field for a grammar
    that is invalid or too large. The answer ends when the grammar is complete, with finish reason "stop".

    A caller that keeps reasoning apart sets `start_after` to the ids that end it (`</think>`): the sequence
    is free up to the first of them, and the grammar applies to what follows. A caller that enforces tool
    calls builds a `lark` grammar of the model's format: tags are strings or special tokens (`<tool_call>`),
    arguments are `%json { ...schema... }`.
    """

    kind: GrammarKind
    text: str  # a JSON schema, a regular expression, a Lark grammar, or a JSON list of strings
    start_after: tuple[int, ...] = ()  # token ids; empty: from the first token


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved sampling parameters. Stop strings are not among them: the detokenizer finds those."""

    max_tokens: int = 16  # already limited to what the context leaves
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the engine core draws one per request
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # alternatives per token; 0 reports only the sampled one
    stop_token_ids: tuple[int, ...] = ()  # with the checkpoint's end tokens unless ignore_eos
    n: int = 1
    grammar: GrammarSpec | None = None


class View(msgspec.Struct, frozen=True):
    """A region of an image or of video frames, at a token grid.

    `key` is its identity: it keys the encoder cache and, with the offset inside the view, tokens in the
    prefix cache.
    """

    content: bytes  # >= 16 bytes; hash of mode, size and encoded bytes, keyed per tenant
    box: tuple[int, int, int, int]  # x0, y0, x1, y1 in source pixels
    grid: tuple[int, int]  # rows, columns of patches (before merging)
    merge: int  # patches per token along each side
    processing: bytes  # hash of resize filter, mean, std, patch sizes
    # (width, height) the box is resized to, one after another; none: to the grid's pixels at once.
    resizes: tuple[tuple[int, int], ...] = ()
    offset: tuple[int, int] = (0, 0)  # x, y of the grid in the last of these; what lies outside is black

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] // (self.merge * self.merge)

    @property
    def token_grid(self) -> tuple[int, int]:
        return self.grid[0] // self.merge, self.grid[1] // self.merge

    @property
    def key(self) -> bytes:
        numbers = _NUMBERS.pack(*self.box, *self.grid, self.merge)
        parts = [self.content, numbers, self.processing]
        if self.resizes:
            parts.append(np.array([*self.resizes, self.offset], dtype="<i8").tobytes())
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake3(framed).digest(length=32)


class Media(msgspec.Struct, frozen=True):
    """A view with its pixels, at one placeholder of the prompt."""

    placeholder: int  # index in `Request.prompt` of its placeholder token, which expands to its tokens
    view: View
    pixels: Pixels  # [frames, height, width, 3] RGB of the whole source; 1 frame for an image
    full_grid: Grid | None = None  # token grid of the image at full detail; None: the view's own
    origin: int | None = None  # of a zoomed view: the placeholder of its whole image, which has the pixels
    name: str = ""  # of an image: the reference a client may send instead
    without_pixels: bool = False  # the client sent only its name
    # Of a view of a video that stands in the rows and columns of the view before it: its rotary time after
    # the video's first view. None: the view has positions of its own.
    time: int | None = None

    @property
    def full(self) -> Grid:
        return self.full_grid or self.view.token_grid


NO_PIXELS: Pixels = np.empty((0, 0, 0, 3), dtype=np.uint8)  # of a zoomed view and of a named image


class ZoomRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Level of detail: the zoomed views of a request, chosen in the engine core after a first look."""

    params: LodParams
    placeholders: tuple[int, ...]  # of media that may be zoomed
    budget: int  # visual tokens of these media and their zoomed views together
    most_views: int  # zoomed views of all media together
    at: int  # index in `Request.prompt` at which they are inserted: the end of the question
    before: tuple[int, ...]  # token ids before and after each view
    after: tuple[int, ...]
    preview_only: bool = False  # the request ends with the choice


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the API server sends to the engine core. `prompt` has one placeholder id per media."""

    id: str
    prompt: tuple[int, ...]
    media: tuple[Media, ...] = ()
    sampling: Sampling = Sampling()
    salt: bytes = b""  # of the tenant; prefixes are shared only between equal salts
    priority: int = 0  # lower is sooner; a level is worth some seconds of waiting (scheduler/policy.py)
    arrived: float = 0.0  # time.monotonic(); both processes share the clock
    sequential: bool = False  # rotary positions of visual tokens are counted like those of text
    registered: bool = False  # rotary positions of zoomed views are those of their region in the whole image
    zooming: ZoomRequest | None = None  # None: all views are given

    @property
    def length(self) -> int:
        """Prompt tokens after expanding every placeholder."""
        return len(self.prompt) + sum(media.view.tokens - 1 for media in self.media)

    @property
    def max_length(self) -> int:
        """`length` with the most zoomed views."""
        zoom = self.zooming
        if zoom is None:
            return self.length
        looked = sum(item.view.tokens for item in self.media if item.placeholder in zoom.placeholders)
        left = max(zoom.budget - looked, 0)
        return self.length + left + min(zoom.most_views, left) * (len(zoom.before) + len(zoom.after))

    @property
    def full_detail_tokens(self) -> int:
        """Visual tokens of its images and videos at full detail."""
        return sum(item.full[0] * item.full[1] for item in self.media if item.origin is None)


class ZoomResult(msgspec.Struct, frozen=True, kw_only=True):
    """What level of detail chose; on the first delta of the request."""

    regions: tuple[tuple[Region, ...], ...]  # of each medium in `ZoomRequest.placeholders`
    gated: tuple[str | None, ...]  # of each medium: why it has none
    more_tokens: int  # added to the prompt
    visual_tokens: int  # of these
    choices: tuple[ZoomChoice, ...] = ()  # and the maps behind them, for `preview_only`
    looks: tuple[RelevanceMaps, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the raw model distribution at one position."""

    sampled: float
    top: tuple[tuple[int, float], ...]  # best first


class EngineTimes(msgspec.Struct, frozen=True, gc=False):
    """Where the time of a request went in the engine core; times of time.monotonic()."""

    queued: float
    started: float  # when it first had a slot
    first: float  # when its first token was known
    encode: float = 0.0  # seconds of these in the vision encoder
    preempted: int = 0  # number of preemptions
    look: float = 0.0  # seconds from its start to the choice of zoomed views, without encoding


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Output of one sequence of one request: the tokens of one step, and possibly the end."""

    request_id: str
    index: int = 0  # which of the n sequences
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; on the first delta
    error: str | None = None
    code: str | None = None  # of the error's class (errors.py)
    kept: tuple[int, ...] = ()  # placeholders of media whose features are cached; on the first delta
    times: EngineTimes | None = None  # with the first token of a request and with every end
    zoomed: ZoomResult | None = None


@dataclass(slots=True)
class RequestTiming:
    """The time of one prompt by stage, from its first byte to its last token.

    Stages that were not reached are left out. The others add up to `total`, less the time to encode the
    response.

    receive      reading the body
    prepare      parsing it, waiting for a thread
    tokenise     chat template and tokenizer
    fetch        fetching images and reading their sizes
    unpack       decoding images; fetching and decoding videos
    send         to the engine core
    queue        waiting for a slot
    look         steps up to the choice of its zoomed views (LOD only)
    encode       steps of the vision encoder for its images
    prefill      the other steps up to its first token
    first_token  from the engine core to the API server
    decode       from the first token to the last
    total        from the first byte to the end
    """

    arrived: float = 0.0  # a timestamp of time.monotonic(), as `read`, `sent`, `first` and `last`
    read: float | None = None  # body complete
    tokenise: float = 0.0  # seconds, as `fetch` and `unpack`
    fetch: float = 0.0
    unpack: float = 0.0
    sent: float | None = None  # to the engine core
    engine: EngineTimes | None = None
    first: float | None = None  # first token received
    last: float | None = None  # latest token received

    @contextmanager
    def measure(self, stage: MeasuredStage) -> Iterator[None]:
        """Adds the time spent inside to `stage`."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, stage, getattr(self, stage) + time.monotonic() - start)

    @property
    def reached(self) -> str:
        """The current stage. The engine reports nothing before the first token: until then it is `queue`."""
        if self.read is None:
            return "receive"
        if self.sent is None:
            return "prepare"
        return "queue" if self.first is None else "decode"

    def seconds(self, end: float | None = None) -> dict[str, float]:
        """Seconds by stage, in order; with `end`, the total too."""
        known: dict[str, float | None] = {}
        prepared = self.tokenise + self.fetch + self.unpack
        known["receive"] = _between(self.arrived, self.read)
        known["prepare"] = _between(self.read, self.sent, prepared)
        if self.sent is not None:
            known |= {"tokenise": self.tokenise}
            known |= {"fetch": self.fetch, "unpack": self.unpack} if self.fetch or self.unpack else {}
        if self.engine is not None:
            engine = self.engine
            known["send"] = _between(self.sent, engine.queued)
            known["queue"] = _between(engine.queued, engine.started)
            known |= {"look": engine.look} if engine.look else {}
            known |= {"encode": engine.encode} if engine.encode else {}
            known["prefill"] = _between(engine.started, engine.first, engine.encode + engine.look)
            known["first_token"] = _between(engine.first, self.first)
        known["decode"] = _between(self.first, self.last)
        known["total"] = _between(self.arrived, end)
        return {name: value for name, value in known.items() if value is not None}

    def header(self, end: float | None = None) -> bytes:
        """The value of a Server-Timing header: milliseconds by stage."""
        return ", ".join(
            f"{name};dur={value * 1e3:.2f}" for name, value in self.seconds(end).items()
        ).encode()


def _between(start: float | None, end: float | None, less: float = 0.0) -> float | None:
    return None if start is None or end is None else max(end - start - less, 0.0)
