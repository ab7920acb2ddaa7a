"""Disconnects, timeouts, drain and shutdown, and the end of the engine."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from saccade.config import ServeConfig
from saccade.errors import ConfigError, Overloaded
from saccade.inputs.processor import InputProcessor
from saccade.server import launch, request_handler
from saccade.server.app import create_app
from saccade.server.json_body import ABORT_CONNECTION
from saccade.server.launch import bind, serve
from tests.server.conftest import MODEL, Site, running
from tests.server.fakes import ANSWER, FakeLink
from tests.server.test_streaming import events

ROOT = Path(__file__).parents[2]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


async def until(condition: Callable[[], object]) -> None:
    """Waits for something that must happen; the deadline only keeps a broken build from hanging."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def told(answer: httpx.Response) -> Any:
    """The code of an error, whether it came instead of the answer or in the middle of it."""
    error = answer.json() if answer.status_code != 200 else events(answer)[-1]
    return error["error"]["code"]


class Inline(ThreadPoolExecutor):
    """Does the work at once, so that a test's steps are the same every time."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **more))
        return future


class Visit:
    """One ASGI call to chat whose client can disconnect."""

    def __init__(self, site: Site, body: bytes, more_body: bool = False, stuck: bool = False) -> None:
        self.dropped = False
        self._stuck = stuck  # takes nothing of what is sent
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self._first: dict[str, Any] | None = {"type": "http.request", "body": body, "more_body": more_body}
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "root_path": "",
            ABORT_CONNECTION: self._drop,
        }
        self.task = asyncio.create_task(site.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        first, self._first = self._first, None
        if first is not None:
            return first
        await self.left.wait()
        return {"type": "http.disconnect"}

    def _drop(self) -> None:
        self.dropped = True

    async def _send(self, message: Any) -> None:
        if self._stuck:
            await asyncio.Event().wait()
        self.sent.append(dict(message))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["never", "hang"])
async def test_disconnected_client_is_cancelled(site: Site, text: str, stream: bool) -> None:
    """Before the first token (never) and after it (hang)."""
    body = httpx.Request("POST", "http://x", json=chat(text, stream=stream)).content
    visit = Visit(site, body)
    await until(lambda: site.link.open if text == "never" or not stream else visit.sent)
    visit.left.set()
    await visit.task
    assert site.link.cancelled == [site.link.requests[0].id]
    assert not site.link.open
    await site.well()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_may_disconnect_at_any_step(site: Site, stream: bool) -> None:
    """Whatever the handler is doing, nothing of the request is left."""
    site.app.state.text_threads = Inline()
    body = httpx.Request("POST", "http://x", json=chat("say: a few words", stream=stream)).content
    for steps in range(100):
        visit = Visit(site, body)
        for _ in range(steps):
            await asyncio.sleep(0)
        visit.left.set()
        await visit.task
        assert not site.link.open
        assert not site.app.state.active
        assert site.app.state._body_bytes == 0
    assert 0 < len(site.link.cancelled) < len(site.link.requests)
    await site.well()


async def test_client_disconnects_while_its_body_arrives(site: Site) -> None:
    visit = Visit(site, b'{"model"', more_body=True)
    await asyncio.sleep(0)
    visit.left.set()
    await visit.task
    assert not visit.sent
    assert not site.link.requests
    assert site.app.state._body_bytes == 0
    await site.well()


async def test_client_disconnects_while_its_request_is_prepared(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an image is fetched or decoded: the engine never gets the request."""
    loop = asyncio.get_running_loop()
    entered, go_on = asyncio.Event(), asyncio.Event()
    prepare = site.app.state.processor.prepare_chat

    def slow(*arguments: Any, **more: Any) -> Any:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
        return prepare(*arguments, **more)

    monkeypatch.setattr(site.app.state.processor, "prepare_chat", slow)
    visit = Visit(site, httpx.Request("POST", "http://x", json=chat("x")).content)
    await entered.wait()
    visit.left.set()
    await visit.task
    go_on.set()
    monkeypatch.undo()
    assert not site.link.requests
    await site.well()


async def test_server_that_stops_the_task_cancels_the_request(site: Site) -> None:
    visit = Visit(site, httpx.Request("POST", "http://x", json=chat("hang", stream=True)).content)
    await until(lambda: visit.sent)
    visit.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visit.task
    await until(lambda: not site.link.open)
    assert site.link.cancelled


