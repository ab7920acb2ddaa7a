"""`SamplingParams`: the user's sampling options and their limits; `resolve` makes the engine's `Sampling`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from saccade.errors import InvalidValue
from saccade.request import Sampling

# Range of each number, in the library and over HTTP.
LIMITS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logit_bias": (-100.0, 100.0),
}
MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_STOPS = 16
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. None takes the checkpoint's default, or the neutral value."""

    max_tokens: int | None = 16  # None: the rest of the context
    min_tokens: int = 0
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # 0 or -1 is off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None  # alternatives to report with each token
    stop: tuple[str, ...] | list[str] | str | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1

    def __post_init__(self) -> None:
        integers = {
            "max_tokens": (self.max_tokens, 1, None),
            "min_tokens": (self.min_tokens, 0, None),
            "top_k": (self.top_k, -1, None),
            "seed": (self.seed, -MAX_SEED - 1, MAX_SEED),
            "logprobs": (self.logprobs, 0, MAX_LOGPROBS),
            "n": (self.n, 1, MAX_CHOICES),
        }
        for name, (value, low, high) in integers.items():
            _check(name, value, low, high, integer=True)
        for name, limits in LIMITS.items():
            if name != "logit_bias":
                _check(name, getattr(self, name), *limits, integer=False)
        if self.top_p == 0:
            raise InvalidValue(
                "top_p is 0, which leaves no token; use temperature 0 for greedy", param="top_p"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})"
            raise InvalidValue(message, param="min_tokens")
        stops: tuple[object, ...] = self.stop_strings
        if len(stops) > MAX_STOPS:
            message = f"{len(stops)} stop strings were given; at most {MAX_STOPS} are allowed"
            raise InvalidValue(message, param="stop")
        for text in stops:
            if not text or not isinstance(text, str):
                raise InvalidValue(
                    f"the stop string {text!r} is empty or not a string; remove it", param="stop"
                )
        for token, bias in (self.logit_bias or {}).items():
            _check("logit_bias", token, None, None, integer=True)
            _check(f"logit_bias[{token}]", bias, *LIMITS["logit_bias"], integer=False)
        for token in self.stop_token_ids or ():
            _check("stop_token_ids", token, None, None, integer=True)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def resolve(
        self, *, room: int, vocab_size: int, end_tokens: tuple[int, ...], defaults: Mapping[str, float]
    ) -> Sampling:
        """The engine's form; `room` is the number of tokens the context has left after the prompt."""
        bias, stops = dict(self.logit_bias or {}), tuple(self.stop_token_ids or ())
        for name, ids in (("logit_bias", tuple(bias)), ("stop_token_ids", stops)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    message = f"{name} contains token {token}; the vocabulary has ids 0 to {vocab_size - 1}"
                    raise InvalidValue(message, param=name)

        def choose(name: str, value: float | None, neutral: float) -> float:
            return value if value is not None else float(defaults.get(name, neutral))

        limit = room if self.max_tokens is None else min(self.max_tokens, room)
        return Sampling(
            max_tokens=limit,
            min_tokens=min(self.min_tokens, limit),
            temperature=choose("temperature", self.temperature, 1.0),
            top_k=max(int(choose("top_k", self.top_k, 0)), 0),
            top_p=choose("top_p", self.top_p, 1.0),
            min_p=choose("min_p", self.min_p, 0.0),
            repetition_penalty=choose("repetition_penalty", self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias=bias,
            logprobs=self.logprobs,
            stop_token_ids=stops + (() if self.ignore_eos else end_tokens),
            n=self.n,
        )


def _check(name: str, value: object, low: float | None, high: float | None, *, integer: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValue(f"{name} is {value!r}; it must be a number", param=name)
    if integer and not isinstance(value, int):
        raise InvalidValue(f"{name} is {value!r}; it must be an integer", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"{low} to {high}"
        raise InvalidValue(f"{name} is {value}; it must be {span}", param=name)
