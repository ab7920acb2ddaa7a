"""What travels between the front and the engine: a `Request` in, `Delta`s out.

takes   nothing; these are values
gives   the two shapes that cross the link, and the identity of what an image contributes to them
never   imports torch; holds state
"""

from struct import Struct
from typing import Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from saccade.lod.types import Choice, Grid, LodParams, Look, Region

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pixels = NDArray[np.uint8]
_NUMBERS = Struct("<7q")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when to stop. Stop *strings* are the front's business."""

    max_tokens: int = 16  # already clamped by the front to what the context leaves
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the engine draws one per request
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # alternatives reported per token; 0 reports the sampled one alone
    stop_token_ids: tuple[int, ...] = ()  # the checkpoint's end tokens included, unless ignore_eos
    n: int = 1


class View(msgspec.Struct, frozen=True):
    """One look at a picture: which part of the source, at which token grid.

    Its `key` is its identity: it names features in the store and, with the offset inside the view,
    tokens in the prefix cache. Two views are interchangeable exactly if their keys are equal.
    """

    content: bytes  # >= 16 bytes; hash of mode, size and encoded bytes, keyed per tenant
    box: tuple[int, int, int, int]  # x0, y0, x1, y1 in source pixels
    grid: tuple[int, int]  # rows, columns of patches (before merging)
    merge: int  # patches per token along each side
    processing: bytes  # hash of resize filter, mean, std, patch sizes

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] // (self.merge * self.merge)

    @property
    def token_grid(self) -> tuple[int, int]:
        return self.grid[0] // self.merge, self.grid[1] // self.merge

    @property
    def key(self) -> bytes:
        numbers = _NUMBERS.pack(*self.box, *self.grid, self.merge)
        parts = (self.content, numbers, self.processing)
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake3(framed).digest(length=32)


class Media(msgspec.Struct, frozen=True):
    """A picture, or one pair of video frames, standing at one placeholder of the prompt."""

    placeholder: int  # index in `Request.prompt` of the single placeholder id this media expands
    view: View
    pixels: Pixels  # [frames, height, width, 3] RGB; 1 frame for a picture, 2 for video
    full_grid: Grid | None = None  # token grid of the picture at full detail; None: the view's own
    origin: int | None = None  # of a zoomed view: the slot of its whole picture, which has the pixels
    name: str = ""  # of a picture: the reference its owner may send in its place
    without_pixels: bool = False  # it was named and came without pixels

    @property
    def full(self) -> Grid:
        return self.full_grid or self.view.token_grid


NO_PIXELS: Pixels = np.empty((0, 0, 0, 3), dtype=np.uint8)  # a zoomed view's, and a named picture's


class ZoomRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Views of a request that are chosen in the middle of its life, once it has been looked at."""

    params: LodParams
    placeholders: tuple[int, ...]  # media that may be zoomed
    budget: int  # visual tokens, theirs and those of their zoomed views together
    most_views: int  # zoomed views of all together
    at: int  # index in `Request.prompt` before which they stand: the question ends there
    before: tuple[int, ...]  # ids before and behind each
    after: tuple[int, ...]
    only_look: bool = False  # the request ends with what was chosen


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A question on its way to the engine. `prompt` holds one placeholder id per media."""

    id: str
    prompt: tuple[int, ...]
    media: tuple[Media, ...] = ()
    sampling: Sampling = Sampling()
    salt: bytes = b""  # the tenant; prefixes are shared only between equal salts
    priority: int = 0  # lower is sooner; a level is worth some seconds of waiting (scheduler/policy.py)
    arrived: float = 0.0  # time.monotonic() of the front; both processes share the clock
    registered: bool = False  # views stand over their part of the picture, as the checkpoint learnt it
    zooming: ZoomRequest | None = None  # None: all views are known

    @property
    def length(self) -> int:
        """Prompt tokens after every placeholder has become its view's tokens."""
        return len(self.prompt) + sum(media.view.tokens - 1 for media in self.media)

    @property
    def max_length(self) -> int:
        """What `length` can become when views are chosen."""
        return self.length + (most_more(self.zooming, self.media) if self.zooming else 0)

    @property
    def full_detail_tokens(self) -> int:
        """Visual tokens of its pictures and videos at full detail."""
        return sum(item.full[0] * item.full[1] for item in self.media if item.origin is None)


def most_more(zooming: ZoomRequest, media: tuple[Media, ...]) -> int:
    """Tokens that zooming can add to a prompt at most."""
    looked = sum(item.view.tokens for item in media if item.placeholder in zooming.placeholders)
    left = max(zooming.budget - looked, 0)
    return left + min(zooming.most_views, left) * (len(zooming.before) + len(zooming.after))


class ZoomResult(msgspec.Struct, frozen=True, kw_only=True):
    """What zooming came to; on the first delta of a request that was looked at."""

    regions: tuple[tuple[Region, ...], ...]  # of each medium in `ZoomRequest.placeholders`
    gated: tuple[str | None, ...]  # why there are none
    more_tokens: int  # of the prompt, for all of it; visual ones among them:
    visual_tokens: int
    choices: tuple[Choice, ...] = ()  # and the maps behind them, where nothing but the look was asked for
    looks: tuple[Look, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the raw model distribution at one position."""

    sampled: float
    top: tuple[tuple[int, float], ...]  # best first, as many as were asked for


class EngineTimes(msgspec.Struct, frozen=True, gc=False):
    """Where a request's time went in the engine; stamps of time.monotonic(), which both processes share."""

    queued: float
    started: float  # when it first had a device row
    first: float  # when its first token was known
    encode: float = 0.0  # seconds between those two that went into its views
    preempted: int = 0  # times it had to give way
    look: float = 0.0  # seconds from its first row to the choice of zoomed views; encoding apart


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """News of one choice of one request: the tokens of one step, perhaps the end."""

    request_id: str
    index: int = 0  # which of the n choices
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache (on the first delta)
    error: str | None = None
    code: str | None = None  # names the error's class (errors.py)
    kept: tuple[int, ...] = ()  # slots of media whose features are there for later; on the first delta
    times: EngineTimes | None = None  # with the first token of a request, and with every end
    zoomed: ZoomResult | None = None
