"""The tokenizer: control tokens for the trusted, letters for everybody else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from saccade.errors import CheckpointError, InvalidValue
from saccade.inputs.tokenizer import Tokenizer
from tests.inputs.tiny_tokenizer import ORDINARY, SPECIAL, token_id, tokenizer_json, tokens

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("token", SPECIAL)
def test_trusted_text_parses_control_tokens_and_plain_text_does_not(token: str) -> None:
    text = f"a {token} b"
    assert token_id(token) in tokens().encode(text)
    plain = tokens().encode_plain(text)
    assert not any(index in tokens().control.values() for index in plain)
    assert tokens().decode(plain) == text


@pytest.mark.parametrize("token", ORDINARY)
def test_added_tokens_that_are_not_special_are_ordinary_vocabulary(token: str) -> None:
    assert token_id(token) in tokens().encode_plain(f"a{token}b")


def test_ids_the_checkpoint_uses_are_control_even_if_not_marked_special() -> None:
    # some converted tokenizers lose the mark
    value = json.loads(tokenizer_json())
    for entry in value["added_tokens"]:
        entry["special"] = False
    source = json.dumps(value)
    image = token_id("<|image_pad|>")
    assert image in Tokenizer(source).encode_plain("<|image_pad|>")
    assert image not in Tokenizer(source, [image]).encode_plain("<|image_pad|>")


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


def test_special_prefix_and_suffix_are_added_to_plain_text_too() -> None:
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
    framed = Tokenizer(json.dumps(value))
    assert framed.encode("hi", add_special_tokens=True)[0] == token_id("<|endoftext|>")
    assert framed.encode_plain("hi", add_special_tokens=True) == framed.encode("hi", add_special_tokens=True)


def test_a_broken_tokenizer_file_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer('{"model": 3}')


def test_characters_outside_the_vocabulary_are_not_taken_for_a_control_token() -> None:
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
    words = Tokenizer(json.dumps(source))
    assert words.encode_plain("hello there") == [1, 0]
    with pytest.raises(InvalidValue, match="control token"):
        words.encode_plain("hello [UNK]")


class Only:
    """A tokenizer of which only the calls that let other threads run may be used."""

    def __init__(self, real: HFTokenizer) -> None:
        self._real = real
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.texts += texts
        return self._real.encode_batch_fast(texts, **options)

    def encode(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("this holds every other thread back")


def test_encoding_releases_the_gil() -> None:
    one = Tokenizer(tokenizer_json())
    trusted, plain = Only(one._trusted), Only(one._plain)
    vars(one).update(_trusted=trusted, _plain=plain)
    one.encode("a b")
    one.encode_plain("c d")
    assert (trusted.texts, plain.texts) == (["a b"], ["c d"])


@given(TEXT, st.booleans())
def test_batch_encoding_gives_the_ids_of_a_single_call(text: str, framed: bool) -> None:
    text += "<|im_end|> a"
    expected = tokens()._trusted.encode(text, add_special_tokens=framed).ids
    assert tokens().encode(text, add_special_tokens=framed) == expected


@given(TEXT)
def test_no_token_has_more_bytes_than_longest(text: str) -> None:
    assert len(text.encode()) <= tokens().longest * len(tokens().encode(text))


def test_the_spelling_of_a_token_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Tokenizer(tokenizer_json())
    first = one.spelling(5)
    monkeypatch.setattr(Tokenizer, "token_bytes", None)
    assert one.spelling(5) is first
