"""API keys, routes, metrics, and limits on the socket."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from saccade import __version__
from saccade.config import ServeConfig
from saccade.inputs.processor import InputProcessor
from saccade.server import app as server_app
from saccade.server.app import create_app
from saccade.server.http_protocol import MAX_HEADER_BYTES
from tests.server.conftest import JSON, MODEL, Site, running
from tests.server.fakes import FakeLink

KEY = "sk-right"
ROUTES = ("/", "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/version")
ODD = ("/v1/models//", "/V1/models", "/nothing", "/health/", "/health.json", "/docs", "/openapi.json")


@pytest.fixture
def locked(front: InputProcessor, link: FakeLink) -> Site:
    return Site(create_app(front, link, ServeConfig(api_keys=(KEY, "sk-other"))), link)


def with_key(site: Site, value: str) -> Site:
    return Site(site.app, site.link, {"authorization": value})


@pytest.mark.parametrize("path", [*ROUTES, *ODD])
@pytest.mark.parametrize(
    "value", [None, "", KEY, "Bearer", "Bearer ", "Bearer sk-wrong", f"Basic {KEY}", f"Bearer {KEY}x"]
)
async def test_every_route_needs_a_valid_key(locked: Site, path: str, value: str | None) -> None:
    visitor = locked if value is None else with_key(locked, value)
    answer = await visitor.get(path)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (await visitor.chat()).status_code == 401
    assert not locked.link.requests


@pytest.mark.parametrize("value", [f"Bearer {KEY}", "bearer sk-other"])
async def test_valid_key_opens_every_route(locked: Site, value: str) -> None:
    visitor = with_key(locked, value)
    for path in ROUTES:
        assert (await visitor.get(path)).status_code == 200, path
    assert (await visitor.chat()).status_code == 200


async def test_two_authorization_headers_are_refused(locked: Site) -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer sk-wrong")]
    assert (await locked.send("GET", "/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(locked: Site, path: str) -> None:
    assert (await locked.get(path)).status_code == 200


async def test_every_key_is_compared_in_constant_time(locked: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the ones after a match, and never with ==."""
    compared: list[int] = []
    compare = server_app.hmac.compare_digest  # type: ignore[attr-defined]

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(len(left))
        return bool(compare(left, right))

    monkeypatch.setattr(server_app.hmac, "compare_digest", counting)  # type: ignore[attr-defined]
    await with_key(locked, f"Bearer {KEY}").get("/version")
    await with_key(locked, "Bearer x").get("/version")
    assert compared == [32] * 4


async def test_each_key_is_a_tenant_and_a_server_without_keys_has_one(locked: Site, site: Site) -> None:
    for key in (KEY, "sk-other", KEY):
        await with_key(locked, f"Bearer {key}").chat()
    await site.chat()
    one, other, again, open_one = (request.salt for request in locked.link.requests)
    assert len(one) >= 16
    assert one == again != other
    assert open_one == b""
    assert KEY.encode() not in one


# --- routes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ODD)
async def test_unknown_route_is_a_404_with_an_openai_error(site: Site, path: str) -> None:
    answer = await site.get(path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("PUT", "/v1/completions"),
        ("POST", "/health"),
        ("DELETE", "/v1/models"),
    ],
)
async def test_wrong_method_is_a_405_that_names_the_allowed_ones(site: Site, method: str, path: str) -> None:
    answer = await site.send(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] in answer.json()["error"]["message"]


