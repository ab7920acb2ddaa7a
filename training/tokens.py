"""Text to ids without the tokenizers library: the same result for ASCII text, several times faster for
short strings."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from .shape import FOLDER

_PIECE = re.compile(r" ?[A-Z]?[a-z]+|[\s\S]")
_DATA = json.loads((FOLDER / "tokenizer.json").read_text())
VOCAB: dict[str, int] = _DATA["model"]["vocab"]
SPECIAL: dict[str, int] = {token["content"]: token["id"] for token in _DATA["added_tokens"]}
IM_START, IM_END = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"]
VISION_START, VISION_END, IMAGE_PAD = (
    SPECIAL["<|vision_start|>"],
    SPECIAL["<|vision_end|>"],
    SPECIAL["<|image_pad|>"],
)


@lru_cache(maxsize=200_000)
def _piece(piece: str) -> tuple[int, ...]:
    mapped = piece.replace(" ", "\u0120").replace("\n", "\u010a")
    whole = VOCAB.get(mapped)
    return (whole,) if whole is not None else tuple(VOCAB[c] for c in mapped)


def encode(text: str) -> list[int]:
    """Ids of ASCII text."""
    return [i for piece in _PIECE.findall(text) for i in _piece(piece)]


START = [IM_START, *encode("user\n"), VISION_START]  # before the image
MIDDLE = [IM_END, *encode("\n"), IM_START, *encode("assistant\n")]  # between question and answer
_TEXT = {i: piece for piece, i in VOCAB.items()}


def decode(ids: list[int]) -> str:
    return "".join(_TEXT.get(i, "") for i in ids).replace("\u0120", " ").replace("\u010a", "\n")
