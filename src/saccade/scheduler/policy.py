"""The scheduler's settings and rules as plain functions: rank, time limits, the share of each class of
prompts.

Sequences are ordered by rank: arrival time plus `patience` seconds per priority level. A rank never changes,
so a low priority is overtaken for a bounded time only. Rank decides the order of a queue and who is
preempted.

There are two queues: requests with a view to encode, and all others (text, or views and prefixes in a cache).
Each has a share of the step and of the slots while both want some, and neither waits for encoder time that
the other lacks. Where they compete for slots and memory, either may overtake the other's head until that has
waited for `patience`.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from saccade.request import Request

UNLIMITED = 1 << 62

Rank = tuple[float, int]  # arrival time shifted by priority; sequence id


class EarlyExit(NamedTuple):
    """Steps that only read relevance may stop before the last layers; their positions are computed again."""

    max_tokens: int = 0  # of such a step: so few cost almost nothing when they join another step
    time_share: float = 1.0  # of a full step's time


NO_EARLY_EXIT = EarlyExit()


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int  # sequences on the device at a time
    max_step_tokens: int  # token budget of a step
    max_model_len: int  # tokens of a sequence, prompt and output together
    block_size: int  # tokens per KV block
    # Of the vision tower in one step, and of partly encoded views; a larger view is still encoded, alone.
    max_encode_patches: int
    max_queue: int  # requests waiting; more are refused
    max_queue_bytes: int = UNLIMITED  # pixels of requests not answered yet; more are refused
    seed: int = 0  # root of the seeds of requests that name none
    itl_target: float | None = None  # ms between two output tokens; None: no target
    itl_margin: float = 0.15  # fraction reserved for prediction errors and delivery
    # A prompt that has waited for the first of these seconds makes steps longer, by `stretch` times at the
    # second: more work then shares a step's fixed cost, so that an overloaded machine keeps up.
    stretch_after: tuple[float, float] = (0.25, 0.8)
    stretch: float = 3.0
    # How many requests without views to encode may be expected to arrive during what image prefill adds to a
    # step while no answer streams: they wait for the end of the step.
    max_arrivals_per_step: float = 0.15
    # The fraction of steps with text prefill up to which image prefill avoids such steps. With 6 images/s
    # beside text, text's first token at the 99th percentile took 34 ms without this and 22 ms alone.
    rare_text_share: float = 0.5
    # Tokens of a step while answers stream and there is a target: a step too large for a CUDA graph takes the
    # host longer to launch than it may last.
    stream_tokens: int = UNLIMITED
    encode_layers: int = 1  # of the vision tower, over which a view's work is spread; 1: not spread
    encode_unit: int = 1  # slices of a view preferably end at multiples of this
    # What a step does for prompts even if the target leaves no time: this many tokens for the first prompt of
    # each class, and of one view a layer or this share of the target.
    min_chunk: int = 32
    min_encode_time: float = 0.1
    patience: float = 1.0  # seconds: worth of a priority level; wait after which a head is not overtaken
    # Share of a step's tokens and time for prompts with views to encode while others wait.
    encode_share: float = 0.3
    wait_tokens: int = 128  # tokens another sequence must be computing for a sequence to wait for them
    class_slots: float = 0.75  # share of the slots that one class may take while the other one waits
    early_exit: EarlyExit = NO_EARLY_EXIT

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def max_tokens_of(self, request: Request) -> int:
        """Most tokens of a sequence, prompt and output together, with all views that may be chosen."""
        return min(request.max_length + request.sampling.max_tokens, self.max_model_len)

    @property
    def step_target(self) -> float | None:
        """ms of a step while answers stream and no prompt has waited long."""
        return None if self.itl_target is None else self.itl_target * (1 - self.itl_margin)

    def step_target_after(self, waited: float) -> float | None:
        """The same when some prompt has waited this many seconds."""
        if self.step_target is None:
            return None
        first, last = self.stretch_after
        share = min(max((waited - first) / (last - first), 0.0), 1.0)
        return self.step_target * (1 + share * (self.stretch - 1))

    def protects_text(self, share: float, waited: float) -> bool:
        """Whether image prefill stays out of steps with text prefill, which are this `share` of steps."""
        return share < self.rare_text_share and waited <= self.stretch_after[0]

    def image_prefill_limit(self, rate: float, empty: float, waited: float) -> float | None:
        """ms that image prefill may add to a step while no answer streams and `rate` other requests arrive
        per second. None, no limit, where an empty step (`empty` ms) already exceeds the target."""
        least = self.step_target_after(waited)
        if least is None or not rate or empty >= (self.step_target or 0.0):
            return None
        return max(least, 1e3 * self.max_arrivals_per_step / rate)

    @property
    def max_class_slots(self) -> int:
        return math.ceil(self.max_num_seqs * self.class_slots)


@dataclass
class PrefillBudget:
    """What the prompts of one class may still add to a step."""

    tokens: int
    until: float | None  # ms the step may have grown to; None: no limit
    least: int  # tokens the next prompt gets in any case


def prefill_budgets(
    config: SchedulerConfig,
    tokens: int,
    now: float,
    target: float | None,
    *,
    both: bool,
    turn: int,
) -> tuple[PrefillBudget, PrefillBudget]:
    """What prompts without and with views to encode may add to a step with `tokens` left that takes `now` ms
    already. When `both` classes want some, they share; a single token goes to each in turn."""
    share, first = 1.0, tokens
    if both:
        share = 1 - config.encode_share
        first = min(max(int(tokens * share), 1), tokens - 1) if tokens > 1 else tokens * (turn % 2)
    until = target if target is None else now + max(target - now, 0.0) * share
    return PrefillBudget(first, until, config.min_chunk), PrefillBudget(tokens, target, config.min_chunk)


class ArrivalRate:
    """Recent arrivals of requests without views to encode, and the share of decode steps that prefill
    them."""

    WINDOW = 1.0  # seconds
    MOST = 64  # arrivals remembered
    STEPS = 64  # time constant of the share

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=self.MOST)
        self.share = 0.0

    def add(self, now: float) -> None:
        self._times.append(now)

    def per_second(self, now: float) -> float:
        while self._times and self._times[0] <= now - self.WINDOW:
            self._times.popleft()
        return len(self._times) / self.WINDOW

    def record_step(self, *, prefills_text: bool) -> None:
        self.share += (prefills_text - self.share) / self.STEPS
