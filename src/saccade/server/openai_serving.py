"""OpenAI's chat completions and completions: from request body to engine request, from output to response."""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from saccade.errors import SaccadeError
from saccade.inputs.answer.events import AnswerEvent, ContentText, ReasoningText, ToolCallStart
from saccade.inputs.output_processor import CompletionOutput, DecodedLogprobs, TextDelta, Usage
from saccade.lod.detail import DetailRequest
from saccade.request import FinishReason
from saccade.server.conversation import Conversation, parse_conversation
from saccade.server.json_body import StrictModel, error_body
from saccade.server.message_schema import TextPart
from saccade.server.openai_schema import BodyType, ChatBody, CompletionBody, parse_body
from saccade.server.request_handler import GenerationHandler, ParsedRequest, ResponseEncoder

LOGPROBS_SLICE = 64  # tokens encoded at once; other threads wait for the interpreter meanwhile
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's value for an impossible token
_EVENT = b"data: %b\n\n"  # one server-sent event
_encode = msgspec.json.Encoder().encode


class OpenAIHandler(GenerationHandler):
    def _parse_body(self, kind: type[BodyType], data: object) -> BodyType:
        info, config = self.state.engine.info, self.state.config
        return parse_body(
            kind,
            data,
            max_choices=config.max_choices,
            vocab_size=info.vocab_size,
            context=info.max_model_len,
        )


class ChatHandler(OpenAIHandler):
    """POST /v1/chat/completions"""

    id_prefix = "chatcmpl-"

    def parse(self, data: object) -> ParsedRequest:
        return self._parsed_chat(self._parse_body(ChatBody, data))

    def _parsed_chat(self, body: ChatBody, *, preview_only: bool = False) -> ParsedRequest:
        contents = [one.content for one in body.messages if isinstance(one.content, list)]
        conversation = Conversation(
            model=body.model,
            messages=lambda: [message_dict(one) for one in body.messages],
            has_media=any(not isinstance(part, TextPart) for parts in contents for part in parts),
            params=body.sampling_params(),
            stream=bool(body.stream),
            tools=body.tool_options,
            template_variables=body.template_variables,
            detail_req=DetailRequest(
                lod=body.lod, visual_tokens=body.visual_tokens, preview_only=preview_only
            ),
            user=body.user,
        )
        encoder = ChatEncoder(self.request_id, self.state.fingerprint, body.model, body.include_usage)
        return parse_conversation(self.state, conversation, encoder)


def message_dict(message: StrictModel) -> dict[str, Any]:
    """A message as chat templates take it: reasoning under both its names."""
    plain = message.model_dump(exclude_none=True)
    reasoning = plain.get("reasoning_content", plain.get("reasoning"))
    return plain if reasoning is None else {**plain, "reasoning_content": reasoning, "reasoning": reasoning}


class CompletionHandler(OpenAIHandler):
    """POST /v1/completions"""

    id_prefix = "cmpl-"

    def parse(self, data: object) -> ParsedRequest:
        body = self._parse_body(CompletionBody, data)
        params = body.sampling_params()
        head = (self.request_id, self.state.fingerprint, body.model)
        return ParsedRequest(
            model=body.model,
            params=params,
            prompts=[partial(self.state.processor.prepare_prompt, prompt, params) for prompt in body.prompts],
            has_media=False,
            stream=bool(body.stream),
            encoder=CompletionEncoder(*head, body.include_usage),
            user=body.user,
        )


# --- response bodies ------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    visual_tokens: int
    full_visual_tokens: int  # the images' tokens at full detail


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageImage(msgspec.Struct):
    hash: str | None  # may be sent in place of the image; null if its features are not cached


class ResponseUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    images: list[UsageImage] | UnsetType = UNSET  # of the prompt, in order; absent without images


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: msgspec.Raw  # an encoded list[ContentLogprob]
    refusal: None = None


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same text under both names that clients know
    reasoning: str | UnsetType = UNSET
    tool_calls: "list[ToolCallChunk] | UnsetType" = UNSET


