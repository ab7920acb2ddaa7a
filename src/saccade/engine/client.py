"""The front's side of an engine: requests in, deltas out, one process away.

takes   requests from any asyncio task of one loop
gives   an async iterator of deltas per request; closing it early cancels the request
owns    the engine process and the front's end of the channel
never   imports torch: the front stays small and starts fast
"""

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from saccade.config import EngineConfig
from saccade.engine.ipc import (
    Cancel,
    Channel,
    EngineInfo,
    Failed,
    News,
    Ready,
    Recall,
    Recalled,
    Refused,
    Start,
    Stop,
    Submit,
    ToEngine,
    ToFront,
)
from saccade.errors import ConfigError, EngineDied, SaccadeError, engine_error
from saccade.metrics import EngineStats
from saccade.request import Delta, Request

log = logging.getLogger(__name__)

# Threads that wait for work spin by default, which starves the front on a machine with few cores. What the
# user has set stands.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}


STOP_SECONDS = 10.0  # for an engine to end its last step
MOST_RECALLS = 16  # questions about pictures at a time: the engine answers them between two steps
START_STOP_SECONDS = 1.0  # for one that is still starting to tidy the terminal


class EngineLink(Protocol):
    """What the server asks of an engine, wherever it runs."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def alive(self) -> bool: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def generate(self, request: Request) -> AsyncGenerator[Delta]: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    async def picture(self, content: bytes, *, drop: bool = False) -> dict[str, int]: ...


Outbox = queue.SimpleQueue[ToEngine | None]


class _Reply:
    """The deltas of one request that nobody has read yet, and how many choices are still open."""

    def __init__(self, choices: int, outbox: "Outbox") -> None:
        self.outbox = outbox  # what is said of it goes the same way as it did
        self.queue: asyncio.Queue[Delta | SaccadeError] = asyncio.Queue()
        self.open_choices = choices


class ProcessLink:
    """An engine in a process of its own.

    What is sent goes through writer threads: the event loop never waits for the engine or for a copy of
    pixels. Requests with pictures have a thread of their own, so that nobody else waits for those copies (2
    ms each); what is said of one request all goes through one, so that a cancellation never overtakes it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._outbox: Outbox = queue.SimpleQueue()
        self._pictures: Outbox = queue.SimpleQueue()
        self._info: EngineInfo | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._stats = EngineStats()
        self._replies: dict[str, _Reply] = {}
        self._recalls: dict[int, asyncio.Future[dict[str, int]]] = {}
        self._recalling = asyncio.Semaphore(MOST_RECALLS)
        self._numbers = itertools.count()
        self._end: SaccadeError | None = EngineDied("the engine has not been started")  # None while it lives

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise self._end or EngineDied("the engine is still starting")
        return self._info

    @property
    def alive(self) -> bool:
        return self._end is None

    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> None:
        """Spawn the engine and wait until it can answer; the error says why it cannot."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "saccade.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is the front's to handle
                env={**_ENVIRONMENT, **os.environ},
            )
        self._channel = Channel(ours)
        self._ready = loop.create_future()
        self._end = None
        threading.Thread(target=self._listen, args=(self._channel, loop), daemon=True).start()
        for outbox in (self._outbox, self._pictures):
            threading.Thread(target=self._write, args=(self._channel, loop, outbox), daemon=True).start()
        self._outbox.put(Start(self._config))
        try:
            self._info = await self._ready
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the engine; every open request gets EngineDied."""
        self._over(EngineDied("the server is shutting down"))
        self._outbox.put(Stop())
        for outbox in (self._outbox, self._pictures):
            outbox.put(None)
        if self._process is not None:
            if self._info is None:  # it hears no messages yet
                self._process.terminate()
            patience = STOP_SECONDS if self._info is not None else START_STOP_SECONDS
            await asyncio.to_thread(_wait_or_kill, self._process, patience)
        if self._channel is not None:
            self._channel.close()

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        if self._end is not None:
            raise self._end
        name = request.id
        outbox = self._pictures if request.media else self._outbox
        reply = self._replies[name] = _Reply(request.sampling.n, outbox)
        outbox.put(Submit(request))
        del request  # its pixels are the engine's now, and an answer may take minutes
        try:
            while reply.open_choices:
                news = await reply.queue.get()
                if isinstance(news, SaccadeError):
                    reply.open_choices = 0
                    raise news
                reply.open_choices -= news.finish is not None
                yield news
        finally:
            if reply.open_choices:
                self.cancel(name)
            self._replies.pop(name, None)

    async def picture(self, content: bytes, *, drop: bool = False) -> dict[str, int]:
        """How many views of a picture each tier keeps; with `drop` they are forgotten, on disk too when this
        is over."""
        async with self._recalling:
            if self._end is not None:
                raise self._end
            number = next(self._numbers)
            asked: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
            self._recalls[number] = asked
            self._outbox.put(Recall(number, content, drop))
            try:
                return await asked
            finally:
                self._recalls.pop(number, None)

    def cancel(self, request_id: str) -> None:
        reply = self._replies.get(request_id)
        if self.alive:
            (self._outbox if reply is None else reply.outbox).put(Cancel(request_id))

    def _write(self, channel: Channel, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        """Runs in a thread: sends what is in the outbox, in order, until None."""
        while (message := outbox.get()) is not None:
            try:
                channel.send(message)
            except EngineDied:
                return  # the listener notices too, and tells everybody
            except Exception:  # a message that cannot be packed: its sender alone is told, the log why
                log.exception("a message could not be sent")
                if isinstance(message, Submit):
                    text = "the request could not be sent to the engine; try again"
                    refusal = Refused(message.request.id, "", text, None)
                    loop.call_soon_threadsafe(self._handle, refusal)
                elif isinstance(message, Start):  # nobody would ever be ready
                    failure = Failed("the engine's options could not be sent to it; the log says why")
                    loop.call_soon_threadsafe(self._handle, failure)

    def _listen(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: hands every message to the event loop until the engine is gone."""

        def deliver(action: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
                loop.call_soon_threadsafe(action, *arguments)

        while (message := channel.receive(ToFront)) is not None:
            deliver(self._handle, message)
        deliver(self._gone)

    def _handle(self, message: ToFront) -> None:
        match message:
            case News(deltas, stats):
                self._stats = stats
                for delta in sorted(deltas, key=_goes_on):
                    self._tell(delta.request_id, delta)
            case Refused(request_id, code, text, param):
                self._tell(request_id, engine_error(code, text, param))
            case Recalled(number, tiers):
                asked = self._recalls.pop(number, None)
                if asked is not None and not asked.done():
                    asked.set_result(tiers)
            case Ready(info, stats):
                self._stats = stats
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case Failed(text):
                self._over(ConfigError(text) if self._info is None else EngineDied(text))

    def _tell(self, request_id: str, news: Delta | SaccadeError) -> None:
        if request_id in self._replies:  # otherwise nobody listens any more
            self._replies[request_id].queue.put_nowait(news)

    def _gone(self) -> None:
        """The channel is closed from the other side."""
        text = "the engine stopped unexpectedly; the server must be restarted"
        if self._info is None:
            text = "the engine ended while it was starting; its log says why"
        self._over(EngineDied(text))

    def _over(self, why: SaccadeError) -> None:
        """Nothing more can be answered; the first reason stands."""
        if self._end is not None:
            return
        self._end = why
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(why)
        for reply in self._replies.values():
            reply.queue.put_nowait(why)
        for asked in self._recalls.values():
            if not asked.done():
                asked.set_exception(why)


def _goes_on(delta: Delta) -> bool:
    """Whether it is not the first of its request. First tokens are handed on before all others: a stream that
    runs does not notice, and writing one piece of each of 200 takes 15 ms."""
    return delta.times is None or delta.finish is not None


def _wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
