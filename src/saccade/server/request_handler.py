"""One generation request over HTTP, for any API: read the body, prepare, run in the engine, respond.

An API subclasses `GenerationHandler`: `parse` turns its JSON into a `ParsedRequest`, whose `ResponseEncoder`
writes its response format. A client's disconnect, a timeout or a shutdown cancels the request in the engine.
"""

import asyncio
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from starlette.types import Message, Receive, Scope, Send

from saccade.errors import SaccadeError, TimedOut
from saccade.inputs.answer.answer_format import AnswerPlan
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.output_processor import CompletionOutput, TextDelta, Usage
from saccade.request import Request, RequestTiming
from saccade.sampling_params import SamplingParams
from saccade.server.generation import Generation, PromptRun, ServerState
from saccade.server.json_body import (
    ABORT_CONNECTION,
    TENANT_SALT,
    Disconnected,
    Headers,
    check_content_type,
    error_body,
    internal_error,
    parse_json,
    read_body,
    send_body,
    send_error,
)

log = logging.getLogger("saccade.server")
slow_log = logging.getLogger("saccade.slow")

ERROR_SECONDS = 5.0  # for a client that does not read to receive its error
LARGE_BODY = 64 << 10  # bytes; larger bodies are parsed in a thread
# Bytes; a single text prompt in a smaller body is prepared on the event loop. That takes 0.2 ms, against 0.6
# through a thread on busy cores, and more while threads decode images. The slowest such text takes 5 ms.
SMALL_BODY = 2 << 10
LARGE_RESPONSE = 4096  # tokens, alternatives included; larger responses are encoded in a thread
_JSON: Headers = [(b"content-type", b"application/json")]
_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps proxies from buffering the stream
]


