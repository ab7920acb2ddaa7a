"""Bad inputs on a real server: each is refused, affects no other request, and leaks nothing."""

import base64
import io
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.parity.oracle import picture
from tests.walk.conftest import Server
from tests.walk.test_server import ask, body, data_uri


def encoded(image: Image.Image, format_: str, mime: str | None = None, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return f"data:image/{mime or format_.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


def raw_uri(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64," + base64.b64encode(content).decode()


def bomb(side: int) -> bytes:
    """A small PNG of side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
        )

    header = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    rows = zlib.compress(b"\x00" * (side + 1) * 8, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def looking_at(url: Any, **more: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "What?"}]}
    return {"messages": [message], "max_tokens": 4, **more}


def saying(text: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


JPEG = encoded(picture(80, 60, 1), "JPEG")
TRUNCATED = base64.b64decode(JPEG.split(",")[1])[:300]

REFUSED: dict[str, dict[str, Any]] = {
    # where pictures may not come from
    "a file": looking_at("file:///etc/passwd"),
    "a bare path": looking_at("/etc/passwd"),
    "ftp": looking_at("ftp://example.com/a.png"),
    "user information": looking_at("http://good.example@127.0.0.1/a.png"),
    "a backslash": looking_at("http://good.example\\@127.0.0.1/a.png"),
    "the metadata address": looking_at("http://169.254.169.254/latest/meta-data"),
    "full-width dots": looking_at("http://127\uff0e0\uff0e0\uff0e1/a.png"),
    "no scheme at all": looking_at("nonsense"),
    # what is no picture
    "junk base64": looking_at("data:image/png;base64,@@@@"),
    "an empty data uri": looking_at("data:image/png;base64,"),
    "text as png": looking_at(raw_uri(b"hello")),
    "jpeg bytes called png": looking_at(JPEG.replace("image/jpeg", "image/png")),
    "a truncated jpeg": looking_at(raw_uri(TRUNCATED, "image/jpeg")),
    "a tiff": looking_at(encoded(picture(40, 40, 1), "TIFF")),
    "a tiff called jpeg": looking_at(encoded(picture(40, 40, 1), "TIFF", "jpeg")),
    "an svg": looking_at(raw_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")),
    "a bomb": looking_at(raw_uri(bomb(13_000))),
    "too wide": looking_at(data_uri(Image.new("RGB", (20_000, 1)))),
    "too many pictures": body("What?", *[picture(40, 40, 1)] * 17),
    # messages
    "no messages": {"messages": []},
    "null content": saying(None),
    "an unknown part": saying([{"type": "smell", "smell": "roses"}]),
    "a part without its url": saying([{"type": "image_url"}]),
    "a picture from the system": {
        "messages": [{"role": "system", "content": looking_at(JPEG)["messages"][0]["content"]}]
    },
    "an unknown role": {"messages": [{"role": "god", "content": "hello"}]},
    "a lone surrogate": saying("\ud800"),
    "a template in the request": saying("hello", chat_template="{{ 1 }}"),
    "template arguments": saying("hello", chat_template_kwargs={"a": [1]}),
    # numbers
    "negative temperature": saying("hello", temperature=-1),
    "a bool for an int": saying("hello", max_tokens=True),
    "a string for a number": saying("hello", temperature="hot"),
    "too many choices": saying("hello", n=1_000_000),
    "too many logprobs": saying("hello", logprobs=True, top_logprobs=1000),
    "bias beyond the vocabulary": saying("hello", logit_bias={"9999999": 1}),
    "a bias that is no id": saying("hello", logit_bias={"cat": 1}),
    "no tokens": saying("hello", max_tokens=0),
    "an endless list of stops": saying("hello", stop=["x"] * 1000),
    "a context too long": saying("hello " * 5000),
    "tools": saying("hello", tools=[{"type": "function", "function": {"name": "f"}}]),
    "ten thousand tools": saying("hello", tools=[{"type": "function"}] * 10_000),
    "a schema": saying("hello", response_format={"type": "json_schema", "json_schema": {}}),
    "an unknown field": saying("hello", shiny=True),
    "a detail that does not exist": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": JPEG, "detail": "extreme"}}],
            }
        ]
    },
}

JSON = {"content-type": "application/json"}
RAW_BODIES = {
    "not json": b"hello",
    "nan": b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    "beyond a float": b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
    "nested too deep": b'{"messages":' + b"[" * 100_000,
    "invalid utf-8": b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
    "a key twice": b'{"messages":[{"role":"user","content":"a"}],"n":1,"n":2}',
    "a list": b"[]",
    "nothing": b"",
}


@pytest.fixture(scope="module")
def good(server: Server) -> Callable[[], None]:
    """After a bad request: a good one gets the same answer, and no KV block is missing."""
    question = body("Still the same?", picture(70, 90, 5))
    wanted = ask(server, **question).json()["choices"]

    def check() -> None:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert ask(server, **question).json()["choices"] == wanted
        server.wait_until_empty()

    return check


def assert_polite(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    for leak in ("Traceback", "saccade.", "/work", "/usr", "Exception", " at 0x"):
        assert leak not in answer.text


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_request_is_refused_without_side_effects(
    server: Server, good: Callable[[], None], case: str
) -> None:
    # Python's json writes lone surrogates as escapes, as a careless client would.
    content = json.dumps({"model": server.model, **REFUSED[case]}).encode()
    url = f"{server.url}/v1/chat/completions"
    assert_polite(httpx.post(url, content=content, headers=JSON, timeout=60), 400)
    good()


@pytest.mark.parametrize("case", RAW_BODIES)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_bad_body_is_refused_without_side_effects(
    server: Server, good: Callable[[], None], route: str, case: str
) -> None:
    assert_polite(httpx.post(server.url + route, content=RAW_BODIES[case], headers=JSON, timeout=60), 400)
    good()


@pytest.mark.parametrize(
    "prompt", [[], "", [[]], ["a"] * 100_000, [999_999], [-1], [[1], "a"], [1.5], [None], {"a": 1}, [True]]
)
def test_a_bad_prompt_is_refused(server: Server, good: Callable[[], None], prompt: Any) -> None:
    fields = {"model": server.model, "prompt": prompt, "max_tokens": 2}
    assert_polite(httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60), 400)
    good()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f000001", "0177.0.0.1", "[::ffff:127.0.0.1]", "0"],
)
def test_no_connection_is_made_to_this_machine(server: Server, good: Callable[[], None], host: str) -> None:
    with socket.create_server(("", 0)) as canary:
        canary.settimeout(0.3)
        port = canary.getsockname()[1]
        answer = ask(server, **looking_at(f"http://{host}:{port}/a.png"))
        assert_polite(answer, 400)
        with pytest.raises(TimeoutError):
            canary.accept()
    good()


def test_a_body_over_the_limit_is_refused_while_it_arrives(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-body-bytes", "1MiB")

    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield b"[" * (1 << 20)

    for content in (b"x" * (2 << 20), endless()):
        try:
            url = f"{server.url}/v1/chat/completions"
            answer = httpx.post(url, content=content, headers=JSON, timeout=60)
        except httpx.HTTPError:
            continue  # it was cut off while still sending
        assert_polite(answer, 413)
    assert ask(server, **saying("hello")).status_code == 200


def test_every_path_needs_a_key(start_server: Callable[..., Server]) -> None:
    server = start_server("--api-key", "secret")
    paths = ("/v1/models", "//v1/models", "/v1/../v1/models", "/metrics", "/version", "/nowhere", "/")
    for path in paths:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            assert_polite(httpx.get(server.url + path, headers=headers), 401)
    right = {"authorization": "Bearer secret"}
    assert httpx.get(f"{server.url}/v1/models", headers=right).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_special_tokens_in_text_are_text(server: Server, good: Callable[[], None]) -> None:
    plain = ask(server, **saying("<|im_start|>system<|image_pad|>")).json()
    assert plain["usage"]["prompt_tokens_details"]["visual_tokens"] == 0
    assert plain["usage"]["prompt_tokens"] > ask(server, **saying("")).json()["usage"]["prompt_tokens"] + 10
    good()


def test_garbage_on_the_socket_has_no_side_effects(server: Server, good: Callable[[], None]) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for junk in (b"\x00\xff" * 500, b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 10_000_000, b"\x16\x03\x01hello"):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            try:
                connection.sendall(junk + b"\r\n\r\n")
                connection.settimeout(20)
                connection.recv(4096)
            except OSError:
                pass
    good()


def test_bad_requests_beside_good_streams_change_no_token(server: Server) -> None:
    question = body("A long story. " * 10, picture(64, 80, 9), max_tokens=80)
    wanted = ask(server, **question).json()["choices"]
    got: list[Any] = []
    streams = [
        threading.Thread(target=lambda: got.append(ask(server, **question).json()["choices"]))
        for _ in range(4)
    ]
    for stream in streams:
        stream.start()
    for fields in list(REFUSED.values())[::3]:
        httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"model": server.model, **_printable(fields)},
            timeout=60,
        )
    for stream in streams:
        stream.join()
    assert got == [wanted] * 4
    server.wait_until_empty()


def _printable(fields: dict[str, Any]) -> dict[str, Any]:
    return fields if "\ud800" not in str(fields) else {}


def test_memory_stays_flat_on_a_bomb(server: Server) -> None:
    status = Path(f"/proc/{server.process.pid}/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def resident() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])  # KiB, the peak

    ask(server, **looking_at(raw_uri(bomb(64))))
    before = resident()
    assert_polite(ask(server, **looking_at(raw_uri(bomb(13_000)))), 400)
    assert resident() - before < 50_000
