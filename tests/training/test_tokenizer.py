"""The embedded tokenizer refuses nothing and reads codes and numbers character by character."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import saccade

FOLDER = Path(saccade.__file__).parent / "embedded"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_codes_and_numbers_are_single_characters() -> None:
    for text in ("K7Q2X", "12.50", "RT-4821"):
        assert len(TOKENIZER.encode(text).ids) == len(text)


def test_question_words_are_single_tokens() -> None:
    assert len(TOKENIZER.encode("What colour is the circle?").ids) == 6


def test_the_vision_tokens_are_there() -> None:
    for token in (
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ):
        assert len(TOKENIZER.encode(token).ids) == 1
