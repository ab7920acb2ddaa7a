"""The checkpoint's tokenizer, in two readings: one parses control tokens, one treats them as plain text.

A control token is an added token marked special, or one the checkpoint uses to begin, end or mark media.
Other added tokens (such as tags a model writes in its answers) are ordinary vocabulary.
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
    """Thread-safe: the two tokenizers never change, and cached values do not depend on the thread."""

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
        self._spellings: dict[int, tuple[str, bytes]] = {}  # caches, bounded by the vocabulary
        self._decoded: dict[int, bytes] = {}
        self._control_ids = frozenset(self.control.values())
        self.vocab_size = max(self._trusted.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> "Tokenizer":
        if checkpoint.tokenizer_file is None:
            raise CheckpointError(
                f"{checkpoint.name} has no tokenizer.json; save the tokenizer in that format"
            )
        ids = (
            checkpoint.image_token_id,
            checkpoint.video_token_id,
            checkpoint.vision_start_id,
            checkpoint.vision_end_id,
            checkpoint.bos_id,
            *checkpoint.eos_ids,
        )
        source = Path(checkpoint.tokenizer_file).read_text(encoding="utf-8")
        return cls(source, [one for one in ids if one is not None])

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Trusted text: control tokens are parsed. `add_special_tokens` adds the usual prefix and suffix."""
        return _encode(self._trusted, text, add_special_tokens)

    def encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Untrusted text: control tokens in it are encoded as ordinary text."""
        ids = _encode(self._plain, text, False)
        if any((self.token(index) or "") in text for index in self._control_ids.intersection(ids)):
            # The vocabulary has the control token as an ordinary word too. (The unknown token may also occur,
            # but then it is not in the text.)
            raise InvalidValue("The text contains a control token that this model cannot read as plain text.")
        prefix, suffix = self._prefix_and_suffix if add_special_tokens else ([], [])
        return [*prefix, *ids, *suffix]

    @cached_property
    def _prefix_and_suffix(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts around every text."""
        bare = self._trusted.encode("a", add_special_tokens=False).ids
        full = self._trusted.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    def split_control(self, text: str) -> list[str]:
        """Text, control token, text, control token, ..., text, split as the tokenizer splits."""
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
        """Most bytes of text that one token may encode.

        A normaliser may shorten the text first (composition makes at most one character of three).
        """
        longest = max(len(self.token_bytes(index)) for index in range(self.vocab_size))
        shortening = 1 if self._trusted.normalizer is None else 4
        return longest * shortening

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._trusted.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token(self, index: int) -> str | None:
        """The vocabulary's spelling of an id."""
        text: str | None = self._trusted.id_to_token(index)
        return text

    def id_of(self, token: str) -> int | None:
        index: int | None = self._trusted.token_to_id(token)
        return index

    def spelling(self, index: int) -> tuple[str, bytes]:
        """One token as text (U+FFFD where it is part of a character) and as bytes; cached."""
        found = self._spellings.get(index)
        if found is None:
            spelled = self.token_bytes(index)
            found = self._spellings[index] = (spelled.decode(errors="replace"), spelled)
        return found

    def token_bytes(self, index: int) -> bytes:
        """The bytes one token decodes to, which may be part of a character."""
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

    def joined_bytes(
        self, ids: Sequence[int], *, skip_special: bool, kept_ids: frozenset[int] = frozenset()
    ) -> bytes:
        """The bytes that a byte-level decoder makes of ids; their text is these bytes as UTF-8."""
        known, special = self._decoded, self._special_ids if skip_special else ()
        parts = []
        for index in ids:
            if index in special and index not in kept_ids:
                continue
            part = known.get(index)
            if part is None:
                part = known[index] = self.decoded_bytes(index)
            parts.append(part)
        return b"".join(parts)

    def decoded_bytes(self, index: int) -> bytes:
        spelling = self.token(index)
        if spelling is None:
            return b""
        if _BYTE_CHARACTERS.issuperset(spelling):
            return spelling.translate(_BYTES).encode("latin-1")
        return spelling.encode()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out with `skip_special`."""
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
    """The tokenizer with those ids marked special, so that `encode_special_tokens` applies to them."""
    value: dict[str, Any] = json.loads(source)
    for token in value.get("added_tokens", []):
        if token["id"] in control_ids:
            token["special"] = True
    return json.dumps(value)


def _encode(tokenizer: HFTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("The text contains half of a surrogate pair, which is not a character.") from error
    # Only the batch methods release the GIL.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _byte_characters() -> dict[str, int]:
    """Byte-level vocabularies write a byte as one character: itself if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    characters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return characters


_BYTE_CHARACTERS = frozenset(_byte_characters())
_BYTES = str.maketrans({character: chr(byte) for character, byte in _byte_characters().items()})
