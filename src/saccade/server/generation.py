"""Requests in the engine, without HTTP: the state all of them share; the prompts of one, and their output."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol

from saccade import __version__
from saccade.config import ServeConfig
from saccade.engine.client import EngineInterface
from saccade.errors import ENGINE_ERRORS, EngineDied, NotFound, Overloaded, SaccadeError
from saccade.inputs.output_processor import CompletionOutput, OutputProcessor, TextDelta, Usage
from saccade.inputs.processor import InputProcessor
from saccade.metrics import ServerMetrics
from saccade.request import Delta, Request, RequestTiming
from saccade.server.json_body import internal_error

log = logging.getLogger("saccade.server")

Emit = Callable[[int, TextDelta], Awaitable[None]]

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
            asyncio.get_running_loop().call_soon(setattr, self, "_started_at", None)
        elif time.monotonic() - self._started_at >= LOOP_BUDGET_SECONDS:
            await asyncio.sleep(0)


class ServerState:
    """What all requests share: worker threads, buffered body bytes, active requests, shutdown."""

    def __init__(self, processor: InputProcessor, engine: EngineInterface, config: ServeConfig) -> None:
        self.processor = processor
        self.engine = engine
        self.config = config
        self.model_names = config.served_model_names or (processor.checkpoint.name,)
        self.created = int(time.time())
        self.metrics = ServerMetrics(engine.stats, engine.info.weight_bytes, engine.info.quantization)
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


@dataclass
class PromptRun:
    """One prompt of a request in the engine."""

    request: Request | None  # None once the engine has it: pixels are large
    output: OutputProcessor
    first_index: int  # of its choices among those of all prompts
    timing: RequestTiming


@dataclass(eq=False)
class Generation:
    """The prompts of one request in the engine, their choices and metrics."""

    state: ServerState
    name: str  # in logs
    prompts: list[PromptRun]

    @property
    def choices(self) -> list[tuple[int, CompletionOutput]]:
        return [
            (one.first_index + choice.index, choice) for one in self.prompts for choice in one.output.choices
        ]

    @property
    def usage(self) -> Usage:
        return reduce(add, (one.output.usage for one in self.prompts))

    @property
    def timing(self) -> RequestTiming:
        """Of the prompt that finished last; the others did not delay the response."""
        return max((one.timing for one in self.prompts), key=lambda timing: timing.last or 0.0)

    async def run(self, emit: Emit | None = None) -> None:
        """Run all prompts to their end and `emit` their output; leaving early cancels them in the engine."""
        if len(self.prompts) == 1:
            await self._run_prompt(self.prompts[0], emit)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in self.prompts:
                    group.create_task(self._run_prompt(prompt, emit))
        except ExceptionGroup as failures:
            _, unexpected = failures.split(SaccadeError)
            raise (unexpected or failures.exceptions[0]) from None

    async def _run_prompt(self, prompt: PromptRun, emit: Emit | None) -> None:
        output, request, prompt.request = prompt.output, prompt.request, None
        if request is None:
            raise internal_error()
        last_token_at: dict[int, float] = {}  # by choice
        prompt.timing.sent = time.monotonic()
        deltas = self.state.engine.generate(request)
        del request
        async with aclosing(deltas):
            async for delta in deltas:
                self._observe(delta, last_token_at, prompt.timing)
                piece = output.push(delta)
                if piece is not None:
                    if piece.finish in ("error", "cancelled"):
                        raise self._failure(piece)
                    if emit is not None:
                        await emit(prompt.first_index + piece.index, piece)
                if output.done:
                    return
                await self.state.loop_budget.yield_if_spent()  # reading available deltas never waits
        raise Overloaded("the engine ended this answer early; send the request again")

    def _failure(self, piece: TextDelta) -> SaccadeError:
        if piece.finish == "cancelled":
            return Overloaded("the server cancelled this answer; send the request again")
        if piece.code in ENGINE_ERRORS:
            return ENGINE_ERRORS[piece.code](piece.error or "")
        log.error("%s: the engine reports: %s", self.name, piece.error)
        return internal_error()

    def _observe(self, delta: Delta, last_token_at: dict[int, float], timing: RequestTiming) -> None:
        if delta.times is not None:
            timing.engine = delta.times
        if not delta.tokens:
            return
        metrics = self.state.metrics
        now = time.monotonic()
        timing.last = now
        if not last_token_at:
            timing.first = now
            metrics.first_token.observe(now - timing.arrived)
        previous = last_token_at.get(delta.index)
        if previous is not None:
            for _ in delta.tokens:  # tokens of one delta share the time since the previous delta
                metrics.inter_token.observe((now - previous) / len(delta.tokens))
        last_token_at[delta.index] = now

    def observe_end(self) -> None:
        if not self.prompts or self.prompts[0].timing.sent is None:
            return  # it never reached the engine
        metrics = self.state.metrics
        now = time.monotonic()
        metrics.end_to_end.observe(now - self.prompts[0].timing.arrived)
        for prompt in self.prompts:
            if prompt.output.done:
                for stage, seconds in prompt.timing.seconds(now).items():
                    metrics.stages[stage].observe(seconds)
        for _, choice in self.choices:
            metrics.finished.labels(choice.finish_reason or "cancelled").inc()
