"""The tokenizer: control tokens for the trusted, letters for everybody else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import CheckpointError, InvalidValue
from saccade.text.tokens import Tokens
from tests.text.tiny import ORDINARY, SPECIAL, token_id, tokenizer_json, tokens

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("token", SPECIAL)
def test_trusted_text_parses_control_tokens_and_plain_text_does_not(token: str) -> None:
    text = f"a {token} b"
    assert token_id(token) in tokens().encode(text)
    plain = tokens().encode_plain(text)
    assert not any(tokens().is_control(index) for index in plain)
    assert tokens().decode(plain) == text


@pytest.mark.parametrize("token", ORDINARY)
def test_added_tokens_that_are_not_special_are_vocabulary_for_everybody(token: str) -> None:
    assert token_id(token) in tokens().encode_plain(f"a{token}b")


def test_ids_the_checkpoint_uses_are_control_even_if_not_marked_special() -> None:
    # some converted tokenizers lose the mark
    value = json.loads(tokenizer_json())
    for entry in value["added_tokens"]:
        entry["special"] = False
    source = json.dumps(value)
    image = token_id("<|image_pad|>")
    assert image in Tokens(source).encode_plain("<|image_pad|>")
    assert image not in Tokens(source, [image]).encode_plain("<|image_pad|>")


@given(TEXT)
def test_ordinary_text_has_the_same_ids_trusted_or_not(text: str) -> None:
    if not any(token in text for token in SPECIAL):
        assert tokens().encode_plain(text) == tokens().encode(text)


def test_half_a_surrogate_pair_is_refused_not_a_crash() -> None:
    with pytest.raises(InvalidValue, match="surrogate"):
        tokens().encode("a\ud800b")


@given(TEXT)
def test_bytes_of_tokens_joined_are_the_text(text: str) -> None:
    ids = tokens().encode(text)
    assert b"".join(tokens().token_bytes(index) for index in ids).decode() == text


def test_split_control_finds_what_the_tokenizer_finds() -> None:
    text = "x<|im_start|>user\n<|image_pad|><|image_pad|>y"
    pieces = tokens().split_control(text)
    assert pieces == ["x", "<|im_start|>", "user\n", "<|image_pad|>", "", "<|image_pad|>", "y"]


def test_a_tokenizer_that_frames_text_frames_plain_text_alike() -> None:
    value = json.loads(tokenizer_json())
    start = {"id": "<|endoftext|>", "type_id": 0}
    value["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": start}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {
                "id": "<|endoftext|>",
                "ids": [token_id("<|endoftext|>")],
                "tokens": ["<|endoftext|>"],
            }
        },
    }
    framed = Tokens(json.dumps(value))
    assert framed.encode("hi", add_special_tokens=True)[0] == token_id("<|endoftext|>")
    assert framed.encode_plain("hi", add_special_tokens=True) == framed.encode("hi", add_special_tokens=True)


def test_a_broken_tokenizer_file_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokens('{"model": 3}')


def test_letters_a_vocabulary_lacks_are_not_taken_for_a_typed_token() -> None:
    source = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "[UNK]",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1}, "unk_token": "[UNK]"},
    }
    words = Tokens(json.dumps(source))
    assert words.encode_plain("hello there") == [1, 0]
    with pytest.raises(InvalidValue, match="control token"):
        words.encode_plain("hello [UNK]")
