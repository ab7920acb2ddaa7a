"""Whoever stops waiting for media ends the thread that loads them, wherever that thread waits."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from saccade.config import MediaLimits
from saccade.errors import Overloaded
from saccade.inputs.media import video
from saccade.inputs.media.cancellation import CancelToken, FairSemaphore, LoadingCancelled
from saccade.inputs.media.fetch import Network, fetch_bytes
from tests.inputs.media.test_video import encoded, frames
from tests.inputs.test_image_processor import video as processing

LONG = 3600.0  # seconds nobody waits for
OPEN = MediaLimits(allow_private_addresses=True, fetch_timeout=LONG)


class Worker:
    """A thread doing one thing; what became of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        """Its error; the time only keeps a broken build from hanging."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.error


@contextmanager
def tarpit(say: bytes = b"") -> Iterator[tuple[int, threading.Event]]:
    """A server that takes connections, perhaps says something, and never goes on."""
    connected = threading.Event()
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            one, _ = server.accept()
            held.append(one)
            one.recv(1)
            one.sendall(say)
            connected.set()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], connected
        for one in held:
            one.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"])
def test_cancelling_ends_a_fetch_that_waits_for_its_server(scheme: str, said: bytes) -> None:
    cancel = CancelToken()
    with tarpit(said if scheme == "http" else b"") as (port, connected):
        worker = Worker(lambda: fetch_bytes(f"{scheme}://127.0.0.1:{port}/a.png", OPEN, cancel=cancel))
        assert connected.wait(20)
        cancel.cancel()
        assert isinstance(worker.end(), LoadingCancelled)


@pytest.mark.parametrize("where", ["resolving", "connecting"])
def test_cancelling_ends_a_fetch_that_waits_for_the_system(where: str) -> None:
    waiting, go_on = threading.Event(), threading.Event()
    late = socket.socket()

    def stuck() -> None:
        waiting.set()
        go_on.wait(60)

    def resolve(host: str, port: int) -> list[str]:
        if where == "resolving":
            stuck()
        return ["127.0.0.1"]

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        stuck()
        return late

    cancel = CancelToken()
    network = Network(resolve, connect)
    worker = Worker(lambda: fetch_bytes("http://slow.example/a.png", OPEN, network=network, cancel=cancel))
    assert waiting.wait(20)
    cancel.cancel()
    assert isinstance(worker.end(), LoadingCancelled)
    go_on.set()
    if where == "connecting":  # nobody is left to use the connection
        for thread in threading.enumerate():
            if thread.name == "fetch":
                thread.join(20)
        assert late.fileno() == -1
    late.close()


def test_nothing_starts_after_cancelling() -> None:
    cancel = CancelToken()
    cancel.cancel()

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        raise AssertionError("connected for nobody")

    with pytest.raises(LoadingCancelled):
        fetch_bytes(
            "http://x.example/",
            OPEN,
            network=Network(lambda host, port: ["127.0.0.1"], connect),
            cancel=cancel,
        )
    with pytest.raises(LoadingCancelled):
        video.decode_video(encoded(frames(4)), processing(), MediaLimits(), cancel)


def test_cancelling_kills_the_video_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    program = tmp_path / "worker.py"
    program.write_text(f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep({LONG})\n")
    monkeypatch.setattr(video, "WORKER", program)
    cancel = CancelToken()
    data = encoded(frames(4))
    worker = Worker(lambda: video.decode_video(data, processing(), MediaLimits(), cancel))
    pause = threading.Event()
    while not started.exists() and worker.error is None:
        pause.wait(0.01)
    cancel.cancel()
    assert isinstance(worker.end(), LoadingCancelled)
    assert video._DECODER_SLOTS.free == video.DECODERS


def test_cancelling_ends_waiting_for_the_semaphore_and_leaks_no_units() -> None:
    budget, cancel = FairSemaphore(10), CancelToken()

    def take() -> None:
        with budget.holding(5, cancel, LONG):
            raise AssertionError("there was nothing to take")

    with budget.holding(6, CancelToken(), LONG):
        worker = Worker(take)
        cancel.cancel()
        assert isinstance(worker.end(), LoadingCancelled)
        assert budget.free == 4
    assert budget.free == 10


def test_waiting_too_long_for_the_semaphore_raises_overloaded() -> None:
    budget = FairSemaphore(10)
    with (
        budget.holding(99, CancelToken(), LONG),
        pytest.raises(Overloaded, match="try again"),
        budget.holding(1, CancelToken(), 0.0),
    ):
        raise AssertionError("all of it was taken")
    assert budget.free == 10


def test_small_requests_do_not_starve_a_large_one() -> None:
    budget = FairSemaphore(10)
    order: list[str] = []

    def take(name: str, units: int) -> Callable[[], None]:
        def work() -> None:
            with budget.holding(units, CancelToken(), 20):
                order.append(name)

        return work

    pause = threading.Event()
    with budget.holding(5, CancelToken(), LONG):
        much = Worker(take("much", 10))
        while len(budget._waiting) < 1:
            pause.wait(0.001)
        little = Worker(take("little", 1))
        while len(budget._waiting) < 2:
            pause.wait(0.001)
        assert order == []
    assert much.end() is None
    assert little.end() is None
    assert order == ["much", "little"]
