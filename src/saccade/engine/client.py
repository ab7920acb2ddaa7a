"""The API server's client of the engine core, which runs in a process of its own. Imports no torch."""

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
from saccade.engine import ipc
from saccade.errors import ConfigError, EngineDied, SaccadeError, engine_error
from saccade.metrics import EngineStats
from saccade.request import Delta, Request

log = logging.getLogger(__name__)

# OpenMP threads that wait for work spin by default, which starves the API server on a machine with few cores.
# Variables the user has set take precedence.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}

STOP_SECONDS = 10.0  # for the engine core to finish its last step
START_STOP_SECONDS = 1.0  # the same while it starts: it only clears the terminal
MAX_IMAGE_QUERIES = 16  # in flight: the engine core answers them between two steps


class EngineInterface(Protocol):
    """What the server needs of an engine, in this process or another."""

    @property
    def info(self) -> ipc.EngineInfo: ...
    @property
    def alive(self) -> bool: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def generate(self, request: Request) -> AsyncGenerator[Delta]: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    async def image_tiers(self, content: bytes, *, delete: bool = False) -> dict[str, int]: ...


Outbox = queue.SimpleQueue[ipc.ToEngine | None]


class _Stream:
    """The unread output of one request."""

    def __init__(self, sequences: int, outbox: Outbox) -> None:
        self.outbox = outbox  # a cancellation uses the same one, so that it cannot overtake the request
        self.queue: asyncio.Queue[Delta | SaccadeError] = asyncio.Queue()
        self.unfinished = sequences


