"""Reading and parsing of request bodies: limits, strict JSON, numbers that are not finite."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import BodyTooLarge, BodyTooSlow, InvalidValue
from saccade.server.json_body import MAX_KEYS, MAX_VALUES, Disconnected, parse_json, read_body
from tests.server.conftest import Site

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
MESSAGE = b'{"model":"tiny","messages":[{"role":"user","content":%s}]}'


@given(PLAIN, st.booleans())
def test_plain_json_means_what_it_says(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text.encode()) == value


BAD = {
    "nothing": b"",
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "brackets in a message": MESSAGE % (b"[" * 100_000 + b"]" * 100_000),
    "not UTF-8": MESSAGE % b'"\xff"',
    "a surrogate in UTF-8": MESSAGE % b'"\xed\xa0\x80"',
    "UTF-16": (MESSAGE % b'"x"').decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + MESSAGE % b'"x"',
    "a lone high surrogate": MESSAGE % rb'"\ud83d"',
    "a lone low surrogate": MESSAGE % rb'"a\udE00"',
    "surrogates the wrong way round": MESSAGE % rb'"\ude00\ud83d"',
    "a lone surrogate in a key": b'{"model":"tiny","\\ud800":1}',
    "a key twice": b'{"model":"tiny","model":"tiny","messages":[]}',
    "a key twice, spelled differently": rb'{"model":"tiny","\u006dodel":"other"}',
    "a key twice, inside": MESSAGE % b'[{"type":"text","text":"a","text":"b"}]',
    "half a body": b'{"model":"tiny"',
    "two bodies": b"{}{}",
    "a trailing comma": b'{"model":"tiny",}',
    "single quotes": b"{'model':'tiny'}",
    "a control character": MESSAGE % b'"\x00"',
    "too many keys": json.dumps({str(key): 0 for key in range(MAX_KEYS + 1)}).encode(),
    "too many values": b"[" + b"0," * (MAX_VALUES + 1) + b"0]",
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
async def test_bad_json_is_a_400(site: Site, body: bytes) -> None:
    answer = await site.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 400
    await site.well()


async def test_duplicate_key_is_named(site: Site) -> None:
    answer = await site.post("/v1/chat/completions", b'{"n":1,"n":2}')
    assert answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e309", "-1e309", "9" * 5000, "-" + "9" * 5000]
)
@pytest.mark.parametrize("param", ["temperature", "n", "seed", "max_tokens", "top_p"])
async def test_number_that_is_not_finite_is_named(site: Site, number: str, param: str) -> None:
    body = f'{{"model":"tiny","messages":[{{"role":"user","content":"x"}}],"{param}":{number}}}'
    answer = await site.post("/v1/chat/completions", body.encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [body for name, body in BAD.items() if "surrogate" in name])
def test_lone_surrogates_are_refused_by_the_parser(body: bytes) -> None:
    with pytest.raises(InvalidValue, match=r"surrogate|UTF-8"):
        parse_json(body)


def test_number_of_values_is_bounded_before_parsing() -> None:
    with pytest.raises(InvalidValue, match="JSON values"):
        parse_json(b"[]," * (MAX_VALUES + 1))


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse_json(rb'"\ud83d\ude00"') == "\N{GRINNING FACE}"


def test_too_many_digits_are_not_converted() -> None:
    assert parse_json(b"-" + b"9" * 100_000) == -math.inf


def chunks(*parts: bytes, end: str = "http.request") -> Callable[[], Awaitable[dict[str, Any]]]:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": end, "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return messages.pop(0)

    return receive


async def test_body_size_is_checked_while_it_arrives() -> None:
    assert await read_body(chunks(b"ab", b"cd"), [], 4, 60) == b"abcd"
    with pytest.raises(BodyTooLarge):
        await read_body(chunks(b"ab", b"cd", b"e"), [], 4, 60)


async def test_declared_length_is_refused_before_anything_is_read() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(chunks(end="never asked"), [(b"content-length", b"5")], 4, 60)


async def test_client_disconnects_in_the_middle_of_a_body() -> None:
    with pytest.raises(Disconnected):
        await read_body(chunks(b"ab", end="http.disconnect"), [], 4, 60)


async def test_deadline_is_for_the_whole_body() -> None:
    """However little comes at a time and however often: here the deadline has passed already."""
    with pytest.raises(BodyTooSlow):
        await read_body(chunks(*[b"a"] * 100), [], 1000, -1)
