"""The front's side of an engine: requests in, deltas out, one process away.

takes   requests from any asyncio task of one loop
gives   an async iterator of deltas per request; closing it early cancels the request
owns    the engine process and the front's end of the channel
never   imports torch: the front stays small and starts fast
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from saccade.config import EngineConfig
from saccade.errors import (
    ConfigError,
    ContextTooLong,
    EngineDied,
    InvalidValue,
    Overloaded,
    SaccadeError,
)
from saccade.metrics import EngineStats
from saccade.request import Delta, Request
from saccade.runtime.wire import (
    Cancel,
    Channel,
    EngineInfo,
    Failed,
    News,
    Ready,
    Refused,
    Start,
    Stop,
    Submit,
    ToFront,
)

_REFUSALS: dict[str | None, type[SaccadeError]] = {
    kind.code: kind for kind in (InvalidValue, ContextTooLong, Overloaded)
}


# Threads that wait for work spin by default, which starves the front on a machine with few cores. What the
# user has set stands.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}


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


class _Reply:
    """The deltas of one request that nobody has read yet, and how many choices are still open."""

    def __init__(self, choices: int) -> None:
        self.queue: asyncio.Queue[Delta | SaccadeError] = asyncio.Queue()
        self.open_choices = choices


class ProcessLink:
    """An engine in a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._replies: dict[str, _Reply] = {}
        self._alive = False
        self._why_ended = "the engine has not been started"
        self._ready: asyncio.Future[EngineInfo] | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDied(self._why_ended)
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> None:
        """Spawn the engine and wait until it can answer; ConfigError says why it cannot."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "saccade.runtime.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is the front's to handle
                env={**_ENVIRONMENT, **os.environ},
            )
        self._channel = Channel(ours)
        self._ready = loop.create_future()
        self._alive = True
        threading.Thread(target=self._listen, args=(self._channel, loop), daemon=True).start()
        self._channel.send(Start(self._config))
        try:
            self._info = await self._ready
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the engine; every open request gets EngineDied."""
        self._why_ended = "the server is shutting down"
        if self._channel is not None:
            with contextlib.suppress(EngineDied):
                self._channel.send(Stop())
        if self._process is not None:
            await asyncio.to_thread(_wait_or_kill, self._process, 10.0)
        if self._channel is not None:
            self._channel.close()
        self._ended()

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        if not self._alive or self._channel is None:
            raise EngineDied(self._why_ended)
        name = request.id
        reply = self._replies[name] = _Reply(request.sampling.n)
        try:
            await self._submit(self._channel, request)
            del request  # its pixels are the engine's now, and an answer may take minutes
            while reply.open_choices:
                news = await reply.queue.get()
                if isinstance(news, SaccadeError):
                    reply.open_choices = 0
                    raise news
                reply.open_choices -= news.finish is not None
                yield news
        finally:
            self._replies.pop(name, None)
            if reply.open_choices:
                self.cancel(name)

    async def _submit(self, channel: Channel, request: Request) -> None:
        if not request.media:
            channel.send(Submit(request))
            return
        # A picture of many megapixels is copied into shared memory here: off the event loop.
        sending = asyncio.ensure_future(asyncio.to_thread(channel.send, Submit(request)))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The thread goes on sending: a cancellation sent now would overtake what it cancels.
            sending.add_done_callback(lambda _: self.cancel(request.id))
            raise

    def cancel(self, request_id: str) -> None:
        if self._alive and self._channel is not None:
            with contextlib.suppress(EngineDied):
                self._channel.send(Cancel(request_id))

    def _listen(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: hands every message to the event loop until the engine is gone."""

        def deliver(action: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
                loop.call_soon_threadsafe(action, *arguments)

        while (message := channel.receive(ToFront)) is not None:
            deliver(self._handle, message)
        deliver(self._ended)

    def _handle(self, message: ToFront) -> None:
        match message:
            case News(deltas, stats):
                self._stats = stats
                for delta in deltas:
                    if delta.request_id in self._replies:
                        self._replies[delta.request_id].queue.put_nowait(delta)
            case Refused(request_id, code, text, param):
                if request_id in self._replies:
                    refusal = _REFUSALS.get(code, SaccadeError)(text, param=param)
                    self._replies[request_id].queue.put_nowait(refusal)
            case Ready(info):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case Failed(text):
                self._why_ended = text
                if self._ready is not None and not self._ready.done():
                    self._ready.set_exception(ConfigError(text))

    def _ended(self) -> None:
        if self._alive and self._info is not None and self._why_ended.startswith("the engine has not"):
            self._why_ended = "the engine stopped unexpectedly; the server must be restarted"
        self._alive = False
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineDied("the engine ended while it was starting; its log says why"))
        for reply in self._replies.values():
            reply.queue.put_nowait(EngineDied(self._why_ended))


def _wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
