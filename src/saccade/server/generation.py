"""The prompts of one HTTP request, answered by the engine; nothing of HTTP.

takes   prepared requests; the link
gives   every piece of every choice, in order, to one taker; the finished choices and their usage
never   leaves a request running in the engine when `run` is over; keeps the event loop to itself
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from saccade.errors import ENGINE_ERRORS, Overloaded
from saccade.inputs.output_processor import CompletionOutput, OutputProcessor, TextDelta, Usage
from saccade.request import Delta, Request, ZoomResult
from saccade.request_timing import RequestTiming
from saccade.server.asgi import internal_error
from saccade.server.state import Service

log = logging.getLogger("saccade.server")

Take = Callable[[int, TextDelta], Awaitable[None]]


@dataclass
class Job:
    """One prompt: its request until the engine has it, the fold of its deltas, its first choice's number."""

    request: Request | None
    answer: OutputProcessor
    first: int
    stages: RequestTiming


class Generation:
    def __init__(self, service: Service, name: str, arrived: float, jobs: list[Job]) -> None:
        self._service = service
        self._name = name
        self._arrived = arrived
        self._jobs = jobs

    @property
    def choices(self) -> list[tuple[int, CompletionOutput]]:
        return [(job.first + choice.index, choice) for job in self._jobs for choice in job.answer.choices]

    @property
    def usage(self) -> Usage:
        each = [job.answer.usage for job in self._jobs]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in each),
            completion_tokens=sum(usage.completion_tokens for usage in each),
            cached_tokens=sum(usage.cached_tokens for usage in each),
            visual_tokens=sum(usage.visual_tokens for usage in each),
            images=tuple(name for usage in each for name in usage.images),
            full_visual_tokens=sum(usage.full_visual_tokens for usage in each),
        )

    @property
    def zoomed(self) -> ZoomResult | None:
        """What was chosen for the first prompt, where views could be."""
        return self._jobs[0].answer.zoomed

    @property
    def stages(self) -> RequestTiming:
        """Of several prompts, of the one that has come furthest: the others were waited for no longer."""
        return max((job.stages for job in self._jobs), key=lambda one: one.last or 0.0)

    async def run(self, take: Take) -> None:
        """Hands every piece to `take`; leaving early, by any way, cancels what runs in the engine."""
        if len(self._jobs) == 1:
            await self._run_one(self._jobs[0], take)
            return
        async with asyncio.TaskGroup() as group:
            for job in self._jobs:
                group.create_task(self._run_one(job, take))

    def observe_end(self) -> None:
        metrics = self._service.metrics
        now = time.monotonic()
        metrics.end_to_end.observe(now - self._arrived)
        for job in self._jobs:
            if job.answer.done:
                metrics.observe_stages(job.stages.seconds(now))
        for _, choice in self.choices:
            metrics.finished.labels(choice.finish_reason or "cancelled").inc()

    async def _run_one(self, job: Job, take: Take) -> None:
        answer, request = job.answer, job.request
        if request is None:
            raise internal_error()
        job.request = None  # pixels are large and an answer may take minutes
        seen: dict[int, float] = {}  # when each choice had its latest token
        job.stages.sent = time.monotonic()
        deltas = self._service.link.generate(request)
        del request
        async with aclosing(deltas):
            async for delta in deltas:
                self._time(delta, seen, job.stages)
                piece = answer.push(delta)
                if piece is not None:
                    self._check(piece)
                    await take(job.first + piece.index, piece)
                if answer.done:
                    return
                await self._service.pace.breathe()  # deltas that are there already never wait
        raise Overloaded("the engine ended this answer early; try again")

    def _check(self, piece: TextDelta) -> None:
        if piece.finish == "error" and piece.code in ENGINE_ERRORS:
            raise ENGINE_ERRORS[piece.code](piece.error or "")
        if piece.finish == "error":
            log.error("%s: the engine reports: %s", self._name, piece.error)
            raise internal_error()
        if piece.finish == "cancelled":
            raise Overloaded("the server cancelled this answer; try again")

    def _time(self, delta: Delta, seen: dict[int, float], stages: RequestTiming) -> None:
        if delta.times is not None:
            stages.engine = delta.times
        if not delta.tokens:
            return
        metrics = self._service.metrics
        now = time.monotonic()
        stages.last = now
        if not seen:
            stages.first = now
            metrics.first_token.observe(now - self._arrived)
        latest = seen.get(delta.index)
        if latest is not None:
            for _ in delta.tokens:  # tokens that came together share the time since the last
                metrics.inter_token.observe((now - latest) / len(delta.tokens))
        seen[delta.index] = now
