"""The `Delta`s of one request to text, finish reasons and usage, for streaming and complete answers alike."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from operator import add

import msgspec

from saccade.inputs.answer.answer_format import AnswerParser, AnswerPlan
from saccade.inputs.answer.events import AnswerEvent, ContentText, ParsedAnswer
from saccade.inputs.detokenizer import Detokenizer
from saccade.inputs.tokenizer import Tokenizer
from saccade.request import Delta, FinishReason, Request, ZoomResult

# Tokens detokenised at once for callers that do not stream: one by one, 256 sequences took 3 ms of every
# step; all at the end, the work would not overlap with steps.
TOKENS_AT_ONCE = 16


class DecodedLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token as text and bytes, with its log-probability."""

    id: int
    text: str  # with U+FFFD where it is only part of a character
    bytes: bytes
    logprob: float


class DecodedLogprobs(msgspec.Struct, frozen=True):
    """The sampled token and the most likely ones."""

    sampled: DecodedLogprob
    top: tuple[DecodedLogprob, ...]  # best first


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What one delta added to one sequence. `text` is empty while text is held back."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[DecodedLogprobs, ...]  # one per token id if requested, else empty
    finish: FinishReason | None
    stop: str | None = None  # the stop string that ended it
    error: str | None = None
    code: str | None = None  # of the error
    events: tuple[AnswerEvent, ...] | None = None  # reasoning, content, tool calls; None: not parsed

    @property
    def parts(self) -> tuple[AnswerEvent, ...]:
        if self.events is not None:
            return self.events
        return (ContentText(self.text),) if self.text else ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int  # visual tokens included
    completion_tokens: int  # of all sequences, without tokens after a stop string
    cached_tokens: int  # of the prompt, found in the prefix cache
    visual_tokens: int  # of the prompt
    full_visual_tokens: int = 0  # of the same images and videos at full detail
    # Of each image, in order: the reference to send in its place; None if its features are not cached.
    images: tuple[str | None, ...] = ()
    reasoning_tokens: int = 0  # of the completion

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*map(add, astuple(self), astuple(other)))


