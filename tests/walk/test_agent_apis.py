"""Anthropic's messages, OpenAI's responses and the token routes against a real engine."""

import anthropic
import httpx

from tests.server.client_checks import picture, sync_client
from tests.walk.conftest import Server

GREEDY = {"temperature": 0}  # newer clients have no argument for it


def test_messages_stream_and_count_like_the_whole_message(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=60)
    source = {"type": "base64", "media_type": "image/png", "data": picture().partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    question = {"model": server.model, "messages": [{"role": "user", "content": content}]}
    counted = client.messages.count_tokens(**question)  # type: ignore[arg-type]
    whole = client.messages.create(max_tokens=8, extra_body=GREEDY, **question)  # type: ignore[call-overload]
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == counted.input_tokens
    with client.messages.stream(max_tokens=8, extra_body=GREEDY, **question) as stream:  # type: ignore[arg-type]
        final = stream.get_final_message()
    assert [block.to_dict()["text"] for block in final.content] == [whole.content[0].text]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason
    server.wait_until_empty()


def test_responses_and_chat_give_the_same_text(server: Server) -> None:
    client = sync_client(server.url)
    image = {"type": "input_image", "image_url": picture(), "detail": "high"}
    item = {"role": "user", "content": [image, {"type": "input_text", "text": "What is it?"}]}
    options = {"model": server.model, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(input=[item], **options)  # type: ignore[call-overload]
    events = list(client.responses.create(input=[item], stream=True, **options))  # type: ignore[call-overload]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    parts = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "What is it?"}]
    chat = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
        max_completion_tokens=8,
        temperature=0,
    )
    assert chat.choices[0].message.content == whole.output_text
    server.wait_until_empty()


def test_tokens_of_a_conversation_are_those_of_its_usage(server: Server) -> None:
    messages = [{"role": "user", "content": "What is it?"}]
    tokens = httpx.post(f"{server.url}/tokenize", json={"messages": messages}, timeout=60).json()
    body = {"model": server.model, "messages": messages, "max_tokens": 1}
    usage = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"]