async def test_socket_that_closes_is_cancelled(front: InputProcessor, link: FakeLink) -> None:
    async with running(front, link) as url, httpx.AsyncClient() as client:
        async with client.stream(
            "POST", f"{url}/v1/chat/completions", json=chat("hang", stream=True)
        ) as answer:
            async for line in answer.aiter_lines():
                if ANSWER[0] in line:
                    break
        await until(lambda: link.cancelled)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}/v1/chat/completions", json=chat("hang"), timeout=0.1)
        await until(lambda: len(link.cancelled) == 2)
        assert not link.open


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_of_a_request(front: InputProcessor, link: FakeLink, stream: bool) -> None:
    site = Site(create_app(front, link, ServeConfig(request_timeout=0.1)), link)
    answer = await site.chat("hang", stream=stream)
    assert told(answer) == "request_timeout"
    assert answer.status_code == 504 or stream
    assert link.cancelled == [link.requests[0].id]


async def test_drain_refuses_new_requests_and_finishes_running_ones(
    front: InputProcessor, link: FakeLink
) -> None:
    link.pause = 0.01
    site = Site(create_app(front, link, ServeConfig()), link)
    text = "say: " + "x" * 30
    old = asyncio.create_task(site.chat(text))
    await until(lambda: link.open)
    drained = asyncio.create_task(site.app.state.drain(20))
    await asyncio.sleep(0)
    assert (await site.get("/ready")).status_code == 503
    assert (await site.get("/health")).status_code == 200
    new = await site.chat("x")
    assert (new.status_code, new.json()["error"]["code"]) == (503, "overloaded")
    assert int(new.headers["retry-after"]) >= 1
    assert (await old).json()["choices"][0]["message"]["content"] == "x" * 30
    await drained


async def test_drain_aborts_unfinished_requests_with_an_error(site: Site) -> None:
    streamed = asyncio.create_task(site.chat("hang", stream=True))
    whole = asyncio.create_task(site.chat("hang"))
    await until(lambda: len(site.link.open) == 2)
    await site.app.state.drain(0.05)
    assert told(await streamed) == "overloaded"
    assert (await whole).status_code == 503
    assert sorted(site.link.cancelled) == sorted(request.id for request in site.link.requests)


async def test_drain_does_not_wait_for_incomplete_bodies(site: Site) -> None:
    visit = Visit(site, b'{"model"', more_body=True)
    await until(lambda: site.app.state._body_bytes)
    await site.app.state.drain(0.05)
    await visit.task
    assert visit.sent[0]["status"] == 503


