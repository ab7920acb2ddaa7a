"""The front's side of the client: a real engine process, and its ends, early and late."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.config import EngineConfig
from saccade.engine import ipc as wire
from saccade.engine.client import MAX_IMAGE_QUERIES, EngineClient
from saccade.engine.ipc import (
    Cancel,
    Channel,
    ImageQuery,
    ImageQueryReply,
    StepOutputs,
    Stop,
    Submit,
    ToEngine,
    ToFrontend,
)
from saccade.engine.process import UNFORESEEN, Inbox, serve
from saccade.errors import ConfigError, ContextTooLong, EngineDied, SaccadeError
from saccade.host.malloc import HeapTrimmer
from saccade.metrics import EngineStats
from saccade.request import Delta, EngineTimes, Request, Sampling
from tests.engine.test_ipc import picture, request_with


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", num_blocks=64, **options)


def question(name: str, max_tokens: int = 8, n: int = 1) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, n=n)
    return Request(id=name, prompt=tuple(range(5, 25)), sampling=sampling)


async def collect(client: EngineClient, request: Request) -> list[int]:
    return [token async for delta in client.generate(request) for token in delta.tokens]


async def until_empty(client: EngineClient) -> None:
    """The engine tells its numbers with every step; a tiny request makes it take one."""
    for number in range(100):
        await collect(client, question(f"probe-{number}", max_tokens=1))
        if client.stats().blocks_used == 0 and client.stats().running == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(client.stats())


async def test_first_tokens_are_delivered_before_those_of_running_streams() -> None:
    client = EngineClient(EngineConfig(model="m"))
    client._error = None
    heard: list[tuple[str, int]] = []

    async def listen(name: str) -> None:
        async for delta in client.generate(question(name)):
            heard.append((name, delta.tokens[0]))

    names = ("a", "b", "c")
    tasks = [asyncio.create_task(listen(name)) for name in names]
    await asyncio.sleep(0)
    times = EngineTimes(0.0, 0.0, 0.0)
    step = (
        Delta(request_id="a", tokens=(1,)),
        Delta(request_id="b", tokens=(2,)),
        Delta(request_id="c", tokens=(3,), times=times),
        # It ends in the step that brought a token before: those keep their order.
        Delta(request_id="a", tokens=(4,), finish="length", times=times),
    )
    client._handle(StepOutputs(step, EngineStats()))
    await asyncio.sleep(0.01)
    assert heard == [("c", 3), ("a", 1), ("a", 4), ("b", 2)]
    for task in tasks:
        task.cancel()


async def test_text_requests_do_not_wait_for_pixels_and_cancellations_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's end of the channel is read here; a picture's pixels are copied when we say so."""
    free, ours, theirs = threading.Event(), *socket.socketpair()
    copied, engine = wire._shared_copy, Channel(theirs)

    def slow(*arguments: Any) -> int:
        free.wait()
        return copied(*arguments)

    monkeypatch.setattr(wire, "_shared_copy", slow)
    client, loop = EngineClient(EngineConfig(model="m")), asyncio.get_running_loop()
    client._error = None
    threads = [
        threading.Thread(target=client._send, args=(Channel(ours), loop, outbox))
        for outbox in (client._outbox, client._image_outbox)
    ]
    for thread in threads:
        thread.start()
    seen = asyncio.create_task(collect(client, request_with(picture(8, 8))))
    await asyncio.sleep(0)
    told = asyncio.create_task(collect(client, question("text")))
    await asyncio.sleep(0)
    first = await asyncio.to_thread(engine.receive, ToEngine)
    seen.cancel()
    await asyncio.wait({seen})
    free.set()
    rest = [await asyncio.to_thread(engine.receive, ToEngine) for _ in range(2)]
    assert isinstance(first, Submit)
    assert first.request.id == "text"
    assert [type(message) for message in rest] == [Submit, Cancel]
    told.cancel()
    for outbox in (client._outbox, client._image_outbox):
        outbox.put(None)
    for thread in threads:
        thread.join()