class EngineClient:
    """Starts the engine core's process, sends it requests and receives their output.

    Writer threads send, so the event loop never waits for the engine core or for a copy of pixels. Requests
    with images use a writer of their own, so that text requests do not wait for those copies (2 ms each).
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ipc.Channel | None = None
        self._outbox: Outbox = queue.SimpleQueue()
        self._image_outbox: Outbox = queue.SimpleQueue()
        self._info: ipc.EngineInfo | None = None
        self._ready: asyncio.Future[ipc.EngineInfo] | None = None
        self._stats = EngineStats()
        self._streams: dict[str, _Stream] = {}
        self._image_queries: dict[int, asyncio.Future[dict[str, int]]] = {}
        self._query_limit = asyncio.Semaphore(MAX_IMAGE_QUERIES)
        self._query_ids = itertools.count()
        # Why nothing can be answered; None while the engine core is alive.
        self._error: SaccadeError | None = EngineDied("the engine has not been started")

    @property
    def info(self) -> ipc.EngineInfo:
        if self._info is None:
            raise self._error or EngineDied("the engine is still starting")
        return self._info

    @property
    def alive(self) -> bool:
        return self._error is None

    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> None:
        """Start the engine core and wait until it is ready; raises why it cannot be."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "saccade.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is the API server's to handle
                env={**_ENVIRONMENT, **os.environ},
            )
        self._channel = ipc.Channel(ours)
        self._ready = loop.create_future()
        self._error = None
        threading.Thread(target=self._receive, args=(self._channel, loop), daemon=True).start()
        for outbox in (self._outbox, self._image_outbox):
            threading.Thread(target=self._send, args=(self._channel, loop, outbox), daemon=True).start()
        self._outbox.put(ipc.Start(self._config))
        try:
            self._info = await self._ready
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the engine core; every open request gets EngineDied."""
        self._fail(EngineDied("the server is shutting down"))
        self._outbox.put(ipc.Stop())
        for outbox in (self._outbox, self._image_outbox):
            outbox.put(None)
        if self._process is not None:
            if self._info is None:  # it reads no messages yet
                self._process.terminate()
            seconds = STOP_SECONDS if self._info is not None else START_STOP_SECONDS
            await asyncio.to_thread(_wait_or_kill, self._process, seconds)
        if self._channel is not None:
            self._channel.close()

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """The request's output; closing the generator early cancels the request."""
        if self._error is not None:
            raise self._error
        name = request.id
        outbox = self._image_outbox if request.media else self._outbox
        stream = self._streams[name] = _Stream(request.sampling.n, outbox)
        outbox.put(ipc.Submit(request))
        del request  # frees its pixels here: an answer may take minutes
        try:
            while stream.unfinished:
                delta = await stream.queue.get()
                if isinstance(delta, SaccadeError):
                    stream.unfinished = 0
                    raise delta
                stream.unfinished -= delta.finish is not None
                yield delta
        finally:
            if stream.unfinished:
                self.cancel(name)
            self._streams.pop(name, None)

    async def image_tiers(self, content: bytes, *, delete: bool = False) -> dict[str, int]:
        """How many views of an image each cache tier holds. With `delete` they are deleted, on disk too,
        before this returns."""
        async with self._query_limit:
            if self._error is not None:
                raise self._error
            query_id = next(self._query_ids)
            reply: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
            self._image_queries[query_id] = reply
            self._outbox.put(ipc.ImageQuery(query_id, content, delete))
            try:
                return await reply
            finally:
                self._image_queries.pop(query_id, None)

    def cancel(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if self.alive:
            (self._outbox if stream is None else stream.outbox).put(ipc.Cancel(request_id))

    def _send(self, channel: ipc.Channel, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        """Runs in a thread: sends the messages of an outbox, in order, until None."""
        while (message := outbox.get()) is not None:
            try:
                channel.send(message)
            except EngineDied:
                return  # the receiving thread reports it
            except Exception:  # the message cannot be encoded: only its sender is concerned
                log.exception("a message could not be sent")
                if isinstance(message, ipc.Submit):
                    text = "the request could not be sent to the engine; try again"
                    rejection = ipc.RequestRejected(message.request.id, "", text, None)
                    loop.call_soon_threadsafe(self._handle, rejection)
                elif isinstance(message, ipc.Start):
                    failure = ipc.EngineFailed(
                        "the engine's options could not be sent to it; the log says why"
                    )
                    loop.call_soon_threadsafe(self._handle, failure)

    def _receive(self, channel: ipc.Channel, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: passes every message to the event loop until the channel is closed."""

        def call(action: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(action, *arguments)

        while (message := channel.receive(ipc.ToFrontend)) is not None:
            call(self._handle, message)
        call(self._handle_closed)

    def _handle(self, message: ipc.ToFrontend) -> None:
        match message:
            case ipc.StepOutputs(deltas, stats):
                self._stats = stats
                for delta in sorted(deltas, key=_is_continuation):
                    self._deliver(delta.request_id, delta)
            case ipc.RequestRejected(request_id, code, text, param):
                self._deliver(request_id, engine_error(code, text, param))
            case ipc.ImageQueryReply(query_id, tiers):
                reply = self._image_queries.pop(query_id, None)
                if reply is not None and not reply.done():
                    reply.set_result(tiers)
            case ipc.EngineReady(info, stats):
                self._stats = stats
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case ipc.EngineFailed(text):
                self._fail(ConfigError(text) if self._info is None else EngineDied(text))

    def _deliver(self, request_id: str, output: Delta | SaccadeError) -> None:
        if request_id in self._streams:  # not if the request was cancelled
            self._streams[request_id].queue.put_nowait(output)

    def _handle_closed(self) -> None:
        text = "the engine stopped unexpectedly; the server must be restarted"
        if self._info is None:
            text = "the engine ended while it was starting; its log says why"
        self._fail(EngineDied(text))

    def _fail(self, error: SaccadeError) -> None:
        """Raise the error in everything that waits for the engine core; only the first one counts."""
        if self._error is not None:
            return
        self._error = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for stream in self._streams.values():
            stream.queue.put_nowait(error)
        for reply in self._image_queries.values():
            if not reply.done():
                reply.set_exception(error)


def _is_continuation(delta: Delta) -> bool:
    """Whether this is not the first output of its request. First tokens are delivered before all others: a
    running stream does not notice, and writing one chunk to each of 200 streams takes 15 ms."""
    return delta.times is None or delta.finish is not None


def _wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