async def test_models(front: InputProcessor, link: FakeLink) -> None:
    names = ("first", "org/second")
    site = Site(create_app(front, link, ServeConfig(served_model_names=names)), link)
    listed = (await site.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == list(names)
    assert (await site.get("/v1/models/org/second")).json()["max_model_len"] == link.info.max_model_len
    missing = await site.get("/v1/models/third")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    answer = await site.post("/v1/completions", {"model": "org/second", "prompt": "x"})
    assert answer.json()["model"] == "org/second"
    refused = await site.chat()
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


async def test_version_and_index(site: Site) -> None:
    assert (await site.get("/version")).json() == {"version": __version__}
    assert MODEL in (await site.get("/")).json()["message"]


async def test_unexpected_failure_is_a_neutral_500_logged_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise RuntimeError("secret /srv/path")

    monkeypatch.setattr(site.app.state.metrics, "render", broken)
    answer = await site.get("/metrics")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "RuntimeError" not in answer.text
    assert answer.json()["error"]["type"] == "internal_error"
    assert sum("secret" in str(record.exc_info) for record in caplog.records) == 1
    caplog.clear()
    assert (await site.chat("broken")).status_code == 500
    assert sum("secret" in str(record.exc_info) for record in caplog.records) == 1


async def test_websockets_are_closed(site: Site) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    await site.app({"type": "websocket", "path": "/v1/models", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- metrics --------------------------------------------------------------------------------------------


async def test_metrics_count_what_happened(site: Site) -> None:
    await site.chat("say: hi", n=2)
    await site.chat("say: hi", stream=True)
    await site.chat(temperature=-1)
    await site.get("/nothing/of/the/kind")
    text = (await site.get("/metrics")).text
    for line in (
        'saccade_http_responses_total{route="/v1/chat/completions",status="200"} 2.0',
        'saccade_http_responses_total{route="/v1/chat/completions",status="400"} 1.0',
        'saccade_http_responses_total{route="other",status="404"} 1.0',
        'saccade_finished_choices_total{outcome="stop"} 3.0',
        "saccade_time_to_first_token_seconds_count 2.0",
        "saccade_inter_token_seconds_count 6.0",  # three choices of three tokens have two gaps each
        "saccade_request_seconds_count 2.0",
        "saccade_http_requests_in_flight 0.0",
        'saccade_kv_blocks{state="free"} 128.0',
    ):
        assert line in text.splitlines(), line


# --- sockets --------------------------------------------------------------------------------------------


async def talk(url: str, *pieces: bytes) -> bytes:
    """Sends bytes on a fresh connection and reads what comes until the server closes it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def error_of(response: bytes) -> tuple[int, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
TYPE = b"content-type: application/json\r\n"


async def test_bodies_over_the_limit_are_413(front: InputProcessor, link: FakeLink) -> None:
    """Declared or streamed; the connection is not torn before the client can read its answer."""
    async with running(front, link, max_body_bytes=10_000) as url, httpx.AsyncClient(timeout=20) as client:
        path = f"{url}/v1/chat/completions"

        async def chunks() -> Any:
            for _ in range(200):
                yield b"x" * 1000

        for content in (b"x" * 2_000_000, chunks()):
            answer = await client.post(path, content=content, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "say: fine"}]}
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"x-big: " + b"a" * 10_000_000,
        b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(1000)),
        b"x-big: " + b"a" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
    ],
    ids=["endless", "many", "finished"],
)
async def test_headers_over_the_limit_are_431(front: InputProcessor, link: FakeLink, head: bytes) -> None:
    async with running(front, link) as url:
        pieces = [head[at : at + 60_000] for at in range(0, len(head), 60_000)]
        response = await talk(url, HEAD, *pieces)
        assert error_of(response) == (431, "headers_too_large")
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).status_code == 200


async def test_long_path_is_431(front: InputProcessor, link: FakeLink) -> None:
    async with running(front, link) as url:
        response = await talk(url, b"GET /" + b"a" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert error_of(response) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "pieces",
    [
        (b"POST /v1/chat/comp",),
        (HEAD,),
        (HEAD + TYPE + b"content-length: 100\r\n\r\n", b'{"model"'),
        (HEAD + TYPE + b"transfer-encoding: chunked\r\n\r\n", b'3\r\n{"m\r\n'),
    ],
    ids=["line", "headers", "body", "chunks"],
)
async def test_request_that_does_not_end_is_408(
    front: InputProcessor, link: FakeLink, pieces: tuple[bytes, ...]
) -> None:
    async with running(front, link, read_timeout=0.2) as url:
        assert error_of(await talk(url, *pieces)) == (408, "request_too_slow")
        assert not link.requests


async def test_unread_body_does_not_hold_a_connection(front: InputProcessor, link: FakeLink) -> None:
    """A route that needs no body answers; what still trickles in is cut off."""
    async with running(front, link, read_timeout=0.2) as url:
        response = await talk(url, b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
        assert response.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"\x00" * 1000,
        b"HELO there\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"bad header\r\n\r\n",
    ],
    ids=["tls", "zeros", "smtp", "version", "negative", "twice", "chunk", "header"],
)
async def test_garbage_on_the_socket_is_a_400(front: InputProcessor, link: FakeLink, garbage: bytes) -> None:
    async with running(front, link) as url:
        response = await talk(url, garbage)
        assert error_of(response)[0] == 400
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).status_code == 200


@pytest.mark.parametrize("host", [b"", b"evil.example", b"127.0.0.1:1@x", b"\xff", b"a" * 5000])
async def test_odd_host_changes_nothing(front: InputProcessor, link: FakeLink, host: bytes) -> None:
    async with running(front, link, api_keys=(KEY,)) as url:
        request = b"GET %s HTTP/1.1\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n"
        assert (await talk(url, request % b"/v1/models")).startswith(b"HTTP/1.1 401")
        assert (await talk(url, request % b"/health")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "path",
    [
        b"//v1/models",
        b"//health",
        b"/health/",
        b"/./health",
        b"/health/../v1/models",
        b"/v1/../v1/models",
        b"/v1/%2e%2e/v1/models",
        b"/%2fv1/models",
        b"/health%00",
        b"/health;x",
        b"http://x/v1/models",
    ],
)
async def test_odd_paths_on_the_socket_need_the_key_and_are_no_route(
    front: InputProcessor, link: FakeLink, path: bytes
) -> None:
    async with running(front, link, api_keys=(KEY,)) as url:
        request = b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        assert (await talk(url, request + b"\r\n")).startswith(b"HTTP/1.1 401")
        response = await talk(url, request + b"authorization: Bearer sk-right\r\n\r\n")
        # A whole URL is what proxies send: it names the route by its path.
        expected = b"HTTP/1.1 200" if path.startswith(b"http:") else b"HTTP/1.1 404"
        assert response.startswith(expected)


async def test_slow_clients_do_not_slow_others(front: InputProcessor, link: FakeLink) -> None:
    async with running(front, link) as url, httpx.AsyncClient(timeout=20) as client:
        host, port = url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        for _, writer in slow:
            writer.write(HEAD + b"content-length: 1000\r\n\r\n{")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "say: fine"}]}
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "fine"
        for _, writer in slow:
            writer.close()


async def test_too_large_body_gets_a_response_before_the_connection_closes(
    front: InputProcessor, link: FakeLink
) -> None:
    body = b"x" * (12 << 20)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    async with running(front, link, max_body_bytes=1 << 16) as url:
        for told in (f"content-length: {len(body)}\r\n\r\n", "transfer-encoding: chunked\r\n\r\n"):
            framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if "chunked" in told else body
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write((head + told).encode() + framed)
            await writer.drain()  # the whole body is sent before anything is read, as simple clients do
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"larger than the 65536 bytes allowed" in answer
