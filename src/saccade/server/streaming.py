"""What a client gets: OpenAI's response bodies, whole or in chunks.

takes   `TextDelta`s of a stream, or the finished `CompletionOutput`s; the usage
gives   bytes of JSON
never   decides anything: whole and streamed answers hold the same text, reasons and log-probabilities
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from saccade.inputs.output_processor import (
    CompletionOutput,
    DecodedLogprob,
    DecodedLogprobs,
    TextDelta,
    Usage,
)

SLICE = 64  # tokens' log-probabilities written at once: other threads stand still meanwhile
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in for "impossible"
_encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct):
    cached_tokens: int
    visual_tokens: int
    full_visual_tokens: int  # what full detail would have taken


class WireImage(msgspec.Struct):
    hash: str | None  # what may be sent in its place; null if its features are not kept


class WireUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    images: list[WireImage] | UnsetType = UNSET  # of the prompt, in order; absent without any


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: msgspec.Raw  # list[ContentLogprob], written
    refusal: None = None


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class Envelope(msgspec.Struct):
    """Every body, whole or chunk. `usage` is absent, null in chunks that precede it, or there."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChunkChoice] | Sequence[ChatChoice] | Sequence[TextChoice]
    usage: WireUsage | UnsetType | None = UNSET


class Head(msgspec.Struct, frozen=True):
    """What all bodies of one response share."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str
    usage_in_chunks: bool = False


class Reply(Protocol):
    """One response being written: as chunks (opening, piece..., usage) or at once (whole)."""

    def opening(self, index: int) -> bytes: ...
    def piece(self, index: int, piece: TextDelta) -> bytes: ...
    def usage(self, usage: Usage) -> bytes: ...
    def whole(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes: ...


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


DONE = event(b"[DONE]")


def _usage(usage: Usage) -> WireUsage:
    details = PromptDetails(usage.cached_tokens, usage.visual_tokens, usage.full_visual_tokens)
    images = [WireImage(name) for name in usage.images] or UNSET
    return WireUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, details, images)


class _Writer:
    chunk_object: str
    whole_object: str

    def __init__(self, head: Head) -> None:
        self._head = head

    def _chunk(self, choices: Sequence[ChatChunkChoice] | Sequence[TextChoice]) -> bytes:
        body = self._envelope(self.chunk_object, choices)
        if self._head.usage_in_chunks:
            body.usage = None
        return event(_encode(body))

    def _envelope(
        self, kind: str, choices: Sequence[ChatChunkChoice] | Sequence[ChatChoice] | Sequence[TextChoice]
    ) -> Envelope:
        head = self._head
        return Envelope(head.id, kind, head.created, head.model, head.fingerprint, choices)

    def usage(self, usage: Usage) -> bytes:
        none: list[TextChoice] = []
        body = self._envelope(self.chunk_object, none)
        body.usage = _usage(usage)
        return event(_encode(body))


class ChatReply(_Writer):
    """/v1/chat/completions"""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        return self._chunk([ChatChunkChoice(index, delta)])

    def piece(self, index: int, piece: TextDelta) -> bytes:
        chunks = b""
        if piece.text or piece.logprobs:
            delta = ChatDelta(content=piece.text)
            chunks = self._chunk([ChatChunkChoice(index, delta, _chat_logprobs(piece.logprobs))])
        if piece.finish is not None:
            chunks += self._chunk([ChatChunkChoice(index, ChatDelta(), None, piece.finish)])
        return chunks

    def whole(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes:
        body = self._envelope(
            self.whole_object,
            [
                ChatChoice(
                    index,
                    ChatMessage("assistant", choice.text),
                    _chat_logprobs(choice.logprobs),
                    choice.finish_reason,
                )
                for index, choice in choices
            ],
        )
        body.usage = _usage(usage)
        return _encode(body)


class TextReply(_Writer):
    """/v1/completions"""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    def opening(self, index: int) -> bytes:
        return b""

    def piece(self, index: int, piece: TextDelta) -> bytes:
        if not (piece.text or piece.logprobs or piece.finish):
            return b""
        return self._chunk(
            [TextChoice(index, piece.text, self._logprobs(index, piece.logprobs), piece.finish)]
        )

    def whole(self, choices: Iterable[tuple[int, CompletionOutput]], usage: Usage) -> bytes:
        body = self._envelope(
            self.whole_object,
            [
                TextChoice(index, choice.text, self._logprobs(index, choice.logprobs), choice.finish_reason)
                for index, choice in choices
            ],
        )
        body.usage = _usage(usage)
        return _encode(body)

    def _logprobs(self, index: int, tokens: Sequence[DecodedLogprobs]) -> TextLogprobs | None:
        if not tokens:
            return None
        at = self._offsets.get(index, 0)
        result = TextLogprobs([], [], [], [])
        for token in tokens:
            result.tokens.append(token.sampled.text)
            result.token_logprobs.append(_finite(token.sampled.logprob))
            # Several ids may be spelled alike (halves of characters): the likeliest speaks for them.
            best: dict[str, float] = {}
            for one in (*token.top, token.sampled):
                best[one.text] = max(_finite(one.logprob), best.get(one.text, LOWEST_LOGPROB))
            result.top_logprobs.append(best)
            result.text_offset.append(at)
            at += len(token.sampled.text)
        self._offsets[index] = at
        return result


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _spelled(token: DecodedLogprob) -> TokenLogprob:
    return TokenLogprob(token.text, _finite(token.logprob), list(token.bytes))


def _chat_logprobs(tokens: Sequence[DecodedLogprobs]) -> ChatLogprobs | None:
    if not tokens:
        return None
    slices = (tokens[place : place + SLICE] for place in range(0, len(tokens), SLICE))
    written = b",".join(_encode([_content(one) for one in part])[1:-1] for part in slices)
    return ChatLogprobs(msgspec.Raw(b"[" + written + b"]"))


def _content(one: DecodedLogprobs) -> ContentLogprob:
    sampled = one.sampled
    others = [_spelled(other) for other in one.top]
    return ContentLogprob(sampled.text, _finite(sampled.logprob), list(sampled.bytes), others)
