"""Token ids to text, incrementally, up to a stop string."""

import codecs
from collections.abc import Sequence
from typing import Protocol

import msgspec

from saccade.errors import InvalidValue
from saccade.inputs.tokenizer import Tokenizer


class DecodedText(msgspec.Struct, frozen=True, gc=False):
    text: str
    tokens_used: int  # of the ids pushed; fewer than all if a stop string ended the text
    stopped: bool  # by a stop string; later ids are ignored


class _Decoder(Protocol):
    def feed(self, *tokens: int) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """For byte-level vocabularies: constant work per token."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, kept_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._kept = kept_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, *tokens: int) -> str:
        return self._utf8.decode(
            self._tokenizer.joined_bytes(tokens, skip_special=self._skip, kept_ids=self._kept)
        )

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For other vocabularies: decodes a window of recent ids and returns what is new in it.

    The window begins with ids already returned, because decoders may treat the first token differently.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, kept_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._kept = kept_ids
        self._ids: list[int] = []
        self._returned = 0  # ids of the window that have been returned as text
        self._text = ""  # decoding of those

    def feed(self, *tokens: int) -> str:
        return "".join([self._feed(token) for token in tokens])

    def _feed(self, token: int) -> str:
        if token in self._kept:
            before = self.flush()
            self._ids, self._returned, self._text = [], 0, ""
            return before + (self._tokenizer.token(token) or "")
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special=self._skip)
        if text.endswith("\ufffd") or len(text) <= len(self._text):
            return ""  # part of a character, or nothing visible yet
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._tokenizer.decode(self._ids, skip_special=self._skip))

    def _advance(self, text: str) -> str:
        new = text[len(self._text) :]
        self._ids = self._ids[self._returned :]
        self._returned = len(self._ids)
        self._text = self._tokenizer.decode(self._ids, skip_special=self._skip)
        return new


class Detokenizer:
    """The text of one sequence, decoded incrementally up to a stop string.

    Text is final once it is returned: never part of a character, never the beginning of a possible stop
    string. It ends at the stop string that is complete first (of two complete at the same character, the
    longer), so it does not depend on how the ids were grouped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        if any(not one for one in stop):
            raise InvalidValue("A stop string is empty; remove it.", param="stop")
        decoder = _ByteDecoder if tokenizer.byte_level else _WindowDecoder
        self._decoder: _Decoder = decoder(tokenizer, skip_special, kept_ids)
        self._stop = tuple(stop)
        self._include = include_stop
        self._unchecked = min_tokens  # tokens that are not searched for stop strings
        self._held = ""
        self.stopped = False
        self.stop_found: str | None = None

    def push(self, token_ids: Sequence[int]) -> DecodedText:
        """Decodes the next ids; after a stop string they are ignored."""
        if self.stopped:
            return DecodedText("", 0, True)
        if not self._stop:
            return DecodedText(self._decoder.feed(*token_ids), len(token_ids), False)
        pieces = []
        for index, token in enumerate(token_ids):
            self._held += self._decoder.feed(token)
            if self._unchecked > 0:
                self._unchecked -= 1
                pieces.append(self._take(len(self._held)))
                continue
            if self._cut():
                pieces.append(self._take(len(self._held)))
                return DecodedText("".join(pieces), index + 1, True)
            pieces.append(self._take(len(self._held) - self._pending()))
        return DecodedText("".join(pieces), len(token_ids), False)

    def finish(self) -> str:
        """The text held back, when there are no more tokens."""
        if self.stopped:
            return ""
        self._held += self._decoder.flush()
        if self._stop:
            self._cut()
        text, self._held = self._held, ""
        return text

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _cut(self) -> bool:
        """Ends the held text at the first complete stop string and returns whether there is one."""
        found = [(start + len(one), start, one) for one in self._stop if (start := self._held.find(one)) >= 0]
        if not found:
            return False
        end, start, self.stop_found = min(found)
        self._held = self._held[: end if self._include else start]
        self.stopped = True
        return True

    def _pending(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for one in self._stop:
            most = min(len(one) - 1, len(self._held))
            longest = max(longest, next((n for n in range(most, 0, -1) if self._held.endswith(one[:n])), 0))
        return longest
