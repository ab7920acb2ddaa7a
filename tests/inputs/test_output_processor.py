"""Deltas of one request, folded: text, ends, usage and log-probabilities."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.inputs.output_processor import OutputProcessor
from saccade.inputs.tokenizer import Tokenizer
from saccade.request import Delta, FinishReason, Media, Request, Sampling, TokenLogprobs, View
from tests.inputs.test_detokenizer import window_tokens
from tests.inputs.tiny_tokenizer import token_id, tokens

END = token_id("<|im_end|>")


def request(n: int = 1, logprobs: int | None = None, min_tokens: int = 0) -> Request:
    sampling = Sampling(n=n, logprobs=logprobs, stop_token_ids=(END,), min_tokens=min_tokens)
    return Request(id="r", prompt=(1, 2, 3), sampling=sampling)


def delta(
    text: str, index: int = 0, finish: FinishReason | None = None, end: bool = False, cached: int = 0
) -> Delta:
    ids = tuple(tokens().encode(text)) + ((END,) if end else ())
    return Delta(request_id="r", index=index, tokens=ids, finish=finish, cached_tokens=cached)


def test_stream_equals_the_complete_text_and_the_end_token_is_only_counted() -> None:
    answer = OutputProcessor(request(), tokens(), skip_special=False)
    pieces = [answer.push(delta("Hello")), answer.push(delta(", world", finish="stop", end=True))]
    shown = "".join(piece.text for piece in pieces if piece is not None)
    assert shown == answer.choices[0].text == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.done
    assert not answer.must_cancel
    assert (
        answer.usage.completion_tokens == len(tokens().encode("Hello")) + len(tokens().encode(", world")) + 1
    )


def test_a_stop_string_ends_the_sequence_and_requires_cancellation() -> None:
    answer = OutputProcessor(request(), tokens(), stop=["wor"])
    first = answer.push(delta("Hello wo"))
    assert first is not None
    assert (first.text, first.finish) == ("Hello ", None)
    last = answer.push(delta("rld and more"))
    assert last is not None
    assert (last.text, last.finish, last.stop) == ("", "stop", "wor")
    assert (answer.done, answer.must_cancel) == (True, True)
    used = answer.usage.completion_tokens
    assert used < len(tokens().encode("Hello wo")) + len(tokens().encode("rld and more"))
    assert answer.push(delta("late", finish="length")) is None  # dropped, not counted
    assert answer.usage.completion_tokens == used
    assert not answer.must_cancel  # the engine has ended by itself meanwhile


def test_with_several_sequences_cancellation_waits_for_all() -> None:
    answer = OutputProcessor(request(n=2), tokens(), stop=["!"])
    answer.push(delta("a!", index=0))
    assert (answer.done, answer.must_cancel) == (False, False)
    answer.push(delta("b", index=1))
    answer.push(delta("c!", index=1))
    assert (answer.done, answer.must_cancel) == (True, True)
    assert [choice.text for choice in answer.choices] == ["a", "bc"]


def test_text_held_back_comes_out_with_the_end() -> None:
    answer = OutputProcessor(request(), tokens(), stop=["world!"])
    answer.push(delta("Hello wor"))
    piece = answer.push(Delta(request_id="r", finish="length"))
    assert piece is not None
    assert (piece.text, piece.finish) == ("wor", "length")
    assert answer.choices[0].text == "Hello wor"


def test_errors_and_cancellations_pass_through() -> None:
    answer = OutputProcessor(request(), tokens())
    piece = answer.push(Delta(request_id="r", finish="error", error="too bad"))
    assert piece is not None
    assert (piece.finish, piece.error) == ("error", "too bad")
    assert answer.choices[0].error == "too bad"


def test_usage_counts_prompt_visual_and_cached_tokens() -> None:
    view = View(content=b"x" * 32, box=(0, 0, 64, 64), grid=(4, 4), merge=2, processing=b"p")
    media = Media(placeholder=1, view=view, pixels=np.zeros((1, 64, 64, 3), np.uint8))
    asked = Request(id="r", prompt=(1, 9, 3), media=(media,), sampling=Sampling())
    answer = OutputProcessor(asked, tokens())
    answer.push(delta("a", cached=4))
    answer.push(delta("b", finish="length"))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.visual_tokens, usage.cached_tokens) == (6, 4, 4)
    assert usage.total_tokens == 8


def test_logprobs_are_decoded_per_token_and_end_with_the_stop() -> None:
    ids = tuple(tokens().encode("a🙂b"))
    rows = tuple(TokenLogprobs(-0.5, ((index, -0.5), (END, -1.0))) for index in ids)
    answer = OutputProcessor(request(logprobs=2), tokens(), stop=["b"])
    piece = answer.push(Delta(request_id="r", tokens=ids + ids, logprobs=rows + rows))
    assert piece is not None
    assert len(piece.logprobs) == len(piece.token_ids) == len(ids)
    assert b"".join(one.sampled.bytes for one in piece.logprobs).decode() == "a🙂b"
    assert piece.logprobs[0].top[1].text == "<|im_end|>"
    assert piece.logprobs[0].sampled.logprob == -0.5
    assert OutputProcessor(request(), tokens()).push(Delta(request_id="r", tokens=ids)) is not None


def test_stop_strings_wait_for_min_tokens() -> None:
    answer = OutputProcessor(request(min_tokens=2), tokens(), stop=["a"])
    answer.push(Delta(request_id="r", tokens=tuple(tokens().encode("a") * 3)))
    assert answer.choices[0].text == "aa"
    assert answer.choices[0].finish_reason == "stop"


BYTES, WINDOW = tokens(), window_tokens()
FINISHES: tuple[FinishReason, ...] = ("stop", "length", "cancelled")


@given(
    st.lists(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=4), max_size=20),
    st.sampled_from(FINISHES),
    st.sampled_from(([], ["e"], ["the", "o"])),
    st.sampled_from((BYTES, WINDOW)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=300)
def test_an_accumulated_answer_equals_the_streamed_one(
    groups: list[list[int]],
    finish: FinishReason,
    stop: list[str],
    vocabulary: Tokenizer,
    skip: bool,
    end: bool,
    streamed_first: int,
) -> None:
    ids = [tuple(group) for group in groups]
    deltas = [Delta(request_id="r", tokens=group, cached_tokens=2) for group in ids]
    deltas.append(Delta(request_id="r", tokens=(END,) if end else (), finish=finish))
    deltas.append(Delta(request_id="r", finish="cancelled"))  # late: its choice has ended
    streamed = OutputProcessor(request(), vocabulary, stop, skip_special=skip)
    pieces = [streamed.push(one) for one in deltas]
    taken = OutputProcessor(request(), vocabulary, stop, skip_special=skip)
    for one in deltas[:streamed_first]:
        taken.push(one)
    whole = [taken.accumulate(one) for one in deltas[streamed_first:]]
    assert taken.choices[0].text == streamed.choices[0].text == "".join(one.text for one in pieces if one)
    assert taken.choices[0].token_ids == streamed.choices[0].token_ids
    assert taken.choices[0].finish_reason == streamed.choices[0].finish_reason
    assert (taken.usage, taken.must_cancel) == (streamed.usage, streamed.must_cancel)
    ended = [piece.finish is not None for piece in pieces if piece]
    assert taken.done
    assert whole.count(True) == (not any(ended[:streamed_first]))


@pytest.mark.parametrize("logprobs", [None, 0])
def test_each_accumulated_sequence_counts_once_and_has_its_logprobs(logprobs: int | None) -> None:
    answer = OutputProcessor(request(n=2, logprobs=logprobs), tokens())
    told = (TokenLogprobs(-1.0, ()),) if logprobs is not None else ()
    first, second = (tokens().encode(letter)[0] for letter in "ab")
    deltas = [
        Delta(request_id="r", index=0, tokens=(first,), logprobs=told),
        Delta(request_id="r", index=1, tokens=(second,), logprobs=told),
        Delta(request_id="r", index=1, tokens=(first,), logprobs=told, finish="length"),
        Delta(request_id="r", index=0, tokens=(second,), logprobs=told, finish="length"),
    ]
    assert [answer.accumulate(one) for one in deltas] == [False, False, False, True]
    assert [choice.text for choice in answer.choices] == ["ab", "ba"]
    assert [len(choice.logprobs) for choice in answer.choices] == [0 if logprobs is None else 2] * 2