async def test_an_engine_process_starts_answers_and_reports_its_death(vl_folder: Path) -> None:
    client = EngineClient(config(vl_folder))
    await client.start()
    assert client.info.num_blocks == 64
    assert client.info.quantization == {"decoder": "none", "vision": "none", "head": "none"}
    assert client.info.weight_bytes > 0
    first, second = await asyncio.gather(collect(client, question("a")), collect(client, question("b")))
    assert first == second
    assert len(first) == 8

    # A request that can never fit is refused, and only that one.
    with pytest.raises(ContextTooLong, match="1100 tokens"):
        await collect(client, Request(id="huge", prompt=(5,) * 1100))
    assert await collect(client, question("c")) == first

    # Leaving early cancels.
    async for _ in (deltas := client.generate(question("long", max_tokens=900, n=2))):
        break
    await deltas.aclose()
    await until_empty(client)
    assert client.stats().generated_tokens < 500

    # A dead engine ends what is waiting for it.
    waiting = asyncio.create_task(collect(client, question("last", max_tokens=900)))
    await asyncio.sleep(0.1)
    assert client._process is not None
    os.kill(client._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="unexpectedly"):
        await waiting
    assert not client.alive
    with pytest.raises(EngineDied):
        await collect(client, question("after"))
    await client.stop()


