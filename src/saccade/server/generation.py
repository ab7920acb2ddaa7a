"""The prompts of one request in the engine: output, usage, timing and metrics. Knows nothing of HTTP."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from saccade.errors import ENGINE_ERRORS, Overloaded, SaccadeError
from saccade.inputs.output_processor import CompletionOutput, OutputProcessor, TextDelta, Usage
from saccade.request import Delta, Request
from saccade.request_timing import RequestTiming
from saccade.server.asgi import internal_error
from saccade.server.state import ServerState

log = logging.getLogger("saccade.server")

Emit = Callable[[int, TextDelta], Awaitable[None]]


@dataclass
class PromptRun:
    """One prompt of a request in the engine."""

    request: Request | None  # None once the engine has it: pixels are large
    output: OutputProcessor
    first_index: int  # of its choices among those of all prompts
    timing: RequestTiming


class Generation:
    """The prompts of one request in the engine, their choices and metrics. Knows nothing of HTTP."""

    def __init__(self, state: ServerState, name: str, prompts: list[PromptRun]) -> None:
        self._state = state
        self._name = name
        self.prompts = prompts

    @property
    def choices(self) -> list[tuple[int, CompletionOutput]]:
        return [
            (one.first_index + choice.index, choice) for one in self.prompts for choice in one.output.choices
        ]

    @property
    def usage(self) -> Usage:
        each = [one.output.usage for one in self.prompts]
        if len(each) == 1:
            return each[0]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in each),
            completion_tokens=sum(usage.completion_tokens for usage in each),
            cached_tokens=sum(usage.cached_tokens for usage in each),
            visual_tokens=sum(usage.visual_tokens for usage in each),
            full_visual_tokens=sum(usage.full_visual_tokens for usage in each),
            images=tuple(name for usage in each for name in usage.images),
        )

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
        deltas = self._state.engine.generate(request)
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
                await self._state.loop_budget.yield_if_spent()  # reading available deltas never waits
        raise Overloaded("the engine ended this answer early; send the request again")

    def _failure(self, piece: TextDelta) -> SaccadeError:
        if piece.finish == "cancelled":
            return Overloaded("the server cancelled this answer; send the request again")
        if piece.code in ENGINE_ERRORS:
            return ENGINE_ERRORS[piece.code](piece.error or "")
        log.error("%s: the engine reports: %s", self._name, piece.error)
        return internal_error()

    def _observe(self, delta: Delta, last_token_at: dict[int, float], timing: RequestTiming) -> None:
        if delta.times is not None:
            timing.engine = delta.times
        if not delta.tokens:
            return
        metrics = self._state.metrics
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
        metrics = self._state.metrics
        now = time.monotonic()
        metrics.end_to_end.observe(now - self.prompts[0].timing.arrived)
        for prompt in self.prompts:
            if prompt.output.done:
                for stage, seconds in prompt.timing.seconds(now).items():
                    metrics.stages[stage].observe(seconds)
        for _, choice in self.choices:
            metrics.finished.labels(choice.finish_reason or "cancelled").inc()
