"""Who goes next, how far, and who must give way: the decisions of the scheduler, as plain functions.

takes   numbers and sequences as they stand
gives   a decision
never   changes anything

Sequences stand in one order, their rank: the moment they came plus `patience` seconds for each level of their
priority. It never changes, and that is the ageing: whoever comes later than that is behind it, whatever its
priority. Rank decides who gives way when memory runs out, and who is first in a line.

There are two lines: requests with a view to encode, and all others (text, or views and prefixes known from
before). Each has a share of the step and of the rows while the other one wants some too, but that pictures
leave a step to texts where those are seldom; and neither waits for the other's shortage of encoder time.
Where they compete for rows and memory, either may pass the other's head until that has waited for `patience`;
from then on nobody behind it passes. A head that lacks nothing but blocks of the vision pool is passed by
text of its own line too that leaves it a row and the blocks it needs.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import NamedTuple

from saccade.errors import ContextTooLong, InvalidValue, Overloaded
from saccade.request import Request
from saccade.scheduler.ordered_queue import Line
from saccade.scheduler.sequence import Rank, Sequence
from saccade.step_plan import PromptLayout

ANY = 1 << 62  # a limit that is none


class Brief(NamedTuple):
    """Steps that do nothing but look may end before the last layers; their rows are computed again later."""

    tokens: int = 0  # of such a step at most: so few cost next to nothing where they join other rows
    share: float = 1.0  # of a step's time that it takes


NEVER_BRIEF = Brief()


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_rows: int  # sequences on the device at a time
    max_step_tokens: int  # token budget of a step
    max_model_len: int  # tokens of a sequence, prompt and output together
    block_size: int  # tokens per KV block
    # Of the vision tower in one step, and of views in the making; a single larger one still goes, alone.
    max_encode_patches: int
    max_queue: int  # requests waiting; more are refused
    max_queue_bytes: int = ANY  # pixels of requests not answered yet; more are refused
    seed: int = 0  # root of the seeds of requests that name none
    itl_target: float | None = None  # ms between two tokens of an answer that others may lead to; None: any
    itl_margin: float = 0.15  # of that, for what predictions miss and the way to the client adds
    # A prompt that has waited for the first of these seconds makes steps longer, at the last as many times as
    # long: a step's fixed part is then shared by more, and a machine at its limit keeps up.
    stretch_after: tuple[float, float] = (0.25, 0.8)
    stretch: float = 3.0
    # Of requests without views to encode, how many may be expected to come in the time that pictures add to a
    # step while nobody streams: they wait for its end. Where they come often, prompts of pictures are cut
    # too, though their views go whole.
    unwatched: float = 0.15
    # Of steps beside answers, how many may have prompts without views to encode for pictures to spare those.
    # Such a prompt has waited for a step full of pictures already; in a second one its first token took 34 ms
    # beside 6 pictures a second where texts alone take 22 (99th percentiles).
    seldom: float = 0.5
    # Prompt tokens of a step beside answers that stream, where there is a target: more than a captured step
    # holds takes the host longer to launch than the step may last.
    stream_tokens: int = ANY
    encode_layers: int = 1  # of the vision tower: what a view's work is divided by. 1: views go whole
    encode_unit: int = 1  # slices of a view end at multiples of so many layers, if they get so far
    # What a step does for prompts however little time the target leaves: this many tokens for the first
    # prompt of each class, and of one view a layer, or what takes this share of the target. It keeps prompts
    # moving under a target that cannot be met.
    least_chunk: int = 32
    least_time: float = 0.1
    patience: float = 1.0  # seconds: what a level of priority is worth, and when a head is passed no more
    # Of a step's tokens and time, for prompts with views to encode, when others wait: little enough that a
    # text of some hundred tokens goes in one step. Where they spare texts it is left to the streams.
    encode_share: float = 0.3
    copy_tokens: int = 1  # of a block: for fewer it is not copied, they are computed
    wait_tokens: int = 128  # of a prompt, being computed by another: for fewer nobody waits
    class_rows: float = 0.75  # share of the rows that one class may take while the other one waits
    brief: Brief = NEVER_BRIEF

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def end_of(self, request: Request) -> int:
        """Tokens at which an answer ends, prompt and output together; with all views that may be chosen."""
        return min(request.max_length + request.sampling.max_tokens, self.max_model_len)

    @property
    def step_target(self) -> float | None:
        """Milliseconds a step should take while answers are streaming and nobody waits for long."""
        return None if self.itl_target is None else self.itl_target * (1 - self.itl_margin)

    def stretched(self, waited: float) -> float | None:
        """The same when some prompt has waited for so many seconds."""
        if self.step_target is None:
            return None
        first, last = self.stretch_after
        share = min(max((waited - first) / (last - first), 0.0), 1.0)
        return self.step_target * (1 + share * (self.stretch - 1))

    def spares_texts(self, share: float, waited: float) -> bool:
        """Whether pictures add no more than they must to a step with prompts of others, which such a `share`
        of steps have: as long as no prompt has waited long enough for longer steps."""
        return share < self.seldom and waited <= self.stretch_after[0]

    def while_quiet(self, rate: float, empty: float, waited: float) -> float | None:
        """Milliseconds that prompts with views to encode may add to a step while nobody streams, `rate` other
        requests come a second and some prompt has waited for so long. None, which is any, where a step that
        does nothing (`empty` ms) is beyond the target already: cutting would cost more than it spares."""
        least = self.stretched(waited)
        if least is None or not rate or empty >= (self.step_target or 0.0):
            return None
        return max(least, 1e3 * self.unwatched / rate)

    @property
    def most_class_rows(self) -> int:
        return math.ceil(self.max_rows * self.class_rows)


@dataclass
class Allowance:
    """What the prompts of one class may still add to a step."""

    tokens: int
    until: float | None  # ms the step may have grown to; None: any
    least: int  # tokens the next one gets in any case


def rank(came: float, priority: int, handle: int, limits: Limits) -> Rank:
    return came + priority * limits.patience, handle


def refuse_impossible(request: Request, layout: PromptLayout, limits: Limits, pool_blocks: int) -> None:
    """Raise for a request that could not be answered even with the engine to itself."""
    sampling, prompt = request.sampling, request.max_length  # with all the views that may be chosen
    if prompt < 1:
        raise InvalidValue("the prompt is empty; it needs at least one token", param="prompt")
    if sampling.max_tokens < 1:
        raise InvalidValue(f"max_tokens is {sampling.max_tokens}; ask for at least 1", param="max_tokens")
    if sampling.n < 1:
        raise InvalidValue(f"n is {sampling.n}; ask for at least 1", param="n")
    if prompt >= limits.max_model_len:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens, of which pictures take {_visual(layout)}; the context holds "
            f"{limits.max_model_len}, output included; shorten the prompt or use smaller pictures",
            param="prompt",
        )
    # The last token is only given out, never computed: it needs no place in the cache.
    most = min(prompt + sampling.max_tokens, limits.max_model_len) - 1
    if limits.blocks_for(most) > pool_blocks:
        raise ContextTooLong(
            f"{prompt} prompt tokens and up to {sampling.max_tokens} output tokens need "
            f"{limits.blocks_for(most)} KV blocks of {limits.block_size} tokens; the cache has "
            f"{pool_blocks}; shorten the prompt or lower max_tokens",
            param="max_tokens",
        )


def refuse_unplaceable(needed: tuple[int, int], sizes: tuple[int, int], limits: Limits) -> None:
    """Raise when the text pool or the vision pool is smaller than what a request needs of it."""
    for name, blocks, size in zip(("text", "pictures"), needed, sizes, strict=True):
        if blocks > size:
            raise ContextTooLong(
                f"the request needs {blocks} KV blocks of {limits.block_size} tokens for {name}; their pool "
                f"has {size}; shorten the prompt, lower max_tokens or use smaller pictures",
                param="prompt",
            )


def refuse_too_many(waiting: int, held: int, more: int, limits: Limits) -> None:
    """Raise when the queue is full: of requests, or of pixels (`held` bytes of them, `more` to come)."""
    if waiting >= limits.max_queue:
        raise Overloaded(
            f"{waiting} requests are waiting and the queue holds {limits.max_queue}; try again later"
        )
    if held and held + more > limits.max_queue_bytes:
        raise Overloaded(
            f"pictures of {held} bytes are waiting or being answered, and {limits.max_queue_bytes} may be "
            "at a time; try again later"
        )


def _visual(layout: PromptLayout) -> int:
    return sum(span.view.tokens for span in layout.spans)


def allowances(
    limits: Limits,
    tokens: int,
    now: float,
    target: float | None,
    *,
    both: bool,
    turn: int,
) -> tuple[Allowance, Allowance]:
    """What prompts without and with views to encode may add to a step that has `tokens` left and takes `now`
    ms already. When `both` want some, the first get their share and the second the rest; a single token goes
    to them in turn."""
    share, first = 1.0, tokens
    if both:
        share = 1 - limits.encode_share
        first = min(max(int(tokens * share), 1), tokens - 1) if tokens > 1 else tokens * (turn % 2)
    until = target if target is None else now + max(target - now, 0.0) * share
    return Allowance(first, until, limits.least_chunk), Allowance(tokens, target, limits.least_chunk)


def has_time(allowance: Allowance, now: float, alone: float, waited: float, limits: Limits) -> bool:
    """Whether a newcomer may make a step of `now` ms longer. The batch does not grow beyond the target,
    unless it has `waited` long, or not even a stream `alone` (ms) would meet the target."""
    if allowance.until is None or now < allowance.until:
        return True
    return allowance.least > 0 and (alone > (limits.step_target or 0.0) or waited > limits.patience)


def held_back(
    sequence: Sequence, other: Line, now: float, patience: float, competes: Callable[[Sequence], bool]
) -> bool:
    """Whether a waiting sequence must leave rows and memory to the head of the other line, which lacks them,
    comes before it, and has waited long enough. It need not where it takes nothing that the head lacks."""
    if not len(other):
        return False
    head = other[0]
    return head.rank < sequence.rank and now - head.group.since > patience and competes(head)


def victim(
    running: Line | Ordered[Sequence], sequence: Sequence, frees: Callable[[Sequence], bool]
) -> Sequence:
    """The last by rank whose leaving frees something gives way; the sequence itself if nobody behind it does.
    The first never does, so it ends, and then the next is the first."""
    behind = (running[place] for place in range(len(running) - 1, -1, -1))
    return next(one for one in behind if one is sequence or frees(one))
