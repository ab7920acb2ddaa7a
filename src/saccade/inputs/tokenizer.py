"""The checkpoint's tokenizer: trusted text with its control tokens, anybody's text without them.

takes   tokenizer.json; which ids steer the model (ends, placeholders)
gives   ids, text, the bytes of a single token
owns    two readings of the same tokenizer: one parses control tokens, one treats them as plain text

A *control token* is an added token marked special, or one the checkpoint uses to begin, end or mark media.
Other added tokens (such as tags a model writes in its answers) are vocabulary for everybody.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from saccade.checkpoint import Checkpoint
from saccade.errors import CheckpointError, InvalidValue


class Tokenizer:
    """Thread-safe: the two tokenizers never change; what is remembered is the same whoever finds it."""

    def __init__(self, source: str, control_ids: Sequence[int] = ()) -> None:
        try:
            self._trusted = HFTokenizer.from_str(source)
            self._plain = HFTokenizer.from_str(_with_control(source, control_ids))
        except Exception as error:  # the library raises bare exceptions
            raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
        self._plain.encode_special_tokens = True
        for tokenizer in (self._trusted, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        extra = set(control_ids)
        self.control: dict[str, int] = {
            token.content: index
            for index, token in self._trusted.get_added_tokens_decoder().items()
            if token.special or index in extra
        }
        self._spellings: dict[int, tuple[str, bytes]] = {}  # as many as there are ids, at most
        self._decoded: dict[int, bytes] = {}  # the same
        self._control_ids = frozenset(self.control.values())
        self.vocab_size = max(self._trusted.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> "Tokenizer":
        if checkpoint.tokenizer_file is None:
            raise CheckpointError(
                f"{checkpoint.name} has no tokenizer.json; save the tokenizer in that format"
            )
        marks = (
            checkpoint.image_token_id,
            checkpoint.video_token_id,
            checkpoint.vision_start_id,
            checkpoint.vision_end_id,
            checkpoint.bos_id,
            *checkpoint.eos_ids,
        )
        source = Path(checkpoint.tokenizer_file).read_text(encoding="utf-8")
        return cls(source, [mark for mark in marks if mark is not None])

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Trusted text: control tokens are parsed. `add_special_tokens` lets the tokenizer frame the text."""
        return _encode(self._trusted, text, add_special_tokens)

    def encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Anybody's text: control tokens typed in it come out as the ids of their letters."""
        ids = _encode(self._plain, text, False)
        if any((self.token(index) or "") in text for index in self._control_ids.intersection(ids)):
            # A vocabulary that holds a control token as an ordinary word leaves no plain spelling of it.
            # (Letters it does not know may come out as its token for the unknown; that one was not typed.)
            raise InvalidValue("The text contains a control token that this model cannot read as plain text.")
        return self._framed(ids) if add_special_tokens else ids

    def _framed(self, ids: list[int]) -> list[int]:
        """What the tokenizer puts around a text, found by framing an empty one around it."""
        prefix, suffix = self._frame
        return [*prefix, *ids, *suffix]

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        bare = self._trusted.encode("a", add_special_tokens=False).ids
        full = self._trusted.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    def split_control(self, text: str) -> list[str]:
        """Text, control token, text, control token, ..., text; as the tokenizer itself would cut it."""
        return self._control_pattern.split(text)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        tokens = self._trusted.get_added_tokens_decoder()
        pieces = []
        for content in sorted(self.control, key=len, reverse=True):  # the longest match wins
            token = tokens[self.control[content]]
            word = r"\b" if token.single_word else ""
            left, right = (r"\s*" if token.lstrip else ""), (r"\s*" if token.rstrip else "")
            pieces.append(f"{left}{word}{re.escape(content)}{word}{right}")
        return re.compile(f"({'|'.join(pieces)})" if pieces else "((?!))")

    @cached_property
    def longest(self) -> int:
        """Bytes of text one token may stand for, at most.

        That of the longest word in the vocabulary, and a few times that where a normaliser may shorten the
        text first (composing characters makes at most one of three).
        """
        longest = max(len(self.token_bytes(index)) for index in range(self.vocab_size))
        shortening = 1 if self._trusted.normalizer is None else 4
        return longest * shortening

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._trusted.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token(self, index: int) -> str | None:
        """The vocabulary's own spelling of an id."""
        text: str | None = self._trusted.id_to_token(index)
        return text

    def is_control(self, index: int) -> bool:
        return index in self._control_ids

    def id_of(self, token: str) -> int | None:
        index: int | None = self._trusted.token_to_id(token)
        return index

    def spelling(self, index: int) -> tuple[str, bytes]:
        """One token as text (U+FFFD where it is part of a character) and as bytes; remembered."""
        found = self._spellings.get(index)
        if found is None:
            spelled = self.token_bytes(index)
            found = self._spellings[index] = (spelled.decode(errors="replace"), spelled)
        return found

    def token_bytes(self, index: int) -> bytes:
        """The bytes one token stands for; those of half a character where it is one."""
        spelling = self.token(index)
        if spelling is None:
            return b""
        if index in self._added_ids:
            return spelling.encode()
        if self.byte_level:
            return self.decoded_bytes(index)
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", spelling):
            return bytes([int(match[1], 16)])
        return spelling.replace("▁", " ").encode()

    def joined_bytes(self, ids: Sequence[int], *, skip_special: bool) -> bytes:
        """What a byte-level decoder makes of many ids; their text is the UTF-8 of it. Remembers each."""
        known, special = self._decoded, self._special_ids if skip_special else ()
        parts = []
        for index in ids:
            if index in special:
                continue
            part = known.get(index)
            if part is None:
                part = known[index] = self.decoded_bytes(index)
            parts.append(part)
        return b"".join(parts)

    def decoded_bytes(self, index: int) -> bytes:
        """Of one of them."""
        spelling = self.token(index)
        if spelling is None:
            return b""
        if _BYTE_LETTERS.issuperset(spelling):
            return spelling.translate(_BYTES).encode("latin-1")
        return spelling.encode()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Those that decoding leaves out when asked to skip special tokens."""
        tokens = self._trusted.get_added_tokens_decoder()
        return frozenset(index for index, token in tokens.items() if token.special)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._trusted.get_added_tokens_decoder())

    @cached_property
    def byte_level(self) -> bool:
        decoder = json.loads(self._trusted.to_str()).get("decoder") or {}
        kinds = [decoder.get("type"), *(one.get("type") for one in decoder.get("decoders", []))]
        return "ByteLevel" in kinds


def _with_control(source: str, control_ids: Sequence[int]) -> str:
    """The same tokenizer with those ids marked special, so that they can be switched off."""
    value: dict[str, Any] = json.loads(source)
    for token in value.get("added_tokens", []):
        if token["id"] in control_ids:
            token["special"] = True
    return json.dumps(value)


def _encode(tokenizer: HFTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # Of the ways to encode, only those for batches let other threads run meanwhile.
    ids: list[int] = tokenizer.encode_batch_fast([_valid(text)], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _valid(text: str) -> str:
    """Refuses lone surrogates, which are no characters and which the tokenizer cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("The text contains half of a surrogate pair, which is not a character.") from error
    return text


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write a byte as one letter: itself where printable, else from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in printable)
    letters.update({chr(256 + place): byte for place, byte in enumerate(moved)})
    return letters


_BYTE_LETTERS = frozenset(_byte_letters())
_BYTES = str.maketrans({letter: chr(byte) for letter, byte in _byte_letters().items()})
