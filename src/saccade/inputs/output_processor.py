"""The engine's `Delta`s of one request, folded into text, finish reasons and usage.

takes   `Delta`s of one request, in the order they come
gives   `TextDelta`s for a stream; the whole `CompletionOutput`s and `Usage` for who wants them at the end
owns    one `Detokenizer` per choice

Streaming and not streaming read the same object, so they cannot differ. Who does not stream has the text
decoded some tokens at a time: with 256 answers at once, a step's tokens took 3 ms one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from saccade.inputs.detokenizer import Detokenizer
from saccade.inputs.tokenizer import Tokenizer
from saccade.request import Delta, FinishReason, Request, TokenLogprobs, ZoomResult

AT_A_TIME = 16  # tokens; all at the end would come when no step runs beside it any more


class DecodedLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token and its log-probability, spelled out."""

    id: int
    text: str  # with U+FFFD where it is only part of a character
    bytes: bytes
    logprob: float


class DecodedLogprobs(msgspec.Struct, frozen=True):
    """The sampled token, and the likeliest ones beside it."""

    sampled: DecodedLogprob
    top: tuple[DecodedLogprob, ...]  # best first


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What one delta added to one choice. `text` may be empty while text is held back."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[DecodedLogprobs, ...]  # one per token id when they were asked for, else none
    finish: FinishReason | None
    stop: str | None = None  # what ended it: the stop string; None for end tokens and lengths
    error: str | None = None
    code: str | None = None  # of the error


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int  # visual tokens included
    completion_tokens: int  # of all choices; tokens after a stop string not counted
    cached_tokens: int  # of the prompt, found in the prefix cache
    visual_tokens: int  # of the prompt
    full_visual_tokens: int = 0  # what its pictures and videos would have taken at full detail
    # Of each picture, in order: what may be sent in its place; None if its features are not kept.
    images: tuple[str | None, ...] = ()

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass
class CompletionOutput:
    """One choice as far as it has come."""

    index: int
    pieces: list[str] = field(default_factory=list)  # of the text; joined only when asked for
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[DecodedLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    @property
    def spelled(self) -> int:
        """Tokens there are to write down: its own, or with log-probabilities also the alternatives."""
        alternatives = len(self.logprobs[0].top) if self.logprobs else 0
        return len(self.token_ids) * (1 + alternatives)


class OutputProcessor:
    """All choices of one request.

    When `done` turns true no further delta changes anything. If `must_cancel` is true as well, a stop string
    ended the last choice and the engine is still generating: close its iterator, or cancel the request. (With
    n > 1, choices that a stop string ended early go on in the engine until all are done; what they produce is
    dropped and not counted.)
    """

    def __init__(
        self,
        request: Request,
        tokens: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        sampling = request.sampling
        self.choices = [CompletionOutput(index) for index in range(sampling.n)]
        self._streams = [
            Detokenizer(tokens, stop, include_stop, skip_special, sampling.min_tokens)
            for _ in range(sampling.n)
        ]
        self._unread = [0] * sampling.n  # of each choice: tokens behind its text, as `take` leaves them
        self._open = sampling.n  # choices that have not ended
        self._tokens = tokens
        self._include_stop = include_stop
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._want_logprobs = sampling.logprobs is not None
        self._one_by_one = bool(stop) or self._want_logprobs
        self.zoomed: ZoomResult | None = None  # the views chosen, where some could be
        self._prompt_tokens = request.length
        self._full_visual_tokens = request.full_detail_tokens
        self._visual_tokens = sum(media.view.tokens for media in request.media)
        self._cached_tokens = 0
        # Seen in full detail: a reference alone would else be asked for what nobody has computed.
        pictures = [item for item in request.media if item.name]
        self._names = {item.placeholder: item.name if item.full_grid is None else None for item in pictures}
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
        )

    def accumulate(self, delta: Delta) -> bool:
        """Takes the next delta, for who reads nothing before the answer is whole; gives whether it is now.
        Until a choice has ended its text lacks what was taken."""
        if self._one_by_one or delta.finish is not None:
            return self.push(delta) is not None and self.done
        self._note(delta)
        choice = self.choices[delta.index]
        if choice.finish_reason is None:
            choice.token_ids += delta.tokens
            self._unread[delta.index] += len(delta.tokens)
            if self._unread[delta.index] >= AT_A_TIME:
                choice.pieces.append(self._catch_up(delta.index))
        return False

    def push(self, delta: Delta) -> TextDelta | None:
        """Takes the next delta; None when its choice has already ended."""
        self._note(delta)
        choice = self.choices[delta.index]
        if choice.finish_reason is not None:
            return None
        piece = self._read(delta)
        if piece.text:
            choice.pieces.append(piece.text)
        choice.token_ids.extend(piece.token_ids)
        choice.logprobs.extend(piece.logprobs)
        choice.finish_reason = piece.finish
        choice.error = piece.error
        self._open -= piece.finish is not None
        return piece

    def _note(self, delta: Delta) -> None:
        """What a delta says of the request as a whole."""
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
        """The text of the tokens that were taken since."""
        unread, self._unread[index] = self._unread[index], 0
        return self._streams[index].push(self.choices[index].token_ids[-unread:]).text

    def _read(self, delta: Delta) -> TextDelta:
        stream = self._streams[delta.index]
        before = self._catch_up(delta.index) if self._unread[delta.index] else ""
        shown = delta.tokens
        if delta.finish == "stop" and shown and shown[-1] in self._stop_ids and not self._include_stop:
            shown = shown[:-1]  # the end token ends the text; it is not part of it
        piece = stream.push(shown)
        used = piece.tokens_used if piece.stopped else len(delta.tokens)
        text, finish = before + piece.text, delta.finish
        if not piece.stopped and finish is not None:
            text += stream.finish()
        if stream.stopped:
            finish = "stop"
        return TextDelta(
            index=delta.index,
            text=text,
            token_ids=delta.tokens[:used],
            logprobs=self._spell(delta.tokens[:used], delta.logprobs[:used]),
            finish=finish,
            stop=stream.stop_found,
            error=delta.error,
            code=delta.code,
        )

    def _spell(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[DecodedLogprobs, ...]:
        if not self._want_logprobs:
            return ()
        return tuple(
            DecodedLogprobs(
                sampled=self._token(index, at.sampled),
                top=tuple(self._token(other, value) for other, value in at.top),
            )
            for index, at in zip(ids, logprobs, strict=True)
        )

    def _token(self, index: int, logprob: float) -> DecodedLogprob:
        text, spelled = self._tokens.spelling(index)
        return DecodedLogprob(index, text, spelled, logprob)
