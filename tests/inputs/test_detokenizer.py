"""Text in increments: the same text however the ids come, ending where the first stop string is complete."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import InvalidValue
from saccade.inputs.detokenizer import Detokenizer
from saccade.inputs.tokenizer import Tokenizer
from tests.inputs.tiny_tokenizer import token_id, tokenizer_json, tokens

IDS = st.lists(st.integers(0, tokens().vocab_size - 1), max_size=60)
CUTS = st.lists(st.integers(0, 60), max_size=8)


def window_tokens() -> Tokenizer:
    """The same vocabulary behind a decoder of another kind, which the window path must handle."""
    value = json.loads(tokenizer_json())
    value["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return Tokenizer(json.dumps(value))


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    return [ids[start:stop] for start, stop in pairwise(edges)]


@given(IDS, CUTS, st.booleans())
@settings(max_examples=300)
def test_pieces_joined_are_the_decoding_of_all_ids(ids: list[int], cuts: list[int], skip: bool) -> None:
    stream = Detokenizer(tokens(), skip_special=skip)
    text = "".join(stream.push(group).text for group in grouped(ids, cuts)) + stream.finish()
    assert text == tokens().decode(ids, skip_special=skip)


@given(st.lists(st.integers(0, tokens().vocab_size - 1), max_size=30))
@settings(max_examples=100)
def test_pieces_joined_are_the_decoding_for_other_decoders_too(ids: list[int]) -> None:
    other = window_tokens()
    stream = Detokenizer(other)
    text = "".join(stream.push([one]).text for one in ids) + stream.finish()
    assert text == other.decode(ids)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), CUTS)
@settings(max_examples=300)
def test_text_ends_at_the_stop_that_is_complete_first_however_ids_are_grouped(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = tokens().encode(text)
    stream = Detokenizer(tokens(), stops)
    seen = ""
    for group in grouped(ids, cuts):
        seen += stream.push(group).text
        assert not any(stop in seen for stop in stops)  # nothing of a stop string was ever shown
    seen += stream.finish()
    ends = [(text.find(one) + len(one), text.find(one)) for one in stops if one in text]
    assert seen == (text[: min(ends)[1]] if ends else text)
    assert stream.stopped == bool(ends)


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    ids = [
        tokens().id_of(letter) for letter in ("ð", "Ł", "Ļ", "Ģ")
    ]  # the four bytes of a rocket... F0 9F 9A 80
    assert None not in ids
    whole = [index for index in ids if index is not None]
    stream = Detokenizer(tokens())
    pieces = [stream.push([one]).text for one in whole]
    assert "".join(pieces[:-1]) == ""
    assert pieces[-1] + stream.finish() == tokens().decode(whole)
    assert "\ufffd" not in pieces[-1]


def test_a_stop_string_across_tokens_is_found_and_later_tokens_are_not_used() -> None:
    first, rest = tokens().encode("Hello wor"), tokens().encode("ld! more")
    stream = Detokenizer(tokens(), ["world"])
    head = stream.push(first)
    assert head.text == "Hello "
    tail = stream.push(rest)
    assert tail.stopped
    assert tail.text == ""
    assert tail.tokens_used < len(rest)
    assert stream.push(rest).tokens_used == 0
    assert stream.finish() == ""


def test_include_stop_keeps_the_stop_string() -> None:
    stream = Detokenizer(tokens(), ["wor"], include_stop=True)
    assert stream.push(tokens().encode("Hello world")).text == "Hello wor"


def test_the_beginning_of_a_stop_string_is_returned_at_the_end() -> None:
    stream = Detokenizer(tokens(), ["world!"])
    shown = stream.push(tokens().encode("Hello world")).text
    assert shown + stream.finish() == "Hello world"
    assert not stream.stopped


def test_stop_strings_do_not_end_the_text_before_min_tokens() -> None:
    ids = tokens().encode("a b a b a b")
    assert Detokenizer(tokens(), ["b"]).push(ids).text == "a "
    patient = Detokenizer(tokens(), ["b"], min_tokens=len(ids) - 1)
    assert patient.push(ids).text + patient.finish() == "a b a b a "


def test_special_tokens_are_skipped_unless_wanted() -> None:
    ids = [*tokens().encode("hi"), token_id("<|im_end|>")]
    assert Detokenizer(tokens()).push(ids).text == "hi"
    assert Detokenizer(tokens(), skip_special=False).push(ids).text == "hi<|im_end|>"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidValue, match="empty"):
        Detokenizer(tokens(), [""])


@pytest.mark.parametrize("make", [tokens, window_tokens])
def test_kept_special_tokens_stay_in_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    kept, dropped = token_id("<|vision_start|>"), token_id("<|vision_end|>")
    detokenizer = Detokenizer(tokenizer, kept_ids=frozenset({kept}))
    text = tokenizer.encode("Hello")
    pieces = [detokenizer.push([token]).text for token in (*text, kept, *text, dropped)]
    assert "".join(pieces) + detokenizer.finish() == "Hello<|vision_start|>Hello"
