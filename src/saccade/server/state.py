"""What all requests of one server share.

takes   a front, an engine link, the server's options
gives   the answers to "which models", "is it open", and the drain
owns    the threads that prepare requests, the bytes of bodies being read, the exchanges going on, the pace
"""

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from saccade import __version__
from saccade.config import ServeConfig
from saccade.engine.client import EngineLink
from saccade.errors import EngineDied, NotFound, Overloaded, SaccadeError
from saccade.inputs.processor import InputProcessor
from saccade.metrics import ServerMetrics

PREPARERS = 8  # threads for what only computes: parsing, tokenising, writing long answers
LOADERS = 64  # threads for requests with media; they wait for remote pictures more than they compute
SLICE_SECONDS = 0.004  # work on deltas in one turn of the event loop, all requests together
BODIES_AT_ONCE = 16  # bodies of the largest size that may be held at the same time
DYING_SECONDS = 5.0  # what ended exchanges get to tell their clients


class ModelNotFound(NotFound):
    code = "model_not_found"


class Exchange(Protocol):
    """A request being answered, as the drain sees it."""

    def abort(self, reason: SaccadeError) -> None: ...


class Pace:
    """Lets the event loop turn while much is to be done in it, however many tasks do it."""

    def __init__(self) -> None:
        self._began: float | None = None  # when work began in this turn of the loop

    async def breathe(self) -> None:
        """Waits for the loop's next turn if this one has lasted long enough."""
        if self._began is None:
            self._began = time.monotonic()
            asyncio.get_running_loop().call_soon(self._turn)
        elif time.monotonic() - self._began >= SLICE_SECONDS:
            await asyncio.sleep(0)

    def _turn(self) -> None:
        self._began = None


class Service:
    def __init__(self, front: InputProcessor, link: EngineLink, config: ServeConfig) -> None:
        self.front = front
        self.link = link
        self.config = config
        self.names = config.served_model_names or (front.checkpoint.name,)
        self.created = int(time.time())
        self.metrics = ServerMetrics(link.stats)
        # Apart, so that slow pictures keep nobody waiting who sends none.
        self.preparers = ThreadPoolExecutor(PREPARERS, thread_name_prefix="prepare")
        self.loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="load")
        self.pace = Pace()
        self.draining = False
        self.exchanges: set[Exchange] = set()
        self._body_bytes = 0
        info = link.info
        described = f"{__version__}|{info.model}|{info.dtype}|{info.device}"
        self.fingerprint = "fp_" + hashlib.sha256(described.encode()).hexdigest()[:12]

    def model_name(self, name: str) -> str:
        if name in self.names:
            return name
        served = ", ".join(f"'{one}'" for one in self.names)
        raise ModelNotFound(f"the model '{name[:64]}' does not exist here; use {served}", param="model")

    def check_open(self) -> None:
        """Raises when no new request can be taken."""
        if not self.link.alive:
            raise EngineDied("the engine has stopped; the server is about to exit")
        if self.draining:
            raise Overloaded("the server is shutting down; send the request elsewhere")

    def hold_bytes(self, count: int) -> None:
        """Accounts for `count` more (or, negative, fewer) bytes of bodies in memory."""
        self._body_bytes += count
        limit = BODIES_AT_ONCE * self.config.max_body_bytes
        if count > 0 and self._body_bytes > limit:
            raise Overloaded(f"the bodies being read take more than {limit} bytes together; try again")

    async def drain(self, seconds: float) -> None:
        """Takes no new requests; lets the running ones finish, then ends them with an error."""
        self.draining = True
        await self._emptied(seconds)
        self.abort_all(Overloaded("the server is shutting down and stopped waiting for this answer"))
        await self._emptied(DYING_SECONDS)

    def abort_all(self, reason: SaccadeError) -> None:
        for exchange in tuple(self.exchanges):
            exchange.abort(reason)

    async def _emptied(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.exchanges and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        for pool in (self.preparers, self.loaders):
            pool.shutdown(wait=False, cancel_futures=True)
