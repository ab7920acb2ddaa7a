"""Stages of a request add up, and those not reached are left out."""

import time

import pytest

from saccade.metrics import STAGES
from saccade.request import EngineTimes, RequestTiming


def whole() -> RequestTiming:
    return RequestTiming(
        arrived=10.0,
        read=11.0,
        tokenise=0.25,
        fetch=0.5,
        unpack=0.25,
        sent=13.0,
        engine=EngineTimes(queued=13.5, started=15.5, first=19.0, encode=2.0, preempted=1, look=1.0),
        first=19.25,
        last=23.0,
    )


def test_stages_add_up_to_the_total_in_order() -> None:
    seconds = whole().seconds(end=23.0)
    assert list(seconds) == [name for name in STAGES if name in seconds] == list(STAGES)
    assert seconds["total"] == 13.0 == sum(seconds.values()) - seconds["total"]
    engine = ("queue", "look", "encode", "prefill")
    assert [seconds[name] for name in engine] == [2.0, 1.0, 2.0, 0.5]


def test_a_stage_not_reached_is_left_out() -> None:
    assert RequestTiming(1.0).seconds() == {}
    assert RequestTiming(1.0).reached == "receive"
    assert list(RequestTiming(1.0, read=2.0).seconds(5.0)) == ["receive", "total"]
    text = RequestTiming(1.0, read=2.0, tokenise=0.5, sent=3.0)
    assert list(text.seconds()) == ["receive", "prepare", "tokenise"]
    assert (RequestTiming(1.0, read=2.0).reached, text.reached, whole().reached) == (
        "prepare",
        "queue",
        "decode",
    )


def test_time_is_never_negative_when_clocks_disagree_a_little() -> None:
    hasty = RequestTiming(1.0, read=2.0, sent=3.0, engine=EngineTimes(2.999, 3.0, 3.5, encode=0.6), first=3.4)
    assert min(hasty.seconds().values()) >= 0


def test_measured_time_adds_up_even_on_failure() -> None:
    stages = RequestTiming()

    def fail() -> None:
        with stages.measure("fetch"):
            time.sleep(0.002)
            raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fail()
    assert stages.fetch >= 0.004
    assert stages.tokenise == 0


def test_the_header_has_milliseconds() -> None:
    assert RequestTiming(1.0, read=1.0125).header() == b"receive;dur=12.50"
