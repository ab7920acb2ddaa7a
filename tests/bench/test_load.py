"""The open-loop load: its schedule, its clock, and what it makes of what it saw."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from saccade.bench.load import Arrival, Stream, follow, plan_phase, poisson, summarise
from saccade.errors import SaccadeError


def test_the_schedule_is_the_same_for_the_same_seed_and_only_then() -> None:
    first = plan_phase(16, 6, 20, (0, 1))
    assert first == plan_phase(16, 6, 20, (0, 1))
    assert first != plan_phase(16, 6, 20, (0, 2))
    assert first == sorted(first, key=lambda arrival: arrival.due)
    assert {arrival.kind for arrival in first} == {"text", "image"}
    assert all(0 <= arrival.due < 20 for arrival in first)


def test_pictures_do_not_move_the_text_arrivals() -> None:
    alone = plan_phase(16, 0, 20, (0, 0))
    beside = [arrival for arrival in plan_phase(16, 15, 20, (0, 0)) if arrival.kind == "text"]
    assert alone == beside


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(poisson(50, 400, np.random.default_rng(3)))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential: as wide as it is long


def test_a_short_phase_has_one_request_of_each_kind() -> None:
    assert sorted(arrival.kind for arrival in plan_phase(0.001, 0.001, 0.1, (0,))) == ["image", "text"]


def chunk(content: str) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % content.encode()


class Chunks(httpx.AsyncByteStream):
    """A response that comes in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await asyncio.sleep(0)
            yield piece


def client(status: int, *pieces: bytes) -> httpx.AsyncClient:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Chunks(*pieces)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_a_stream_is_timed_from_its_first_event_and_between_its_texts() -> None:
    pieces = (chunk("") + chunk("a"), chunk("b"), chunk(""), chunk("c"), b"data: [DONE]\n\n")
    async with client(200, *pieces) as some:
        due = time.perf_counter() - 5  # it was due five seconds ago: the wait counts from then
        stream = await follow(some, b"{}", "text", due)
    assert stream.done
    assert stream.first is not None
    assert stream.first >= 5
    assert len(stream.gaps) == 2
    assert all(gap >= 0 for gap in stream.gaps)


async def test_refusals_and_broken_streams_are_told() -> None:
    async with client(503, b'{"error": "full"}') as some:
        assert "503" in str((await follow(some, b"{}", "text", 0.0)).error)
    async with client(200, b'data: {"error": {"message": "it broke"}}\n\n') as some:
        assert (await follow(some, b"{}", "text", 0.0)).error == "it broke"
    async with client(200, chunk("a")) as some:
        assert not (await follow(some, b"{}", "text", 0.0)).done


def test_waits_are_summed_up_in_milliseconds_and_losses_are_told() -> None:
    arrivals = [Arrival(0.0, "text")] * 3
    streams = [
        Stream("text", first=0.010, gaps=[0.002, 0.004], done=True),
        Stream("text", first=0.030, gaps=[0.003], done=True),
        Stream("text", error="503: full"),
    ]
    rows = {row.metric: row for row in summarise("text only", arrivals, streams)}
    assert rows["text only: text ttft p50"].value == pytest.approx(20)
    assert rows["text only: inter-token p50"].value == pytest.approx(3)
    assert rows["text only: text ttft p99"].value == pytest.approx(29.8)
    assert not [metric for metric in rows if "image" in metric]
    assert "1 of 3" in rows["text only: text ttft p50"].note
    with pytest.raises(SaccadeError, match="503"):
        summarise("text only", arrivals, streams[2:])
