"""Full and streamed responses: OpenAI's format, and the same content both ways."""

import json
from typing import Any

import httpx
import pytest

from tests.server.client_checks import picture
from tests.server.conftest import Site
from tests.server.fakes import ANSWER


def events(answer: httpx.Response) -> list[Any]:
    """The data of every event; the text must be nothing but events."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = answer.text.split("\n\n")
    assert end == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def test_chat_chunks_have_openais_order(site: Site) -> None:
    answer = await site.chat("say: hi", stream=True)
    first, second, third, last, done = events(answer)
    assert done == "[DONE]"
    shared = {key: first[key] for key in ("id", "object", "created", "model", "system_fingerprint")}
    assert shared["object"] == "chat.completion.chunk"
    for chunk, delta, finish in (
        (first, {"role": "assistant", "content": ""}, None),
        (second, {"content": "h"}, None),
        (third, {"content": "i"}, None),
        (last, {}, "stop"),
    ):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        assert chunk == {**shared, "choices": [choice]}


async def test_usage_chunk_is_last_and_null_before(site: Site) -> None:
    answer = await site.chat("say: hi", stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(answer)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    prompt = len(site.link.requests[0].prompt)
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,  # two letters and the end
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {
            "cached_tokens": prompt - 4,
            "visual_tokens": 0,
            "full_visual_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_full_chat_has_openais_shape(site: Site) -> None:
    answer = await site.chat("say: hi", logprobs=True)
    body = answer.json()
    prompt = len(site.link.requests[0].prompt)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"][0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [],
    }
    assert body["usage"]["total_tokens"] == prompt + 3


async def test_full_completion_has_openais_shape(site: Site) -> None:
    body = (await site.complete("say: hi", logprobs=2)).json()
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert (choice["text"], choice["index"], choice["finish_reason"]) == ("hi", 0, "stop")
    assert choice["logprobs"] == {
        "tokens": ["h", "i", "<|im_end|>"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"h": -0.5, "i": -1.5},
            {"i": -0.5, "j": -1.5},
            choice["logprobs"]["top_logprobs"][2],
        ],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3},
        {"max_tokens": 5},
        {"stop": "jum"},
        {"stop": ["ps.", "eye"], "n": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": "e", "min_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["hello", "say: naïve \N{GRINNING FACE} 日本"])
async def test_chat_stream_adds_up_to_the_full_response(
    site: Site, text: str, options: dict[str, Any]
) -> None:
    whole = (await site.chat(text, **options)).json()
    chunks = events(await site.chat(text, stream=True, stream_options={"include_usage": True}, **options))
    texts = ["" for _ in whole["choices"]]
    reasons: list[Any] = [None for _ in whole["choices"]]
    logprobs: list[list[Any]] = [[] for _ in whole["choices"]]
    for chunk in chunks[:-2]:
        (choice,) = chunk["choices"]
        assert reasons[choice["index"]] is None, "nothing may follow the finish reason"
        texts[choice["index"]] += choice["delta"].get("content", "")
        logprobs[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert logprobs == [(choice["logprobs"] or {"content": []})["content"] for choice in whole["choices"]]
    assert chunks[-2]["usage"] == whole["usage"]
    assert not site.link.open


async def test_completion_stream_of_several_prompts_adds_up_to_the_full_response(site: Site) -> None:
    options = {"prompt": ["say: one", "say: two", "x"], "n": 2, "logprobs": 1, "max_tokens": 20}
    whole = (await site.complete(**options)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["one", "one", "two", "two", ANSWER, ANSWER]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    texts = [""] * 6
    offsets: list[list[int]] = [[] for _ in range(6)]
    *chunks, done = events(await site.complete(**options, stream=True))
    assert done == "[DONE]"
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in whole["choices"]]


async def test_characters_are_never_split(site: Site) -> None:
    chunks = events(await site.chat("say: \N{GRINNING FACE}é", stream=True))
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1]]
    assert [piece for piece in pieces if piece] == ["\N{GRINNING FACE}", "é"]


async def test_stop_string_cancels_the_request_in_the_engine(site: Site) -> None:
    answer = await site.chat("say: one two three", stop="two")
    assert answer.json()["choices"][0]["message"]["content"] == "one "
    assert site.link.cancelled == [site.link.requests[0].id]
    # Tokens after the stop string are not the client's.
    assert answer.json()["usage"]["completion_tokens"] == len("one two")


async def test_visual_tokens_are_in_the_usage(site: Site) -> None:
    part = {"type": "image_url", "image_url": {"url": picture()}}
    usage = (await site.chat([part, part])).json()["usage"]
    tokens = [media.view.tokens for media in site.link.requests[0].media]
    assert usage["prompt_tokens_details"]["visual_tokens"] == sum(tokens) > 0
    assert usage["prompt_tokens"] == site.link.requests[0].length


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "code"),
    [("full", 503, "overloaded"), ("broken", 500, None), ("die", 503, "engine_died")],
)
async def test_failure_before_the_first_token_has_its_status(
    site: Site, text: str, status: int, code: str | None, stream: bool
) -> None:
    answer = await site.chat(text, stream=stream)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert not any(word in answer.text for word in ("secret", "/srv", "10.0", "RuntimeError"))
    if text == "full":
        assert int(answer.headers["retry-after"]) >= 1


async def test_failure_after_the_first_token_is_an_event_and_the_end(site: Site) -> None:
    *chunks, last = events(await site.chat("fail", stream=True))
    assert chunks[-1]["choices"][0]["delta"] == {"content": ANSWER[0]}
    assert set(last) == {"error"}
    assert last["error"]["type"] == "internal_error"
    assert "srv" not in last["error"]["message"]
    await site.well()


async def test_failure_of_a_full_response_is_a_500(site: Site) -> None:
    answer = await site.chat("fail")
    assert answer.status_code == 500
    await site.well()


async def test_one_failing_prompt_fails_all_and_cancels_them(site: Site) -> None:
    answer = await site.complete(["hang", "full", "hang"])
    assert answer.status_code == 503
    assert len(site.link.cancelled) == 3
    await site.well()
