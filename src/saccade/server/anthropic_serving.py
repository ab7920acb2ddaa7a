"""Anthropic's messages and count_tokens: thin adapters over the request handler."""

import json
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Send

from saccade.errors import SaccadeError
from saccade.inputs.answer.events import AnswerEvent, ContentText, ReasoningText, ToolCallStart
from saccade.inputs.output_processor import CompletionOutput, TextDelta, Usage
from saccade.request import FinishReason
from saccade.sampling_params import SamplingParams
from saccade.server.anthropic_schema import CountTokensBody, MessagesBody, parse_messages
from saccade.server.conversation import Conversation, parse_conversation
from saccade.server.generation import Generation
from saccade.server.json_body import send_body
from saccade.server.request_handler import GenerationHandler, ParsedRequest, ResponseEncoder

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
SIGNATURE = "unsigned"  # thinking blocks sent back are not verified
_encode = msgspec.json.Encoder().encode


def anthropic_error(error: SaccadeError) -> bytes:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": error.message}})


class MessagesHandler(GenerationHandler):
    """POST /v1/messages"""

    id_prefix = "msg_"
    body_kind: type[CountTokensBody] = MessagesBody

    def encode_error(self, error: SaccadeError) -> bytes:
        return anthropic_error(error)

    def parse(self, data: object) -> ParsedRequest:
        body = parse_messages(self.body_kind, data, self.state.engine.info.max_model_len)
        whole = isinstance(body, MessagesBody)
        metadata = body.metadata if isinstance(body, MessagesBody) else None
        conversation = Conversation(
            model=body.model,
            messages=body.chat_messages,
            has_media=body.has_media,
            params=body.sampling_params() if isinstance(body, MessagesBody) else SamplingParams(max_tokens=1),
            stream=whole and bool(getattr(body, "stream", None)),
            tools=body.tool_options,
            template_variables=body.template_variables,
            user=metadata.user_id if metadata is not None else None,
        )
        encoder = MessagesEncoder(self.request_id, body.model, shows_thinking=body.shows_thinking)
        return parse_conversation(self.state, conversation, encoder)


class CountTokensHandler(MessagesHandler):
    """POST /v1/messages/count_tokens"""

    body_kind = CountTokensBody

    async def _respond(
        self, generation: Generation, encoder: ResponseEncoder, stream: bool, send: Send
    ) -> None:
        body = _encode({"input_tokens": generation.usage.prompt_tokens})
        headers = self._response_headers(generation, time.monotonic())
        await send_body(send, 200, body, [(b"content-type", b"application/json"), *headers])


class MessagesEncoder(ResponseEncoder):
    """One message as content blocks. Thinking is left out unless the request asks for it."""

    def __init__(self, request_id: str, model: str, *, shows_thinking: bool) -> None:
        self._head = {"id": request_id, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._block: tuple[int, str] | None = None  # number and type of the open block
        self._blocks = 0
        self._called = False
        self._stop: tuple[FinishReason | None, str | None] = (None, None)

    # --- stream ----------------------------------------------------------------------------------------

    def start(self, usage: Usage) -> bytes:
        message: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = _usage(usage, output_tokens=0)
        return _event("message_start", message=message) + _event("ping")

    def chunk(self, index: int, piece: TextDelta) -> bytes:
        events = b"".join(self._events(event) for event in piece.parts if self._shown(event))
        if piece.finish is not None:
            self._stop = (piece.finish, piece.stop)
        return events

    def end(self, usage: Usage) -> bytes:
        reason, sequence = self._stop
        delta = {"stop_reason": _stop_reason(reason, sequence, self._called), "stop_sequence": sequence}
        last = _event("message_delta", delta=delta, usage=_usage(usage))
        return self._close() + last + _event("message_stop")

    def error(self, error: SaccadeError) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_error(error)

    def _shown(self, event: AnswerEvent) -> bool:
        return self._shows_thinking or not isinstance(event, ReasoningText)

    def _events(self, event: AnswerEvent) -> bytes:
        if isinstance(event, ToolCallStart):
            self._called = True
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            return self._close() + self._open("tool_use", block)
        if isinstance(event, ReasoningText):
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            return self._delta("thinking", empty, type="thinking_delta", thinking=event.text)
        if isinstance(event, ContentText):
            return self._delta("text", {"type": "text", "text": ""}, type="text_delta", text=event.text)
        return self._delta("tool_use", {}, type="input_json_delta", partial_json=event.text)

    def _delta(self, kind: str, empty: dict[str, Any], **delta: str) -> bytes:
        opening = b""
        if self._block is None or self._block[1] != kind:
            opening = self._close() + self._open(kind, empty)
        return opening + _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        self._block = (self._blocks, kind)
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _close(self) -> bytes:
        if self._block is None:
            return b""
        (number, kind), self._block = self._block, None
        signed = b""
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=number, delta=delta)
        return signed + _event("content_block_stop", index=number)

    # --- whole -----------------------------------------------------------------------------------------

    def full(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes:
        ((_, choice),) = choices
        blocks = _content_blocks([event for event in choice.parts if self._shown(event)])
        called = any(block["type"] == "tool_use" for block in blocks)
        message: dict[str, Any] = {**self._head, "content": blocks}
        message["stop_reason"] = _stop_reason(choice.finish_reason, choice.stop, called)
        message["stop_sequence"] = choice.stop
        return _encode({**message, "usage": _usage(usage)})


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _content_blocks(events: Iterable[AnswerEvent]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        last: dict[str, Any] = blocks[-1] if blocks else {"type": None}
        if isinstance(event, ReasoningText):
            if last["type"] != "thinking":
                blocks.append({"type": "thinking", "thinking": "", "signature": SIGNATURE})
            blocks[-1]["thinking"] += event.text
        elif isinstance(event, ContentText):
            if last["type"] != "text":
                blocks.append({"type": "text", "text": ""})
            blocks[-1]["text"] += event.text
        elif isinstance(event, ToolCallStart):
            blocks.append({"type": "tool_use", "id": event.id, "name": event.name, "input": ""})
        else:
            last["input"] += event.text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _parse_input(block["input"])
    return blocks


def _parse_input(text: str) -> dict[str, Any]:
    """The arguments as an object; what is incomplete stays as text in it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"incomplete_json": text} if text else {}


def _stop_reason(finish: FinishReason | None, sequence: str | None, called: bool) -> str:
    if finish == "length":
        return "max_tokens"
    if sequence is not None:
        return "stop_sequence"
    return "tool_use" if called else "end_turn"


def _usage(usage: Usage, output_tokens: int | None = None) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens if output_tokens is None else output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
