"""Token ids to text, in increments, ending at stop strings.

takes   token ids as they come, any number at a time
gives   text that is final: never half a character, never the beginning of what may become a stop string
owns    what is held back

The pieces joined are the decoding of all ids at once, cut at the stop string that is *complete* first (of two
complete at the same letter, the longer), so the answer does not depend on how the ids were grouped.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

import msgspec

from saccade.errors import InvalidValue
from saccade.inputs.tokenizer import Tokenizer


class DecodedText(msgspec.Struct, frozen=True, gc=False):
    text: str
    tokens_used: int  # of the ids pushed; fewer than all when a stop string ended the text among them
    stopped: bool  # a stop string was reached; nothing more will come


class _Decoder(Protocol):
    def feed(self, *tokens: int) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """For vocabularies of bytes: constant work per token."""

    def __init__(self, tokens: Tokenizer, skip_special: bool) -> None:
        self._tokens = tokens
        self._skip = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, *tokens: int) -> str:
        return self._utf8.decode(self._tokens.joined_bytes(tokens, skip_special=self._skip))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For any other vocabulary: decodes a window of recent ids and gives what is new in it.

    The window begins at ids already given, so that a decoder that treats the first token differently does
    so on both sides of the difference.
    """

    def __init__(self, tokens: Tokenizer, skip_special: bool) -> None:
        self._tokens = tokens
        self._skip = skip_special
        self._ids: list[int] = []
        self._given = 0  # how many of the window's ids have been given as text
        self._text = ""  # decoding of those

    def feed(self, *tokens: int) -> str:
        return "".join([self._feed(token) for token in tokens])

    def _feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokens.decode(self._ids, skip_special=self._skip)
        if text.endswith("\ufffd") or len(text) <= len(self._text):
            return ""  # half a character, or nothing visible yet
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._tokens.decode(self._ids, skip_special=self._skip))

    def _give(self, text: str) -> str:
        new = text[len(self._text) :]
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        self._text = self._tokens.decode(self._ids, skip_special=self._skip)
        return new


class Detokenizer:
    """The text of one choice, growing."""

    def __init__(
        self,
        tokens: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        if any(not one for one in stop):
            raise InvalidValue("A stop string is empty; remove it.", param="stop")
        decoder = _ByteDecoder if tokens.byte_level else _WindowDecoder
        self._decoder: _Decoder = decoder(tokens, skip_special)
        self._stop = tuple(stop)
        self._include = include_stop
        self._unchecked = min_tokens  # tokens whose text is given without looking for stop strings
        self._held = ""
        self.stopped = False
        self.stop_found: str | None = None

    def push(self, token_ids: Sequence[int]) -> DecodedText:
        """Takes the next ids; after a stop string everything is ignored."""
        if self.stopped:
            return DecodedText("", 0, True)
        if not self._stop:
            return DecodedText(self._decoder.feed(*token_ids), len(token_ids), False)
        given = []
        for place, token in enumerate(token_ids):
            self._held += self._decoder.feed(token)
            if self._unchecked > 0:
                self._unchecked -= 1
                given.append(self._take(len(self._held)))
                continue
            if self._cut():
                given.append(self._take(len(self._held)))
                return DecodedText("".join(given), place + 1, True)
            given.append(self._take(len(self._held) - self._pending()))
        return DecodedText("".join(given), len(token_ids), False)

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        self._held += self._decoder.flush()
        self._cut()
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _cut(self) -> bool:
        """Ends the held text at the first complete stop string, if there is one."""
        found = [(start + len(one), start, one) for one in self._stop if (start := self._held.find(one)) >= 0]
        if not found:
            return False
        end, start, self.stop_found = min(found)
        self._held = self._held[: end if self._include else start]
        self.stopped = True
        return True

    def _pending(self) -> int:
        """Letters at the end that may be the beginning of a stop string."""
        longest = 0
        for one in self._stop:
            most = min(len(one) - 1, len(self._held))
            longest = max(longest, next((n for n in range(most, 0, -1) if self._held.endswith(one[:n])), 0))
        return longest
