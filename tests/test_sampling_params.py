"""SamplingParams: limits, and resolution against a checkpoint."""

import math
from typing import Any

import pytest

from saccade import SamplingParams
from saccade.errors import InvalidValue
from saccade.request import Sampling

PLACE = {"room": 100, "vocab_size": 50, "end_tokens": (7,), "defaults": {}}


def resolve(params: SamplingParams, **changes: Any) -> Sampling:
    return params.resolve(**{**PLACE, **changes})


def test_checkpoint_defaults_fill_absent_options_only() -> None:
    defaults = {"temperature": 0.3, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    silent = resolve(SamplingParams(), defaults=defaults)
    for name, value in defaults.items():
        assert getattr(silent, name) == value
    loud = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    spoken = resolve(SamplingParams(**loud), defaults=defaults)  # type: ignore[arg-type]
    for name, value in loud.items():
        assert getattr(spoken, name) == value


def test_without_defaults_absent_options_are_neutral() -> None:
    assert resolve(SamplingParams(max_tokens=16)) == Sampling(max_tokens=16, stop_token_ids=(7,))


def test_the_context_bounds_the_answer() -> None:
    assert resolve(SamplingParams(max_tokens=None)).max_tokens == 100
    assert resolve(SamplingParams(max_tokens=500, min_tokens=200)).max_tokens == 100
    assert resolve(SamplingParams(max_tokens=500, min_tokens=200)).min_tokens == 100


def test_end_tokens_end_unless_they_are_ignored() -> None:
    assert resolve(SamplingParams(stop_token_ids=[3])).stop_token_ids == (3, 7)
    assert resolve(SamplingParams(stop_token_ids=[3], ignore_eos=True)).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", 1 << 64),
        ("logprobs", 21),
        ("n", 0),
        ("n", 65),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {"12": 1.0}),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("temperature", 2.1),
    ],
)
def test_invalid_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        SamplingParams(**{name: value})
    assert (refused.value.param or "").startswith(name)


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [-1, 50])
def test_tokens_outside_the_vocabulary_are_refused(name: str, token: int) -> None:
    value = {token: 1.0} if name == "logit_bias" else [token]
    with pytest.raises(InvalidValue, match="0 to 49"):
        resolve(SamplingParams(**{name: value}))  # type: ignore[arg-type]