class FunctionChunk(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(msgspec.Struct):
    """A tool call or, in a stream, what it adds: first id and name, then pieces of the arguments."""

    function: FunctionChunk
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ResponseMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


Choices = Sequence[ChatChunkChoice] | Sequence[ChatChoice] | Sequence[CompletionChoice]


class ResponseBody(msgspec.Struct):
    """A full response or a chunk. With include_usage, `usage` is null in all chunks but the last."""

    id: str
    object: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str
    choices: Choices
    usage: ResponseUsage | UnsetType | None = UNSET


# --- encoders -------------------------------------------------------------------------------------------


class OpenAIEncoder(ResponseEncoder):
    chunk_object: str

    def __init__(self, request_id: str, fingerprint: str, model: str, include_usage: bool = False) -> None:
        self._head = (request_id, int(time.time()), model, fingerprint)
        self._include_usage = include_usage

    def _body(self, kind: str, choices: Choices, usage: Usage | UnsetType | None = UNSET) -> bytes:
        request_id, created, model, fingerprint = self._head
        body = ResponseBody(request_id, kind, created, model, fingerprint, choices)
        body.usage = _response_usage(usage) if isinstance(usage, Usage) else usage
        return _encode(body)

    def _chunk_event(self, choices: Choices) -> bytes:
        return _EVENT % self._body(self.chunk_object, choices, None if self._include_usage else UNSET)

    def start(self, usage: Usage) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        no_choices: list[ChatChunkChoice] = []
        last = _EVENT % self._body(self.chunk_object, no_choices, usage) if self._include_usage else b""
        return last + _EVENT % b"[DONE]"

    def error(self, error: SaccadeError) -> bytes:
        return _EVENT % error_body(error)


class ChatEncoder(OpenAIEncoder):
    chunk_object = "chat.completion.chunk"

    def __init__(self, request_id: str, fingerprint: str, model: str, include_usage: bool = False) -> None:
        super().__init__(request_id, fingerprint, model, include_usage)
        self._opened: set[int] = set()  # choices whose role has been sent
        self._called: set[int] = set()  # choices with tool calls

    def chunk(self, index: int, piece: TextDelta) -> bytes:
        chunks = b""
        if index not in self._opened:
            self._opened.add(index)
            chunks = self._chunk_event([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])
        logprobs = _chat_logprobs(piece.logprobs)
        deltas = [ChatDelta(content=piece.text)] if piece.text or piece.logprobs else []
        if piece.events is not None:
            deltas = [_chat_delta(event) for event in piece.events]
            if any(isinstance(event, ToolCallStart) for event in piece.events):
                self._called.add(index)
            if logprobs is not None and not deltas:  # the text is held back
                deltas = [ChatDelta(content="")]
        for delta in deltas:
            chunks += self._chunk_event([ChatChunkChoice(index, delta, logprobs)])
            logprobs = None
        if piece.finish is not None:
            finish = _finish(piece.finish, index in self._called)
            chunks += self._chunk_event([ChatChunkChoice(index, ChatDelta(), None, finish)])
        return chunks

    def full(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes:
        encoded = [
            ChatChoice(
                index,
                _response_message(choice),
                _chat_logprobs(choice.logprobs),
                _finish(choice.finish_reason, bool(choice.answer.tool_calls)),
            )
            for index, choice in choices
        ]
        return self._body("chat.completion", encoded, usage)


def _finish(reason: FinishReason | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def _chat_delta(event: AnswerEvent) -> ChatDelta:
    if isinstance(event, ContentText):
        return ChatDelta(content=event.text)
    if isinstance(event, ReasoningText):
        return ChatDelta(reasoning_content=event.text, reasoning=event.text)
    if isinstance(event, ToolCallStart):
        call = ToolCallChunk(FunctionChunk(event.name, ""), event.index, event.id, "function")
    else:
        call = ToolCallChunk(FunctionChunk(arguments=event.text), event.index)
    return ChatDelta(tool_calls=[call])


def _response_message(choice: CompletionOutput) -> ResponseMessage:
    answer = choice.answer
    message = ResponseMessage("assistant", answer.content or (None if answer.tool_calls else ""))
    if answer.reasoning:
        message.reasoning_content = message.reasoning = answer.reasoning
    if answer.tool_calls:
        message.tool_calls = [
            ToolCallChunk(FunctionChunk(call.name, call.arguments), id=call.id, type="function")
            for call in answer.tool_calls
        ]
    return message


class CompletionEncoder(OpenAIEncoder):
    chunk_object = "text_completion"

    def __init__(self, request_id: str, fingerprint: str, model: str, include_usage: bool = False) -> None:
        super().__init__(request_id, fingerprint, model, include_usage)
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    def chunk(self, index: int, piece: TextDelta) -> bytes:
        if not (piece.text or piece.logprobs or piece.finish):
            return b""
        logprobs = self._logprobs(index, piece.logprobs)
        return self._chunk_event([CompletionChoice(index, piece.text, logprobs, piece.finish)])

    def full(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes:
        encoded = [
            CompletionChoice(index, choice.text, self._logprobs(index, choice.logprobs), choice.finish_reason)
            for index, choice in choices
        ]
        return self._body("text_completion", encoded, usage)

    def _logprobs(self, index: int, tokens: Sequence[DecodedLogprobs]) -> CompletionLogprobs | None:
        if not tokens:
            return None
        offset = self._offsets.get(index, 0)
        result = CompletionLogprobs([], [], [], [])
        for token in tokens:
            result.tokens.append(token.sampled.text)
            result.token_logprobs.append(max(token.sampled.logprob, LOWEST_LOGPROB))
            # Several ids may have the same text (parts of characters): the most likely one is reported.
            best: dict[str, float] = {}
            for one in (*token.top, token.sampled):
                best[one.text] = max(one.logprob, best.get(one.text, LOWEST_LOGPROB))
            result.top_logprobs.append(best)
            result.text_offset.append(offset)
            offset += len(token.sampled.text)
        self._offsets[index] = offset
        return result


def _response_usage(usage: Usage) -> ResponseUsage:
    details = PromptTokensDetails(usage.cached_tokens, usage.visual_tokens, usage.full_visual_tokens)
    images = [UsageImage(name) for name in usage.images] or UNSET
    completion = CompletionTokensDetails(usage.reasoning_tokens)
    return ResponseUsage(
        usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, details, completion, images
    )


def _chat_logprobs(tokens: Sequence[DecodedLogprobs]) -> ChatLogprobs | None:
    if not tokens:
        return None
    slices = (tokens[start : start + LOGPROBS_SLICE] for start in range(0, len(tokens), LOGPROBS_SLICE))
    encoded = b",".join(_encode([_content_logprob(token) for token in part])[1:-1] for part in slices)
    return ChatLogprobs(msgspec.Raw(b"[" + encoded + b"]"))


def _content_logprob(token: DecodedLogprobs) -> ContentLogprob:
    sampled = token.sampled
    top = [TopLogprob(one.text, max(one.logprob, LOWEST_LOGPROB), list(one.bytes)) for one in token.top]
    return ContentLogprob(sampled.text, max(sampled.logprob, LOWEST_LOGPROB), list(sampled.bytes), top)