async def test_a_failed_start_raises_the_reason(vl_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 99999"):
        await EngineClient(config(vl_folder, max_model_len=99999)).start()


async def test_options_that_cannot_be_encoded_fail_the_start(vl_folder: Path) -> None:
    with pytest.raises(ConfigError, match="options could not be sent"):
        await EngineClient(config(vl_folder, seed=1 << 100)).start()


async def test_an_engine_process_writes_the_step_log(vl_folder: Path, tmp_path: Path) -> None:
    client = EngineClient(config(vl_folder, step_log=str(tmp_path / "steps.jsonl")))
    await client.start()
    await collect(client, question("logged"))
    await client.stop()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == client.stats().steps > 0


class SlowChannel:
    """Stands still at every submission until told to go on."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def send(self, message: object) -> None:
        if isinstance(message, Submit):
            self.begun.set()
            self.go_on.wait(10)
        self.sent.append(message)


async def test_a_slow_engine_does_not_block_the_event_loop_and_a_cancellation_never_overtakes(
    vl_folder: Path,
) -> None:
    client, channel = EngineClient(config(vl_folder)), SlowChannel()
    client._error = None
    loop = asyncio.get_running_loop()
    writer = threading.Thread(target=client._send, args=(channel, loop, client._image_outbox), daemon=True)
    writer.start()
    task = asyncio.create_task(collect(client, request_with(picture(8, 8))))
    await asyncio.to_thread(channel.begun.wait, 10)  # the event loop still turns while the channel stands
    task.cancel()
    await asyncio.wait({task})
    channel.go_on.set()
    client._image_outbox.put(None)
    await asyncio.to_thread(writer.join, 10)
    assert [type(message) for message in channel.sent] == [Submit, Cancel]


async def test_a_message_that_cannot_be_encoded_fails_only_its_sender(vl_folder: Path) -> None:
    client = EngineClient(config(vl_folder))
    await client.start()
    try:
        broken = Request(id="broken", prompt=(5, object()))  # type: ignore[arg-type]
        with pytest.raises(SaccadeError, match="could not be sent"):
            await collect(client, broken)
        assert len(await collect(client, question("good"))) == 8
    finally:
        await client.stop()


async def test_an_engine_that_cannot_read_a_message_reports_it_and_stops(vl_folder: Path) -> None:
    client = EngineClient(config(vl_folder))
    await client.start()
    try:
        garbled = Request(id="garbled", prompt=("not a number",))  # type: ignore[arg-type]
        with pytest.raises(EngineDied, match="could not read"):
            await collect(client, garbled)
        assert not client.alive
    finally:
        await client.stop()


async def test_stats_are_available_after_the_start(vl_folder: Path) -> None:
    client = EngineClient(config(vl_folder))
    await client.start()
    try:
        assert client.stats().blocks_free == 64
    finally:
        await client.stop()


async def test_image_queries_in_flight_are_limited(vl_folder: Path) -> None:
    client = EngineClient(config(vl_folder))
    client._error = None
    asking = [asyncio.create_task(client.image_tiers(b"%d" % number, delete=True)) for number in range(40)]
    numbers: list[int] = []
    while len(numbers) < 40:
        await asyncio.sleep(0)
        while not client._outbox.empty():
            message = client._outbox.get()
            assert isinstance(message, ImageQuery)
            numbers.append(message.query_id)
        open_ones = len(numbers) - sum(one.done() for one in asking)
        assert open_ones <= MAX_IMAGE_QUERIES
        if open_ones == MAX_IMAGE_QUERIES or len(numbers) == 40:
            client._handle(ImageQueryReply(numbers[sum(one.done() for one in asking)], {"gpu": 1}))
    client._fail(EngineDied("over"))
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert sum(isinstance(one, EngineDied) for one in ends) < 40
    with pytest.raises(EngineDied):
        await client.image_tiers(b"late")


class FakeEngine:
    """With a disk that takes its time, and a taste in requests."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(device="cuda")
        self.idle = True
        self.then: list[Callable[[], None]] = []
        self.taken: list[str] = []
        self.cancelled: list[str] = []
        self.stepped: list[tuple[str, ...]] = []  # at each step: whose requests were taken by then
        self.naps_until = 0  # requests taken

    @property
    def planning_delay(self) -> float:
        return 30.0 if len(self.taken) < self.naps_until else 0.0

    def submit(self, request: Request) -> None:
        if request.id == "odd":
            raise ValueError("a bug at /srv/engine.py")
        self.taken.append(request.id)

    def cancel(self, request_ids: list[str]) -> None:
        self.cancelled += request_ids

    def image_tiers(self, content: bytes) -> dict[str, int]:
        return {"disk": 1}

    def delete_image(self, content: bytes, then: Callable[[], None]) -> None:
        self.then.append(then)

    def warm_up(self) -> bool:
        return False

    def step(self) -> list[Delta]:
        self.stepped.append(tuple(self.taken))
        self.idle = True
        return []

    def stats(self) -> EngineStats:
        return EngineStats()


def test_a_deletion_is_answered_after_the_files_are_deleted_and_delays_no_step() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    inbox, engine = Inbox(theirs), FakeEngine()
    ours.send(ImageQuery(1, b"x", True))
    ours.send(ImageQuery(2, b"y", False))
    worker = threading.Thread(target=serve, args=(engine, inbox, theirs))
    worker.start()
    heard: list[Any] = []
    while not any(isinstance(one, ImageQueryReply) for one in heard) or not isinstance(
        heard[-1], StepOutputs
    ):
        heard.append(ours.receive(ToFrontend))
    assert [one.query_id for one in heard if isinstance(one, ImageQueryReply)] == [2]
    engine.then[0]()
    assert ours.receive(ToFrontend) == ImageQueryReply(1, {"disk": 1})
    ours.send(Stop())
    worker.join(10)
    ours.close()
    engine.then[0]()  # nobody is there any more: no harm


def test_an_unexpected_error_rejects_only_its_request() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    engine = FakeEngine()
    for message in (Submit(question("odd")), Submit(question("good")), Stop()):
        ours.send(message)
    serve(engine, Inbox(theirs), theirs)  # type: ignore[arg-type]
    refused = ours.receive(ToFrontend)
    assert (refused.request_id, refused.message) == ("odd", UNFORESEEN)
    assert (engine.taken, engine.cancelled) == (["good"], ["odd"])
    ours.close()
    theirs.close()


def test_requests_that_arrive_during_the_planning_delay_join_the_next_step() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    engine = FakeEngine()
    engine.idle, engine.naps_until = False, 2
    worker = threading.Thread(target=serve, args=(engine, Inbox(theirs), theirs), daemon=True)
    worker.start()
    for name in ("one", "two"):
        ours.send(Submit(question(name)))
    assert isinstance(ours.receive(ToFrontend), StepOutputs)
    assert engine.stepped == [("one", "two")]
    ours.send(Stop())
    worker.join(10)
    assert not worker.is_alive()
    ours.close()


def test_an_idle_engine_trims_its_heap_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    trimmer = HeapTrimmer(0.05)
    monkeypatch.setattr(trimmer, "_trim", trims.append)
    monkeypatch.setattr("saccade.engine.process.HeapTrimmer", lambda: trimmer)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    inbox, engine = Inbox(theirs), FakeEngine()
    engine.info.device = "cpu"
    worker = threading.Thread(target=serve, args=(engine, inbox, theirs))
    worker.start()
    for number in (1, 2):
        ours.send(ImageQuery(number, b"x", False))
        while not isinstance(ours.receive(ToFrontend), StepOutputs):
            pass
        deadline = time.monotonic() + 10
        while len(trims) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # and no more while nothing happens
        assert len(trims) == number
    ours.send(Stop())
    worker.join(10)
    ours.close()


async def test_an_idle_engine_reports_the_end_of_warmup(vl_folder: Path) -> None:
    client = EngineClient(config(vl_folder, graphs="on", max_model_len=64, max_num_seqs=2))
    await client.start()
    try:
        began = client.stats().to_prepare
        deadline = time.monotonic() + 60
        while client.stats().to_prepare and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert began > 0 == client.stats().to_prepare  # though nobody has asked anything
    finally:
        await client.stop()
