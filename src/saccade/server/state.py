"""What all requests of one server share: worker threads, buffered body bytes, active requests, shutdown."""

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from saccade import __version__
from saccade.config import ServeConfig
from saccade.engine.client import EngineInterface
from saccade.errors import EngineDied, NotFound, Overloaded, SaccadeError
from saccade.inputs.processor import InputProcessor
from saccade.metrics import ServerMetrics

TEXT_THREADS = 8  # CPU work only: parsing, tokenising, encoding long responses
MEDIA_THREADS = 64  # for requests with media; they mostly wait for remote images
LOOP_BUDGET_SECONDS = 0.004  # work on deltas per event loop iteration, all requests together
MAX_BUFFERED_BODIES = 16  # bodies of the largest allowed size in memory at once
ABORT_SECONDS = 5.0  # for aborted requests to send their errors


class ModelNotFound(NotFound):
    code = "model_not_found"


class ActiveRequest(Protocol):
    def abort(self, reason: SaccadeError) -> None: ...


class LoopBudget:
    """Limits the work on deltas per event loop iteration, however many tasks share it."""

    def __init__(self) -> None:
        self._started_at: float | None = None  # of this iteration's work

    async def yield_if_spent(self) -> None:
        """Wait for the next loop iteration if this one has used up its budget."""
        if self._started_at is None:
            self._started_at = time.monotonic()
            asyncio.get_running_loop().call_soon(self._reset)
        elif time.monotonic() - self._started_at >= LOOP_BUDGET_SECONDS:
            await asyncio.sleep(0)

    def _reset(self) -> None:
        self._started_at = None


class ServerState:
    def __init__(self, processor: InputProcessor, engine: EngineInterface, config: ServeConfig) -> None:
        self.processor = processor
        self.engine = engine
        self.config = config
        self.model_names = config.served_model_names or (processor.checkpoint.name,)
        self.created = int(time.time())
        self.metrics = ServerMetrics(engine.stats)
        # Two pools: slow image downloads must not delay text requests.
        self.text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self.media_threads = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media")
        self.loop_budget = LoopBudget()
        self.draining = False
        self.active: set[ActiveRequest] = set()
        self._body_bytes = 0
        info = engine.info
        identity = f"{__version__}|{info.model}|{info.dtype}|{info.device}"
        self.fingerprint = "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12]

    def check_model(self, name: str) -> None:
        if name not in self.model_names:
            served = ", ".join(f"'{one}'" for one in self.model_names)
            message = f"the model '{name[:64]}' does not exist here; use {served}"
            raise ModelNotFound(message, param="model")

    def check_accepting(self) -> None:
        """Raise if the server accepts no new requests."""
        if not self.engine.alive:
            raise EngineDied("the engine has stopped; the server is about to exit")
        if self.draining:
            raise Overloaded("the server is shutting down; send the request elsewhere")

    def count_body_bytes(self, count: int) -> None:
        """Add `count` (negative: subtract) to the bytes of request bodies in memory."""
        self._body_bytes += count
        limit = MAX_BUFFERED_BODIES * self.config.max_body_bytes
        if count > 0 and self._body_bytes > limit:
            raise Overloaded(
                f"request bodies in memory exceed {limit} bytes in total; send the request again later"
            )

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; wait for the active ones, then abort the rest with an error."""
        self.draining = True
        await self._wait_until_idle(seconds)
        self.abort_all(Overloaded("the server shut down before this answer was complete; send it elsewhere"))
        await self._wait_until_idle(ABORT_SECONDS)

    def abort_all(self, reason: SaccadeError) -> None:
        for request in tuple(self.active):
            request.abort(reason)

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        for threads in (self.text_threads, self.media_threads):
            threads.shutdown(wait=False, cancel_futures=True)