class ResponseEncoder(Protocol):
    """The bytes of one response, as server-sent events or as one body."""

    def start(self, usage: Usage) -> bytes: ...
    def chunk(self, index: int, piece: TextDelta) -> bytes: ...
    def end(self, usage: Usage) -> bytes: ...
    def error(self, error: SaccadeError) -> bytes: ...
    def full(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes: ...


class Prepare(Protocol):
    """Builds the engine request of one prompt; blocks while it fetches and decodes media."""

    def __call__(
        self, request_id: str, salt: bytes, *, cancel: CancelToken, timing: RequestTiming
    ) -> Request: ...


@dataclass(frozen=True)
class ParsedRequest:
    """A validated body, as every API hands it to the handler. The encoder must not keep the body."""

    model: str
    params: SamplingParams
    prompts: list[Prepare]
    has_media: bool
    stream: bool
    encoder: ResponseEncoder
    user: str | None = None
    plan: AnswerPlan | None = None  # None: answers are plain text


class GenerationHandler(ABC):
    """An ASGI application for one request."""

    id_prefix: ClassVar[str]

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.request_id = self.id_prefix + uuid.uuid4().hex
        self._arrived = time.monotonic()
        self._body_read_at: float | None = None
        self._body = b""
        self._body_bytes = 0  # counted in `state`
        self._generation: Generation | None = None
        self._task: asyncio.Task[Any] | None = None  # reads the body, then generates; `abort` cancels it
        self._abort_reason: SaccadeError | None = None
        self._response_started = False
        self._stream_encoder: ResponseEncoder | None = None  # once events are being sent

    @abstractmethod
    def parse(self, data: object) -> ParsedRequest:
        """Validate a JSON body; SaccadeError names the parameter that is wrong."""

    def encode_error(self, error: SaccadeError) -> bytes:
        """The body of an error response."""
        return error_body(error)

    def abort(self, reason: SaccadeError) -> None:
        """Cancel the request; the client gets `reason`."""
        if self._abort_reason is None:
            self._abort_reason = reason
            if self._task is not None:
                self._task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tracked(message: Message) -> None:
            await send(message)  # waits for earlier bytes; cancelled while waiting, it has sent nothing
            self._response_started |= message["type"] == "http.response.start"

        error: SaccadeError | None = None
        self.state.active.add(self)
        self.state.metrics.in_flight.inc()
        try:
            try:
                await self._serve(scope, receive, tracked)
            except Disconnected:
                log.info("%s: the client disconnected", self.request_id)
            except SaccadeError as known:
                error = known
            except asyncio.CancelledError:
                if self._abort_reason is None:
                    raise
                error = self._abort_reason
            except Exception:
                log.exception("%s: failed", self.request_id)
                error = internal_error()
            if error is not None:
                await self._send_error(tracked, error, scope.get(ABORT_CONNECTION))
        finally:
            self._release_body()
            self.state.metrics.in_flight.dec()
            self.state.active.discard(self)
            limit = self.state.config.slow_request_seconds
            if limit and time.monotonic() - self._arrived >= limit:
                self._log_slow()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        config, headers = self.state.config, scope["headers"]
        self.state.check_accepting()
        check_content_type(headers)
        reading = read_body(
            receive, headers, config.max_body_bytes, config.read_timeout, self._count_body_bytes
        )
        self._task = asyncio.create_task(reading)
        self._body = await self._task
        self._body_read_at = time.monotonic()
        if self._abort_reason is not None:  # `abort` came after the last byte
            raise self._abort_reason
        self._task = asyncio.create_task(self._generate(scope[TENANT_SALT], send))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        tasks = {self._task, disconnect}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            disconnected = not self._task.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if disconnected:
            raise Disconnected
        self._task.result()

    def _count_body_bytes(self, count: int) -> None:
        self._body_bytes += count
        self.state.count_body_bytes(count)

    def _release_body(self) -> None:
        self._body = b""
        self.state.count_body_bytes(-self._body_bytes)
        self._body_bytes = 0

    async def _generate(self, salt: bytes, send: Send) -> None:
        limit = self.state.config.request_timeout
        try:
            async with asyncio.timeout(limit - (time.monotonic() - self._arrived)) as deadline:
                self._generation, encoder, stream = await self._prepare(salt)
                self._release_body()
                try:
                    await self._respond(self._generation, encoder, stream, send)
                finally:
                    self._generation.observe_end()
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"the answer was not complete after {limit:g} seconds; ask for fewer tokens"
            raise TimedOut(message) from None

    async def _prepare(self, salt: bytes) -> tuple[Generation, ResponseEncoder, bool]:
        """Parse the body, build the engine requests. The result does not keep the body: images are large."""
        state, loop = self.state, asyncio.get_running_loop()
        large = len(self._body) > LARGE_BODY
        parsed = await loop.run_in_executor(state.text_threads, self._parse) if large else self._parse()
        cancel = CancelToken()
        timings = [RequestTiming(self._arrived, self._body_read_at) for _ in parsed.prompts]
        single = len(parsed.prompts) == 1
        calls = [
            partial(
                prepare,
                self.request_id if single else f"{self.request_id}-{number}",
                salt,
                cancel=cancel,
                timing=timings[number],
            )
            for number, prepare in enumerate(parsed.prompts)
        ]
        if single and not parsed.has_media and len(self._body) <= SMALL_BODY:
            requests = [calls[0]()]
        else:
            threads = state.media_threads if parsed.has_media else state.text_threads
            futures = [loop.run_in_executor(threads, call) for call in calls]
            try:
                requests = await asyncio.gather(*futures)
            except BaseException:
                cancel.cancel()
                for future in futures:
                    future.cancel()
                raise
        prompts = []
        for number, (request, timing) in enumerate(zip(requests, timings, strict=True)):
            output = state.processor.output_processor(request, parsed.params, parsed.plan)
            prompts.append(PromptRun(request, output, number * parsed.params.n, timing))
        return Generation(state, self.request_id, prompts), parsed.encoder, parsed.stream

    def _parse(self) -> ParsedRequest:
        parsed = self.parse(parse_json(self._body))
        self.state.check_model(parsed.model)
        if parsed.user is not None:
            log.info("%s: for user %r", self.request_id, parsed.user)
        return parsed

    # --- response ---------------------------------------------------------------------------------------

    async def _respond(
        self, generation: Generation, encoder: ResponseEncoder, stream: bool, send: Send
    ) -> None:
        if stream:
            await self._stream(generation, encoder, send)
            return
        await generation.run()
        encode = partial(encoder.full, generation.choices, generation.usage)
        if sum(choice.spelled for _, choice in generation.choices) <= LARGE_RESPONSE:
            body = encode()
        else:
            body = await asyncio.get_running_loop().run_in_executor(self.state.text_threads, encode)
        await send_body(send, 200, body, [*_JSON, *self._response_headers(generation, time.monotonic())])

    async def _stream(self, generation: Generation, encoder: ResponseEncoder, send: Send) -> None:
        starting = asyncio.Lock()  # several prompts emit concurrently

        async def emit(index: int, piece: TextDelta) -> None:
            if self._stream_encoder is None:
                async with starting:
                    if self._stream_encoder is None:
                        # The headers wait for the first token: they report the stages up to it.
                        headers = [*_EVENT_STREAM, *self._response_headers(generation)]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        self._stream_encoder = encoder
                        if opening := encoder.start(generation.usage):
                            await send({"type": "http.response.body", "body": opening, "more_body": True})
            if chunk := encoder.chunk(index, piece):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})

        await generation.run(emit)
        last = encoder.end(generation.usage)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _response_headers(self, generation: Generation, end: float | None = None) -> Headers:
        timing = generation.timing.header(end)
        return [(b"x-request-id", self.request_id.encode()), (b"server-timing", timing)]

    async def _send_error(
        self, send: Send, error: SaccadeError, abort_connection: Callable[[], None] | None
    ) -> None:
        if error.status > 500:  # a plain 500 has been logged with its cause
            log.warning("%s: %d %s", self.request_id, error.status, error.message)
        try:
            async with asyncio.timeout(ERROR_SECONDS):
                if not self._response_started:
                    extra = (b"x-request-id", self.request_id.encode())
                    await send_error(send, error, extra, encode=self.encode_error)
                    return
                if self._stream_encoder is not None:
                    event = self._stream_encoder.error(error)
                    await send({"type": "http.response.body", "body": event, "more_body": False})
                    return
        except TimeoutError:
            log.info("%s: the client does not read", self.request_id)
        if abort_connection is not None:  # part of the response is already on its way
            abort_connection()

    def _log_slow(self) -> None:
        """One line of JSON with the time per stage; nothing of the prompt or the answer."""
        generation = self._generation
        timing = generation.timing if generation else RequestTiming(self._arrived, self._body_read_at)
        line: dict[str, object] = {
            "slow_request": self.request_id,
            "ended_in": timing.reached,
            "finish": None,
        }
        if generation is not None:
            usage = generation.usage
            line |= {
                "finish": sorted({choice.finish_reason or "cancelled" for _, choice in generation.choices}),
                "choices": len(generation.choices),
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "visual_tokens": usage.visual_tokens,
                "completion_tokens": usage.completion_tokens,
            }
        if timing.engine is not None:
            line["preempted"] = timing.engine.preempted
        line["seconds"] = {
            stage: round(value, 4) for stage, value in timing.seconds(time.monotonic()).items()
        }
        slow_log.warning("%s", json.dumps(line))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GenerationRoute:
    """An ASGI endpoint with a new handler for every request."""

    def __init__(self, handler: type[GenerationHandler], state: ServerState) -> None:
        self._handler = handler
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._state)(scope, receive, send)
