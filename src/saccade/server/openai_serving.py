"""One generation request over HTTP, from its first byte to its last.

takes   an ASGI request for chat or completions
gives   one JSON body, or server-sent events; both are folds of the same pieces
owns    the work of answering: a client that leaves, a deadline or the drain ends it and so frees the engine
never   leaves a request running in the engine when it returns
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from saccade.errors import SaccadeError, TimedOut
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.output_processor import TextDelta
from saccade.lod.detail import Wishes
from saccade.request import Request
from saccade.request_timing import RequestTiming
from saccade.sampling_params import SamplingParams
from saccade.server.asgi import (
    ABORT,
    SALT,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    body_of,
    internal_error,
    send_error,
    send_json,
)
from saccade.server.generation import Generation, Job
from saccade.server.json_body import Disconnected, check_type, parse_json, read_body
from saccade.server.openai_schema import (
    Body,
    ChatBody,
    CompletionBody,
    has_media,
    read,
    sampling_of,
    wishes_of,
)
from saccade.server.slow_log import note_if_slow
from saccade.server.state import Service
from saccade.server.streaming import DONE, ChatReply, Head, Reply, TextReply, event

log = logging.getLogger("saccade.server")

ERROR_SECONDS = 5.0  # for a client that reads nothing to take its error
LARGE_BODY = 64 << 10  # bytes; parsing more is left to a thread
# Bytes; a single text of no more is prepared at once: 0.2 ms, where going to a thread and back took 0.6 (busy
# cores), and more beside threads that read pictures. The slowest text of that length takes 5 ms.
SMALL_BODY = 2 << 10
LARGE_ANSWER = 4096  # tokens, alternatives included; writing more is left to a thread
_JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events would hide the stream
]


@dataclass(frozen=True)
class Terms:
    """How the client wants its answer."""

    reply: Reply
    stream: bool
    include_usage: bool
    body: Body  # without its messages


@dataclass(frozen=True)
class Asked:
    """A body that was understood."""

    body: Body
    params: SamplingParams
    media: bool  # it has pictures or videos

    @property
    def prompts(self) -> int:
        return 1 if isinstance(self.body, ChatBody) else len(self.body.prompts)


class GenerationExchange:
    """An ASGI application for one request."""

    def __init__(self, service: Service, kind: type[ChatBody] | type[CompletionBody]) -> None:
        self._service = service
        self._kind = kind
        self._arrived = time.monotonic()
        self._started = False  # the response's status is on the wire
        self._streaming = False  # and events follow it
        self._reason: SaccadeError | None = None
        self._current: asyncio.Task[Any] | None = None  # what `abort` ends: reading, then answering
        self._drop: Callable[[], None] | None = None  # the connection
        self._data = b""
        self._held = 0  # bytes of the body this exchange answers for
        self._id = ("chatcmpl-" if issubclass(kind, ChatBody) else "cmpl-") + uuid.uuid4().hex
        self._mark = (b"x-request-id", self._id.encode())
        self._read_at: float | None = None
        self._generation: Generation | None = None

    def abort(self, reason: SaccadeError) -> None:
        """Ends the work; its client is told `reason`."""
        if self._reason is None:
            self._reason = reason
            if self._current is not None:
                self._current.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tracked(message: Message) -> None:
            await send(message)  # waits for earlier bytes first; ended while waiting, it has sent nothing
            self._started |= message["type"] == "http.response.start"

        service = self._service
        service.exchanges.add(self)
        try:
            with service.metrics.in_flight.track_inprogress():
                await self._exchange(scope, receive, tracked)
        finally:
            service.exchanges.discard(self)

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Works until the answer is out or the client is gone, whichever comes first."""
        config = self._service.config
        self._drop = scope.get(ABORT)
        try:
            self._service.check_open()
            check_type(scope["headers"])
            limits = config.max_body_bytes, config.read_timeout
            reading = asyncio.create_task(read_body(receive, scope["headers"], *limits, hold=self._hold))
            self._current = reading
            self._data = await reading
            del reading  # it keeps the body
            self._read_at = time.monotonic()
            if self._reason is not None:  # the reading was over when it was to be ended
                raise self._reason
            self._current = asyncio.create_task(self._answer(scope[SALT], send))
            await _unless_gone(self._current, receive)
        except Disconnected:
            log.info("%s: the client left", self._id)
        except SaccadeError as error:
            await self._refuse(send, error)
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            await self._refuse(send, self._reason)
        finally:
            self._let_go()
            stages = (
                self._generation.stages if self._generation else RequestTiming(self._arrived, self._read_at)
            )
            note_if_slow(config.slow_request_seconds, self._id, stages, self._generation)

    def _hold(self, count: int) -> None:
        self._held += count
        self._service.hold_bytes(count)

    def _let_go(self) -> None:
        self._data = b""
        self._service.hold_bytes(-self._held)
        self._held = 0

    async def _answer(self, salt: bytes, send: Send) -> None:
        """The work. Every way it can fail ends in an error the client can read."""
        limit = self._service.config.request_timeout
        error: SaccadeError
        try:
            async with asyncio.timeout(limit - (time.monotonic() - self._arrived)) as clock:
                terms, generation = await self._prepare(salt)
                self._let_go()
                await self._generate(terms, generation, send)
                return
        except TimeoutError:
            if not clock.expired():
                log.exception("%s: failed", self._id)
                error = internal_error()
            else:
                error = TimedOut(f"the answer was not complete after {limit:g} seconds and was cancelled")
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            error = self._reason
        except SaccadeError as known:
            error = known
        except ExceptionGroup as group:
            error = self._first_error(group)
        except Exception:
            log.exception("%s: failed", self._id)
            error = internal_error()
        await self._refuse(send, error)

    def _first_error(self, group: ExceptionGroup[Exception]) -> SaccadeError:
        """Of several prompts that failed together, one is told."""
        known, unknown = group.split(SaccadeError)
        if unknown is None and known is not None:
            first: BaseException = known
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if isinstance(first, SaccadeError):
                return first
        log.error("%s: failed", self._id, exc_info=group)
        return internal_error()

    async def _refuse(self, send: Send, error: SaccadeError) -> None:
        if error.status > 500:  # a plain 500 has been logged with its cause
            log.warning("%s: %d %s", self._id, error.status, error.message)
        try:
            async with asyncio.timeout(ERROR_SECONDS):
                if not self._started:
                    await send_error(send, error, self._mark)
                    return
                if self._streaming:
                    last = event(body_of(error))
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                    return
        except TimeoutError:
            log.info("%s: the client does not read", self._id)
        if self._drop is not None:  # half an answer is on its way and cannot be taken back
            self._drop()

    # --- from the body to jobs -------------------------------------------------------------------------

    async def _prepare(self, salt: bytes) -> tuple[Terms, Generation]:
        """Nothing this gives holds on to the body: pictures on the wire are large."""
        service = self._service
        loop = asyncio.get_running_loop()
        large = len(self._data) > LARGE_BODY
        asked = await loop.run_in_executor(service.preparers, self._read) if large else self._read()
        body, params = asked.body, asked.params
        each = [RequestTiming(self._arrived, self._read_at) for _ in range(asked.prompts)]
        requests = await self._requests(asked, salt, each)
        head = Head(self._id, int(time.time()), body.model, service.fingerprint, body.include_usage)
        reply = ChatReply(head) if isinstance(body, ChatBody) else TextReply(head)
        jobs = [
            Job(request, service.front.output_processor(request, params), number * params.n, stages)
            for number, (request, stages) in enumerate(zip(requests, each, strict=True))
        ]
        terms = Terms(reply, bool(body.stream), body.include_usage, _light(body))
        self._generation = Generation(service, self._id, self._arrived, jobs)
        return terms, self._generation

    def _read(self) -> Asked:
        info = self._service.link.info
        body = read(
            self._kind,
            parse_json(self._data),
            max_choices=self._service.config.max_choices,
            vocab_size=info.vocab_size,
            context=info.max_model_len,
        )
        self._service.model_name(body.model)
        if body.user is not None:
            log.info("%s: for user %r", self._id, body.user)
        return Asked(body, sampling_of(body), has_media(body))

    async def _requests(self, asked: Asked, salt: bytes, stages: list[RequestTiming]) -> list[Request]:
        """The blocking work, one call per prompt; whoever stops waiting for it ends it."""
        service, cancel = self._service, CancelToken()
        pool = service.loaders if asked.media else service.preparers
        loop = asyncio.get_running_loop()
        calls = self._calls(asked.body, asked.params, salt, cancel, stages)
        if not asked.media and len(self._data) <= SMALL_BODY and len(calls) == 1:
            return [calls[0]()]
        waiting = [loop.run_in_executor(pool, call) for call in calls]
        try:
            return await asyncio.gather(*waiting)
        except BaseException:
            cancel.cancel()
            for one in waiting:
                one.cancel()
            raise

    def _calls(
        self,
        body: Body,
        params: SamplingParams,
        salt: bytes,
        cancel: CancelToken,
        stages: list[RequestTiming],
    ) -> list[Callable[[], Request]]:
        front = self._service.front
        if isinstance(body, ChatBody):
            return [partial(self._prepare_chat, body, params, salt, cancel, stages[0])]
        return [
            partial(
                front.prepare_prompt, prompt, params, f"{self._id}-{number}", salt, cancel=cancel, timing=one
            )
            for number, (prompt, one) in enumerate(zip(body.prompts, stages, strict=True))
        ]

    def _prepare_chat(
        self, body: ChatBody, params: SamplingParams, salt: bytes, cancel: CancelToken, stages: RequestTiming
    ) -> Request:
        messages: list[dict[str, Any]] = [one.model_dump(exclude_none=True) for one in body.messages]
        wishes = self._wishes(body)
        return self._prepared(
            self._service.front.prepare_chat(
                messages, params, self._id, salt, cancel=cancel, timing=stages, wishes=wishes
            )
        )

    def _wishes(self, body: ChatBody) -> Wishes:
        return wishes_of(body)

    def _prepared(self, request: Request) -> Request:
        """What is to be done with a request before the engine has it."""
        return request

    # --- from jobs to the wire -------------------------------------------------------------------------

    async def _generate(self, terms: Terms, generation: Generation, send: Send) -> None:
        try:
            if terms.stream:
                await self._stream(generation, terms, send)
            else:
                await generation.run(ignore)
                whole = await self._whole(generation, terms)
                timing = (b"server-timing", generation.stages.header(time.monotonic()))
                await send_json(send, 200, whole, [*_JSON, self._mark, timing])
        finally:
            generation.observe_end()

    async def _whole(self, generation: Generation, terms: Terms) -> bytes:
        write = partial(terms.reply.whole, generation.choices, generation.usage)
        if sum(choice.spelled for _, choice in generation.choices) <= LARGE_ANSWER:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self._service.preparers, write)

    async def _stream(self, generation: Generation, terms: Terms, send: Send) -> None:
        reply = terms.reply
        opened: set[int] = set()
        opening = asyncio.Lock()  # several prompts send at the same time

        async def take(index: int, piece: TextDelta) -> None:
            chunk = b""
            if index not in opened:
                opened.add(index)
                chunk = reply.opening(index)
            chunk += reply.piece(index, piece)
            if not self._streaming:
                async with opening:
                    await self._open(send, generation)
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})

        await generation.run(take)
        last = reply.usage(generation.usage) + DONE if terms.include_usage else DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _open(self, send: Send, generation: Generation) -> None:
        """The head goes out with the first token: the stages up to it are known by then."""
        if not self._streaming:
            head = [*_EVENTS, self._mark, (b"server-timing", generation.stages.header())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            self._streaming = True


def _light(body: Body) -> Body:
    """What was asked, without what was said: pictures on the wire are large."""
    return body.model_copy(update={"messages": []} if isinstance(body, ChatBody) else {"prompt": ""})


async def ignore(index: int, piece: TextDelta) -> None:
    """For whole answers: `Answer` keeps what it is given."""


async def _unless_gone(work: asyncio.Task[None], receive: Receive) -> None:
    """Waits for `work`; raises Disconnected, with `work` ended, when the client leaves first."""
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        left = not work.done()
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.wait({work, watch})
    if left:
        raise Disconnected
    work.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