@pytest.mark.parametrize("steps", range(12))
async def test_abort_at_any_step_is_answered(site: Site, steps: int) -> None:
    """The drain may abort a request anywhere, also between its body and its first engine step."""
    visit = Visit(site, httpx.Request("POST", "http://x", json=chat("hang")).content)
    while not site.app.state.active:
        await asyncio.sleep(0)
    for _ in range(steps):
        await asyncio.sleep(0)
    site.app.state.abort_all(Overloaded("too late"))
    await visit.task
    assert visit.sent[0]["status"] == 503
    assert not site.link.open


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_does_not_read_is_dropped_at_the_deadline(
    front: InputProcessor, link: FakeLink, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its error cannot be sent either; the connection is closed with its unsent bytes."""
    monkeypatch.setattr(request_handler, "ERROR_SECONDS", 0.05)
    site = Site(create_app(front, link, ServeConfig(request_timeout=0.2)), link)
    visit = Visit(site, httpx.Request("POST", "http://x", json=chat("x", stream=stream)).content, stuck=True)
    await visit.task
    assert visit.dropped
    assert not link.open


async def test_dead_engine_shows_in_health_and_in_every_response(site: Site) -> None:
    other = asyncio.create_task(site.chat("hang"))
    await until(lambda: site.link.open)
    assert (await site.chat("die")).json()["error"]["code"] == "engine_died"
    for path in ("/health", "/ready"):
        assert (await site.get(path)).status_code == 503
    after = await site.chat("x")
    assert (after.status_code, after.json()["error"]["code"]) == (503, "engine_died")
    other.cancel()


async def test_bodies_in_memory_are_bounded(front: InputProcessor, link: FakeLink) -> None:
    site = Site(create_app(front, link, ServeConfig(max_body_bytes=1000)), link)
    state = site.app.state
    state.count_body_bytes(15_900)
    answer = await site.chat("x" * 500)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    with pytest.raises(Overloaded):
        state.count_body_bytes(101)
    state.count_body_bytes(-15_900 - 101)
    assert state._body_bytes == 0
    await site.well()


async def test_generating_requests_hold_no_body(site: Site) -> None:
    visit = Visit(site, httpx.Request("POST", "http://x", json=chat("hang")).content)
    await until(lambda: site.link.open)
    assert site.app.state._body_bytes == 0
    visit.left.set()
    await visit.task


async def test_port_in_use_is_a_clear_error(front: InputProcessor, link: FakeLink) -> None:
    """Whether it is taken before the server binds it or between binding and listening."""
    with bind(ServeConfig(port=0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1])
        late = bind(config)
        taken.listen()
        with pytest.raises(ConfigError, match=f"port {config.port}"):
            bind(config)
        with pytest.raises(ConfigError, match=f"port {config.port}"):
            await serve(front, link, config, listener=late)


# --- a process of its own -------------------------------------------------------------------------------


@asynccontextmanager
async def server_process(
    folder: Path, shutdown: float = 20.0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.server.fake_server", str(folder / MODEL), str(shutdown)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    try:
        if process.stdout is None:
            raise RuntimeError("no output")
        async with asyncio.timeout(60):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_drains_and_exits_zero_without_torch(tmp_path: Path) -> None:
    async with server_process(tmp_path) as (process, url), httpx.AsyncClient(timeout=30) as client:
        gate = tmp_path / "go on"
        body = chat(f"wait for {gate}", stream=True)
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            await _becomes(client, f"{url}/ready", 503)
            refused = await client.post(f"{url}/v1/chat/completions", json=chat("x"))
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            gate.touch()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"stop"' in rest[-2]
        assert await process.wait() == 0
        assert process.stdout is not None
        assert (await process.stdout.read()).decode().strip() == "no torch"


async def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with server_process(tmp_path, 1000) as (process, url), httpx.AsyncClient(timeout=30) as client:
        body = chat("hang", stream=True)
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            await _becomes(client, f"{url}/ready", 503)
            process.send_signal(signal.SIGINT)
            rest = [line async for line in lines if line]
        assert '"error"' in rest[-1]
        assert await process.wait() == 0


async def test_shutdown_timeout_bounds_the_drain(tmp_path: Path) -> None:
    async with server_process(tmp_path, 0.2) as (process, url), httpx.AsyncClient(timeout=30) as client:
        body = chat("hang", stream=True)
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        assert '"error"' in rest[-1]
        assert await process.wait() == 0


async def test_dead_engine_ends_the_server_with_a_failure(tmp_path: Path) -> None:
    async with server_process(tmp_path) as (process, url), httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json=chat("die"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
        assert await process.wait() == 1


async def _becomes(client: httpx.AsyncClient, url: str, status: int) -> None:
    async with asyncio.timeout(20):
        while (await client.get(url)).status_code != status:
            await asyncio.sleep(0.01)


async def test_heap_is_trimmed_when_idle_or_overdue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop stalls meanwhile, and with it all streams."""
    trims: list[str] = []
    heap = SimpleNamespace(due=True, overdue=False, trim=lambda: trims.append("trim"))
    monkeypatch.setattr(launch, "HeapTrimmer", lambda: heap)
    monkeypatch.setattr(launch, "ENGINE_POLL_SECONDS", 0.001)
    state: Any = SimpleNamespace(engine=SimpleNamespace(alive=True), active={"somebody"})
    running: Any = asyncio.get_running_loop().create_future()
    over = asyncio.create_task(launch._wait_for_end(state, asyncio.Event(), running))
    await asyncio.sleep(0.1)
    assert not trims
    heap.overdue = True
    await asyncio.sleep(0.1)
    assert trims
    heap.overdue = False
    state.active.clear()
    await asyncio.sleep(0.05)
    trims.clear()
    await asyncio.sleep(0.1)
    assert trims
    state.engine.alive = False
    assert await over
