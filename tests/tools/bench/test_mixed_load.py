"""The open-loop load: its schedule, its clock, and what it makes of what it saw."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from saccade.errors import SaccadeError
from saccade.tools.bench.client import Client
from saccade.tools.bench.mixed_load import (
    DueRequest,
    StreamTiming,
    follow,
    most_lag,
    plan_phase,
    poisson,
    summarise,
)


def test_the_schedule_is_the_same_for_the_same_seed_and_only_then() -> None:
    first = plan_phase(16, 6, 20, (0, 1))
    assert first == plan_phase(16, 6, 20, (0, 1))
    assert first != plan_phase(16, 6, 20, (0, 2))
    assert first == sorted(first, key=lambda arrival: arrival.due)
    assert {arrival.kind for arrival in first} == {"text", "image"}
    assert all(0 <= arrival.due < 20 for arrival in first)


def test_images_do_not_change_the_text_arrivals() -> None:
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


@asynccontextmanager
async def answering(status: int, *pieces: bytes, whole: bool = True) -> AsyncIterator[Client]:
    """A client of a server that gives every request these pieces, one at a time."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
                writer.write(b"HTTP/1.1 %d Said\r\ntransfer-encoding: chunked\r\n\r\n" % status)
                for piece in pieces:
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if not whole:
                    writer.close()
                writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/") as client:
        yield client


async def test_a_stream_is_timed_from_its_first_event_and_between_its_texts() -> None:
    text = chunk("") + chunk("a"), chunk("b")[:9], chunk("b")[9:], chunk(""), chunk("c"), b"data: [DONE]\n\n"
    async with answering(200, *text) as client:
        for _ in range(2):  # the second goes over the connection of the first
            due = time.perf_counter() - 5  # it was due five seconds ago: the wait counts from then
            stream = await follow(client, b"{}", "text", due)
            assert stream.done
            assert stream.first is not None
            assert stream.first >= 5
            assert len(stream.gaps) == 2
            assert all(gap >= 0 for gap in stream.gaps)


async def test_refusals_and_broken_streams_are_reported() -> None:
    async with answering(503, b'{"error": ', b'"full"}') as client:
        assert (await follow(client, b"{}", "text", 0.0)).error == '503: {"error": "full"}'
    async with answering(503) as client:
        assert (await follow(client, b"{}", "text", 0.0)).error == "503"
    async with answering(200, b'data: {"error": {"message": "it broke"}}\n\n') as client:
        assert (await follow(client, b"{}", "text", 0.0)).error == "it broke"
    async with answering(200, chunk("a")) as client:
        assert not (await follow(client, b"{}", "text", 0.0)).done
    for broken in (chunk("a"), b"data: no JSON\n\n"):
        async with answering(200, broken, whole=broken != chunk("a")) as client:
            stream = await follow(client, b"{}", "text", 0.0)
            assert (stream.done, stream.error) == (False, "StreamBroken")
    async with answering(200) as client:
        pass
    assert (await follow(client, b"{}", "text", 0.0)).error == "ConnectionRefusedError"


async def test_a_cancelled_request_leaves_no_response_to_the_next() -> None:
    text = *(chunk("late") for _ in range(50)), b"data: [DONE]\n\n"
    async with answering(200, *text) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(follow(client, b"{}", "text", 0.0), 0.01)
        assert (await follow(client, b"{}", "text", 0.0)).done


def test_latencies_are_in_milliseconds_and_lost_requests_are_reported() -> None:
    arrivals = [DueRequest(0.0, "text")] * 3
    streams = [
        StreamTiming("text", first=0.010, gaps=[0.002, 0.004], done=True),
        StreamTiming("text", first=0.030, gaps=[0.003], done=True),
        StreamTiming("text", error="503: full"),
    ]
    rows = {row.metric: row for row in summarise("text only", arrivals, streams)}
    assert rows["text only: text ttft p50"].value == pytest.approx(20)
    assert rows["text only: inter-token p50"].value == pytest.approx(3)
    assert rows["text only: text ttft p99"].value == pytest.approx(29.8)
    assert not [metric for metric in rows if "image" in metric]
    assert "1 of 3" in rows["text only: text ttft p50"].note
    with pytest.raises(SaccadeError, match="503"):
        summarise("text only", arrivals, streams[2:])


def test_event_loop_lag_is_that_between_two_histograms() -> None:
    before = {0.001: 50.0, 0.01: 60.0, 0.1: 61.0, float("inf"): 62.0}
    grown = {0.001: 70.0, 0.01: 85.0, 0.1: 86.0, float("inf"): 87.0}
    assert most_lag(before, grown) == "<= 10 ms"  # the late ones were before
    assert most_lag({}, grown) == "<= inf ms"
    assert most_lag(grown, grown) == "<= 1 ms"
