"""What the official client must see of any server: each check takes a server's address and a model name.

They assume nothing about the model but that greedy decoding repeats itself, so that they run against a
scripted engine as well as against a real one.
"""

import base64
import io
from collections.abc import Callable
from typing import Any

import openai
from PIL import Image

QUESTION: list[Any] = [{"role": "user", "content": "How many boats are there?"}]
PROMPT = "The eye jumps to"


def sync_client(base_url: str, api_key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=60)


def async_client(base_url: str, api_key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=60)


def picture(width: int = 96, height: int = 64, colour: tuple[int, int, int] = (200, 40, 40)) -> str:
    """A PNG as a data URI."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def looking(*urls: str, text: str = "What is this?") -> list[Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def check_usage(usage: Any) -> None:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
    details = usage.prompt_tokens_details
    assert 0 <= details.cached_tokens <= usage.prompt_tokens
    assert 0 <= details.visual_tokens <= usage.prompt_tokens


def check_chat(base_url: str, model: str, **options: Any) -> str:
    """A whole chat answer; its text."""
    client = sync_client(base_url, **options)
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    check_usage(answer.usage)
    # What came back can be sent back.
    again: list[Any] = [*QUESTION, choice.message, {"role": "user", "content": "And now?"}]
    client.chat.completions.create(model=model, messages=again, max_tokens=2)
    assert choice.message.content is not None
    return choice.message.content


def check_chat_stream(base_url: str, model: str, **options: Any) -> None:
    """The streamed answer is the whole one, chunk by chunk in OpenAI's order."""
    client = sync_client(base_url, **options)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *body, last = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert not body[0].choices[0].delta.content
    assert all(chunk.choices[0].delta.role is None for chunk in body[1:])
    assert [chunk.choices[0].finish_reason for chunk in body[:-1]] == [None] * (len(body) - 1)
    assert body[-1].choices[0].finish_reason in ("stop", "length")
    assert body[-1].choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in body)
    assert last.choices == []
    check_usage(last.usage)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in body)
    assert text == check_chat(base_url, model, **options)


async def check_chat_async(base_url: str, model: str, **options: Any) -> None:
    async with async_client(base_url, **options) as client:
        answer = await client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=12, temperature=0
        )
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=12, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == answer.choices[0].message.content


def check_picture(base_url: str, model: str, **options: Any) -> None:
    """Pictures cost visual tokens, and more of them cost more."""
    client = sync_client(base_url, **options)

    def visual(*urls: str) -> int:
        answer = client.chat.completions.create(
            model=model, messages=looking(*urls), max_tokens=2, temperature=0
        )
        check_usage(answer.usage)
        details: Any = answer.usage.prompt_tokens_details if answer.usage else None
        return int(details.visual_tokens)

    one = visual(picture())
    assert one > 0
    assert visual(picture(), picture(128, 128, (0, 0, 255))) > one


def check_completions(base_url: str, model: str, **options: Any) -> None:
    client = sync_client(base_url, **options)
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    check_usage(whole.usage)
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    several = client.completions.create(
        model=model, prompt=[PROMPT, "Another", PROMPT], max_tokens=8, temperature=0
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].text == several.choices[2].text == whole.choices[0].text
    by_ids = client.completions.create(model=model, prompt=[[65, 66, 67]], max_tokens=3, temperature=0)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3


def check_logprobs(base_url: str, model: str, **options: Any) -> None:
    client = sync_client(base_url, **options)
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        # Greedy: the sampled token is the likeliest one.
        assert token.logprob == token.top_logprobs[0].logprob
        assert [one.logprob for one in token.top_logprobs] == sorted(
            (one.logprob for one in token.top_logprobs), reverse=True
        )
    spelled = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert spelled.decode(errors="replace").startswith(
        (answer.choices[0].message.content or "").rstrip("\ufffd")
    )
    legacy = client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)
    told = legacy.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.top_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs or []) == len(told.text_offset or [])
    assert all(len(top) >= 1 for top in told.top_logprobs)


def check_choices(base_url: str, model: str, **options: Any) -> None:
    """n choices, whole and interleaved in a stream; greedy ones are alike."""
    client = sync_client(base_url, **options)
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=6, temperature=0, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 1
    texts = {0: "", 1: "", 2: ""}
    ended = set()
    for chunk in client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=6, temperature=0, n=3, stream=True
    ):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ended.add(choice.index)
    assert ended == {0, 1, 2}
    assert set(texts.values()) == {answer.choices[0].message.content}


def check_stop(base_url: str, model: str, **options: Any) -> None:
    """A stop string ends the text before it, whole and streamed."""
    client = sync_client(base_url, **options)

    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=12, temperature=0, **more
        )

    text = ask().choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    answer = ask(stop=stop)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(ask(stop=[stop, "never said"], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def check_models(base_url: str, model: str, **options: Any) -> None:
    client = sync_client(base_url, **options)
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).id == model


def refused(call: Callable[[], Any], kind: type[openai.APIStatusError], param: str | None) -> None:
    """`call` fails with that error, which names the parameter."""
    try:
        call()
    except kind as error:
        body: Any = error.body
        assert set(body) == {"message", "type", "param", "code"}
        assert body["param"] == param
        assert body["message"]
    else:
        raise AssertionError(f"the call should fail with {kind.__name__}")


def check_errors(base_url: str, model: str, **options: Any) -> None:
    create: Any = sync_client(base_url, **options).chat.completions.create
    bad, missing = openai.BadRequestError, openai.NotFoundError
    refused(lambda: create(model="nobody", messages=QUESTION), missing, "model")
    refused(lambda: create(model=model, messages=[]), bad, "messages")
    refused(lambda: create(model=model, messages=QUESTION, temperature=-1), bad, "temperature")
    refused(lambda: create(model=model, messages=QUESTION, n=1000), bad, "n")
    refused(lambda: create(model=model, messages=QUESTION, max_tokens=0), bad, "max_tokens")
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    refused(lambda: create(model=model, messages=QUESTION, tools=[tool]), bad, "tools")
    refused(
        lambda: create(model=model, messages=QUESTION, extra_body={"shiny": True}),
        bad,
        "shiny",
    )
    detail = looking(picture())
    detail[0]["content"][0]["image_url"]["detail"] = "ultra"
    refused(lambda: create(model=model, messages=detail), bad, "messages[0].content[0].image_url.detail")


SYNC_CHECKS: tuple[Callable[..., Any], ...] = (
    check_chat,
    check_chat_stream,
    check_picture,
    check_completions,
    check_logprobs,
    check_choices,
    check_stop,
    check_models,
    check_errors,
)
