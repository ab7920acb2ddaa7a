"""The front's side of the link: a real engine process, and its ends, early and late."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from saccade.config import EngineConfig
from saccade.errors import ConfigError, ContextTooLong, EngineDied
from saccade.request import Request, Sampling
from saccade.runtime.link import ProcessLink
from saccade.runtime.wire import Cancel, Submit
from tests.runtime.test_wire import picture, request_with


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", num_blocks=64, **options)


def question(name: str, max_tokens: int = 8, n: int = 1) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, n=n)
    return Request(id=name, prompt=tuple(range(5, 25)), sampling=sampling)


async def collect(link: ProcessLink, request: Request) -> list[int]:
    return [token async for delta in link.generate(request) for token in delta.tokens]


async def until_empty(link: ProcessLink) -> None:
    """The engine tells its numbers with every step; a tiny request makes it take one."""
    for number in range(100):
        await collect(link, question(f"probe-{number}", max_tokens=1))
        if link.stats().blocks_used == 0 and link.stats().running == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(link.stats())


async def test_an_engine_process_lives_answers_and_dies(vl_folder: Path) -> None:
    link = ProcessLink(config(vl_folder))
    await link.start()
    assert link.info.num_blocks == 64
    first, second = await asyncio.gather(collect(link, question("a")), collect(link, question("b")))
    assert first == second
    assert len(first) == 8

    # A request that can never fit is refused, and only that one.
    with pytest.raises(ContextTooLong, match="1100 tokens"):
        await collect(link, Request(id="huge", prompt=(5,) * 1100))
    assert await collect(link, question("c")) == first

    # Leaving early cancels.
    async for _ in (deltas := link.generate(question("long", max_tokens=900, n=2))):
        break
    await deltas.aclose()
    await until_empty(link)
    assert link.stats().generated_tokens < 500

    # A dead engine ends what is waiting for it.
    waiting = asyncio.create_task(collect(link, question("last", max_tokens=900)))
    await asyncio.sleep(0.1)
    assert link._process is not None
    os.kill(link._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="unexpectedly"):
        await waiting
    assert not link.alive
    with pytest.raises(EngineDied):
        await collect(link, question("after"))
    await link.stop()


async def test_a_start_that_fails_says_why(vl_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 99999"):
        await ProcessLink(config(vl_folder, max_model_len=99999)).start()


async def test_a_cancellation_never_overtakes_the_submission_it_cancels(vl_folder: Path) -> None:
    class SlowChannel:
        def __init__(self) -> None:
            self.sent: list[object] = []
            self.begun, self.go_on = threading.Event(), threading.Event()

        def send(self, message: object) -> None:
            if isinstance(message, Submit):
                self.begun.set()
                self.go_on.wait(10)
            self.sent.append(message)

    link, channel = ProcessLink(config(vl_folder)), SlowChannel()
    link._channel, link._alive = channel, True  # type: ignore[assignment]
    request = request_with(picture(8, 8))
    task = asyncio.create_task(collect(link, request))
    await asyncio.to_thread(channel.begun.wait, 10)
    task.cancel()
    await asyncio.wait({task})
    channel.go_on.set()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if isinstance(channel.sent[-1], Cancel) and len(channel.sent) > 1:
            break
    kinds = [type(message) for message in channel.sent]
    assert kinds[-1] is Cancel
    assert kinds.index(Submit) < len(kinds) - 1
