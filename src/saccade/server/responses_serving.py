"""OpenAI's responses: a thin adapter over the request handler. Nothing is stored."""

import time
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from saccade.errors import SaccadeError
from saccade.inputs.answer.events import AnswerEvent, ContentText, ReasoningText, ToolCallStart
from saccade.inputs.output_processor import CompletionOutput, TextDelta, Usage
from saccade.request import FinishReason
from saccade.server.conversation import Conversation, parse_conversation
from saccade.server.request_handler import GenerationHandler, ParsedRequest, ResponseEncoder
from saccade.server.responses_schema import ReasoningOptions, ResponsesBody, parse_response_body

_encode = msgspec.json.Encoder().encode


class ResponsesHandler(GenerationHandler):
    """POST /v1/responses"""

    id_prefix = "resp_"

    def parse(self, data: object) -> ParsedRequest:
        body = parse_response_body(data, self.state.engine.info.max_model_len)
        conversation = Conversation(
            model=body.model,
            messages=body.chat_messages,
            has_media=body.has_media,
            params=body.sampling_params(),
            stream=bool(body.stream),
            tools=body.tool_options,
            template_variables=body.template_variables,
            user=body.user,
        )
        return parse_conversation(self.state, conversation, ResponsesEncoder(self.request_id, body))


def _response_head(request_id: str, body: ResponsesBody) -> dict[str, Any]:
    """The fields that repeat the request. Those without a value here are null."""
    reasoning = body.reasoning or ReasoningOptions()
    choice = body.tool_choice or "auto"
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": reasoning.model_dump(),
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [one.model_dump() for one in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class OutputItems:
    """The output of a response: one item per stretch of reasoning, text or call."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def add(self, event: AnswerEvent) -> bool:
        """Adds an event; whether it begins a new item."""
        kind = _item_type(event)
        begins = not self.items or self.items[-1]["type"] != kind or isinstance(event, ToolCallStart)
        if begins:
            self.items.append(_new_item(kind, event))
        item = self.items[-1]
        if isinstance(event, ContentText | ReasoningText):
            item["content"][0]["text"] += event.text
        elif not isinstance(event, ToolCallStart):
            item["arguments"] += event.text
        return begins

    def complete(self, status: str = "completed") -> dict[str, Any]:
        """Marks the last item as complete."""
        item = self.items[-1]
        item["status"] = status
        return item


def _item_type(event: AnswerEvent) -> str:
    if isinstance(event, ContentText):
        return "message"
    return "reasoning" if isinstance(event, ReasoningText) else "function_call"


def _new_item(kind: str, event: AnswerEvent) -> dict[str, Any]:
    item: dict[str, Any] = {"type": kind, "status": "in_progress"}
    if kind == "message":
        content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        return {**item, "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": content}
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": ""}]
        return {**item, "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": content}
    item |= {"id": f"fc_{uuid.uuid4().hex}", "arguments": ""}
    return {**item, "call_id": event.id, "name": event.name} if isinstance(event, ToolCallStart) else item


class ResponsesEncoder(ResponseEncoder):
    def __init__(self, request_id: str, body: ResponsesBody) -> None:
        self._head = _response_head(request_id, body)
        self._output = OutputItems()
        self._sequence = 0
        self._open = False  # the last item
        self._finish: FinishReason | None = None

    # --- stream ----------------------------------------------------------------------------------------

    def start(self, usage: Usage) -> bytes:
        response = self._response("in_progress", None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def chunk(self, index: int, piece: TextDelta) -> bytes:
        self._finish = piece.finish
        return b"".join([self._add(event) for event in piece.parts])

    def end(self, usage: Usage) -> bytes:
        status = _status(self._finish)
        closing = self._close(status)
        return closing + self._event(f"response.{status}", response=self._response(status, usage))

    def error(self, error: SaccadeError) -> bytes:
        response = self._response("failed", None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(value))

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        item = self._output.items[-1]
        place = {"item_id": item["id"], "output_index": len(self._output.items) - 1}
        if item["type"] != "function_call":
            place["content_index"] = 0
        return self._event(f"response.{kind}", **place, **fields)

    def _add(self, event: AnswerEvent) -> bytes:
        last = self._output.items[-1]["type"] if self._output.items else None
        begins = last != _item_type(event) or isinstance(event, ToolCallStart)
        events = self._close("completed") if begins else b""
        self._output.add(event)
        if begins:
            events += self._open_item()
        if isinstance(event, ContentText):
            events += self._item_event("output_text.delta", delta=event.text, logprobs=[])
        elif isinstance(event, ReasoningText):
            events += self._item_event("reasoning_text.delta", delta=event.text)
        elif not isinstance(event, ToolCallStart):
            events += self._item_event("function_call_arguments.delta", delta=event.text)
        return events

    def _open_item(self) -> bytes:
        self._open = True
        item = self._output.items[-1]
        number = len(self._output.items) - 1
        if item["type"] == "function_call":
            empty = {**item, "arguments": ""}
            return self._event("response.output_item.added", output_index=number, item=empty)
        added = self._event("response.output_item.added", output_index=number, item={**item, "content": []})
        part = {**item["content"][0], "text": ""}
        return added + self._item_event("content_part.added", part=part)

    def _close(self, status: str) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item = self._output.complete(status)
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            events = self._item_event("function_call_arguments.done", name=name, arguments=arguments)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                events = self._item_event("output_text.done", text=part["text"], logprobs=[])
            else:
                events = self._item_event("reasoning_text.done", text=part["text"])
            events += self._item_event("content_part.done", part=part)
        number = len(self._output.items) - 1
        return events + self._event("response.output_item.done", output_index=number, item=item)

    # --- whole -----------------------------------------------------------------------------------------

    def full(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes:
        ((_, choice),) = choices
        status = _status(choice.finish_reason)
        for event in choice.parts:
            if self._output.add(event) and len(self._output.items) > 1:
                self._output.items[-2]["status"] = "completed"
        if self._output.items:
            self._output.complete(status)
        return _encode(self._response(status, usage))

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "output": self._output.items,
            "usage": None if usage is None else _usage(usage),
        }


def _status(finish: FinishReason | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "visual_tokens": usage.visual_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