@dataclass
class CompletionOutput:
    """One sequence, complete or so far."""

    index: int
    pieces: list[str] = field(default_factory=list)  # of the text; joined when it is read
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[DecodedLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop: str | None = None  # the stop string that ended it
    events: list[AnswerEvent] | None = None  # None: not parsed

    @property
    def parts(self) -> list[AnswerEvent]:
        if self.events is not None:
            return self.events
        return [ContentText(self.text)] if self.text else []

    @property
    def answer(self) -> ParsedAnswer:
        return ParsedAnswer(content=self.text) if self.events is None else ParsedAnswer.join(self.events)

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    @property
    def spelled(self) -> int:
        """Tokens to serialise: its own, and with log-probabilities the alternatives."""
        alternatives = len(self.logprobs[0].top) if self.logprobs else 0
        return len(self.token_ids) * (1 + alternatives)


class OutputProcessor:
    """All sequences of one request.

    Once `done` is true, no delta changes anything. If `must_cancel` is true as well, a stop string ended the
    last sequence and the engine is still generating: cancel the request. With n > 1, a sequence that a stop
    string ended runs on in the engine until all are done; its further tokens are dropped.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        plan: AnswerPlan | None = None,
    ) -> None:
        """`plan` splits answers into reasoning, content and tool calls."""
        sampling = request.sampling
        self.choices = [CompletionOutput(index) for index in range(sampling.n)]
        self._detokenizers = [
            Detokenizer(
                tokenizer, stop, include_stop, skip_special, sampling.min_tokens, _kept(plan, tokenizer)
            )
            for _ in range(sampling.n)
        ]
        self._reasoning = plan.format.reasoning if plan is not None else None
        opened = self._reasoning is not None and self._reasoning.opened_by(request.prompt, tokenizer)
        self._reasoning_opened = opened
        self._parsers: list[AnswerParser | None] = [
            None if plan is None else plan.parser(opened) for _ in range(sampling.n)
        ]
        self._pending = [0] * sampling.n  # of each sequence: tokens not detokenised yet
        self._open = sampling.n  # sequences that have not ended
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._want_logprobs = sampling.logprobs is not None
        self._eager = bool(stop) or self._want_logprobs
        self.prompt = request.prompt
        self.zoomed: ZoomResult | None = None  # the views LOD chose
        self._prompt_tokens = request.length
        self._full_visual_tokens = request.full_detail_tokens
        self._visual_tokens = sum(media.view.tokens for media in request.media)
        self._cached_tokens = 0
        # A reference stands for full detail, so images at less have none.
        named = [item for item in request.media if item.name]
        self._names = {item.placeholder: item.name if item.full_grid is None else None for item in named}
        self._kept: frozenset[int] = frozenset()
        self._ended_by_engine = 0

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def must_cancel(self) -> bool:
        return self.done and self._ended_by_engine < len(self.choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
            cached_tokens=self._cached_tokens,
            visual_tokens=self._visual_tokens,
            full_visual_tokens=self._full_visual_tokens,
            images=tuple(name if slot in self._kept else None for slot, name in self._names.items()),
            reasoning_tokens=self._reasoning_tokens,
        )

    @property
    def _reasoning_tokens(self) -> int:
        if self._reasoning is None:
            return 0
        return sum(
            self._reasoning.count_tokens(choice.token_ids, self._tokenizer, self._reasoning_opened)
            for choice in self.choices
        )

    def accumulate(self, delta: Delta) -> bool:
        """Adds a delta for a caller that does not stream; returns whether all sequences have ended.

        The text of a sequence may lag behind its tokens until it has ended.
        """
        if self._eager or delta.finish is not None:
            return self.push(delta) is not None and self.done
        self._read_request(delta)
        choice = self.choices[delta.index]
        if choice.finish_reason is None:
            choice.token_ids += delta.tokens
            self._pending[delta.index] += len(delta.tokens)
            if self._pending[delta.index] >= TOKENS_AT_ONCE:
                choice.pieces.append(self._catch_up(delta.index))
        return False

    def push(self, delta: Delta) -> TextDelta | None:
        """Adds a delta; None if its sequence has already ended."""
        self._read_request(delta)
        choice = self.choices[delta.index]
        if choice.finish_reason is not None:
            return None
        piece = self._decode(delta)
        if piece.text:
            choice.pieces.append(piece.text)
        choice.token_ids.extend(piece.token_ids)
        choice.logprobs.extend(piece.logprobs)
        choice.finish_reason = piece.finish
        choice.error = piece.error
        choice.stop = piece.stop
        if piece.events is not None:
            choice.events = choice.events if choice.events is not None else []
            choice.events.extend(piece.events)
        self._open -= piece.finish is not None
        return piece

    def _read_request(self, delta: Delta) -> None:
        """Reads what a delta says about the whole request."""
        if delta.cached_tokens > self._cached_tokens:
            self._cached_tokens = delta.cached_tokens
        if delta.zoomed is not None and self.zoomed is None:
            self.zoomed = delta.zoomed
            self._prompt_tokens += delta.zoomed.more_tokens
            self._visual_tokens += delta.zoomed.visual_tokens
        if delta.kept:
            self._kept |= frozenset(delta.kept)
        if delta.finish is not None:
            self._ended_by_engine += 1

    def _catch_up(self, index: int) -> str:
        """The text of the pending tokens."""
        pending, self._pending[index] = self._pending[index], 0
        return self._detokenizers[index].push(self.choices[index].token_ids[-pending:]).text

    def _decode(self, delta: Delta) -> TextDelta:
        detokenizer = self._detokenizers[delta.index]
        before = self._catch_up(delta.index) if self._pending[delta.index] else ""
        shown = delta.tokens
        if delta.finish == "stop" and shown and shown[-1] in self._stop_ids and not self._include_stop:
            shown = shown[:-1]  # the end token is not part of the text
        piece = detokenizer.push(shown)
        used = piece.tokens_used if piece.stopped else len(delta.tokens)
        text, finish = before + piece.text, delta.finish
        if not piece.stopped and finish is not None:
            text += detokenizer.finish()
        if detokenizer.stopped:
            finish = "stop"
        parser = self._parsers[delta.index]
        events = None
        if parser is not None:
            events = tuple(parser.push(text) if finish is None else parser.finish(text))
        return TextDelta(
            index=delta.index,
            text=text,
            token_ids=delta.tokens[:used],
            logprobs=self._decode_logprobs(delta, used) if self._want_logprobs else (),
            finish=finish,
            stop=detokenizer.stop_found,
            error=delta.error,
            code=delta.code,
            events=events,
        )

    def _decode_logprobs(self, delta: Delta, count: int) -> tuple[DecodedLogprobs, ...]:
        return tuple(
            DecodedLogprobs(
                sampled=self._token(index, at.sampled),
                top=tuple(self._token(other, value) for other, value in at.top),
            )
            for index, at in zip(delta.tokens[:count], delta.logprobs[:count], strict=True)
        )

    def _token(self, index: int, logprob: float) -> DecodedLogprob:
        text, spelled = self._tokenizer.spelling(index)
        return DecodedLogprob(index, text, spelled, logprob)


def _kept(plan: AnswerPlan | None, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that stay in the text: the markers of reasoning and tool calls."""
    if plan is None:
        return frozenset()
    ids = (tokenizer.id_of(marker) for marker in plan.format.kept_markers(bool(plan.tools)))
    return frozenset(index for index in ids if index is not None)
