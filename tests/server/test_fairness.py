"""One request does not delay the others: not by its text, images or response, nor by disconnecting."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from saccade.inputs.media.cancellation import CancelToken
from saccade.request import Delta, Request
from saccade.server import generation, openai_serving, request_handler
from saccade.server.message_schema import UserMessage
from tests.server.client_checks import picture
from tests.server.conftest import MODEL, Site
from tests.server.fakes import FakeLink
from tests.server.test_lifetime import Visit, chat

LOOK = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "say: seen"}]


class Noting(ThreadPoolExecutor):
    """Counts submitted calls."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given = 0

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        self.given += 1
        return super().submit(work, *arguments, **more)


class Backlog(FakeLink):
    """All deltas are available at once, so that reading them never waits."""

    async def _generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        for place in range(request.sampling.max_tokens):
            last = place + 1 == request.sampling.max_tokens
            yield Delta(request_id=request.id, tokens=(97,), finish="length" if last else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_event_loop_runs_other_tasks_while_a_backlog_is_read(
    site: Site, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(generation, "LOOP_BUDGET_SECONDS", 0.0)  # every iteration is over its budget
    monkeypatch.setattr(site.app.state, "engine", Backlog())
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    answer = await site.chat("x", max_tokens=1000, stream=stream)
    counting.cancel()
    assert answer.status_code == 200
    assert turns > 400  # every second delta waits for a turn


async def test_all_requests_share_the_budget_of_one_loop_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, each does one more piece of work in an iteration that is over its budget."""
    now = 0.0
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now))
    budget = generation.LoopBudget()
    done = 0

    async def work() -> None:
        nonlocal now, done
        for _ in range(10):
            done += 1
            now += generation.LOOP_BUDGET_SECONDS
            await budget.yield_if_spent()

    tasks = [asyncio.create_task(work()) for _ in range(5)]
    await asyncio.sleep(0)
    assert done == 6  # the one who began the turn went on once
    await asyncio.gather(*tasks)


async def test_only_small_texts_are_prepared_on_the_event_loop(site: Site) -> None:
    texts, media = Noting(), Noting()
    site.app.state.text_threads, site.app.state.media_threads = texts, media
    assert (await site.chat("say: hi")).status_code == 200
    assert (await site.complete("say: hi")).status_code == 200
    assert (texts.given, media.given) == (0, 0)
    assert (await site.complete(["say: hi"] * 3)).status_code == 200  # one by one they would hold up others
    assert (texts.given, media.given) == (3, 0)
    texts.given = 0
    assert (
        await site.chat("say: " + "h" * request_handler.SMALL_BODY)
    ).status_code == 400  # more than the context
    assert (texts.given, media.given) == (1, 0)
    assert len(json.dumps(LOOK)) < request_handler.SMALL_BODY - 200  # its body is small too
    assert (await site.chat(LOOK)).status_code == 200
    assert (texts.given, media.given) == (1, 1)


async def test_requests_with_media_use_their_own_threads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handler, "SMALL_BODY", 0)
    texts, media = Noting(), Noting()
    site.app.state.text_threads, site.app.state.media_threads = texts, media
    assert (await site.chat("say: hi")).status_code == 200
    assert (texts.given, media.given) == (1, 0)
    assert (await site.complete("say: hi")).status_code == 200
    assert (texts.given, media.given) == (2, 0)
    assert (await site.chat(LOOK)).status_code == 200
    assert (texts.given, media.given) == (2, 1)


@pytest.mark.parametrize("way", ["client", "drain"])
async def test_cancelled_request_stops_its_loading_thread(
    site: Site, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    loop = asyncio.get_running_loop()
    entered, ended = asyncio.Event(), asyncio.Event()

    def slow(*arguments: Any, cancel: CancelToken, **more: Any) -> Any:
        over = threading.Event()
        with cancel.on_cancel(over.set):
            loop.call_soon_threadsafe(entered.set)
            over.wait()
        loop.call_soon_threadsafe(ended.set)
        cancel.raise_if_cancelled()

    monkeypatch.setattr(request_handler, "SMALL_BODY", 0)
    monkeypatch.setattr(site.app.state.processor, "prepare_chat", slow)
    visit = Visit(site, httpx.Request("POST", "http://x", json=chat("x")).content)
    await entered.wait()
    if way == "client":
        visit.left.set()
    else:
        await site.app.state.drain(0.0)
    await visit.task
    async with asyncio.timeout(20):
        await ended.wait()
    assert not site.link.requests


async def test_messages_are_converted_in_a_thread(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    where: set[threading.Thread] = set()
    real = UserMessage.model_dump

    def noted(self: UserMessage, **options: Any) -> Any:
        where.add(threading.current_thread())
        return real(self, **options)

    monkeypatch.setattr(request_handler, "SMALL_BODY", 0)
    monkeypatch.setattr(UserMessage, "model_dump", noted)
    await site.chat("say: hi")
    assert where
    assert threading.current_thread() not in where


@pytest.mark.parametrize(("limit", "threads"), [(0, 1), (10_000, 0)])
async def test_long_responses_are_encoded_in_a_thread(
    site: Site, monkeypatch: pytest.MonkeyPatch, limit: int, threads: int
) -> None:
    monkeypatch.setattr(request_handler, "LARGE_RESPONSE", limit)
    site.app.state.text_threads = pool = Noting()
    answer = await site.chat("say: hi", logprobs=True, top_logprobs=5)
    assert answer.json()["choices"][0]["message"]["content"] == "hi"
    assert pool.given == threads


async def test_logprobs_encoded_in_slices_are_the_same(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []
    for size in (1, 3, 1000):
        monkeypatch.setattr(openai_serving, "LOGPROBS_SLICE", size)
        answer = await site.chat("say: some words", logprobs=True, top_logprobs=2, n=2)
        bodies.append(answer.json()["choices"])
        assert len(bodies[-1][1]["logprobs"]["content"]) == 11
    assert bodies[0] == bodies[1] == bodies[2]


STUCK = """
import threading
from saccade.server import launch

async def ended(engine, config):
    threading.Thread(target=threading.Event().wait).start()
    return 3

launch._run_server = ended
launch.EXIT_SECONDS = 0.01
raise SystemExit(launch.run_server(None, None))
"""


def test_a_busy_thread_does_not_keep_the_process_alive() -> None:
    over = subprocess.run([sys.executable, "-c", STUCK], timeout=60, capture_output=True, check=False)
    assert over.returncode == 3, over.stderr


# --- content types and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"],
)
async def test_a_body_not_declared_as_json_is_415(site: Site, path: str, kind: str | None) -> None:
    """Other types, and none, a web page may send anywhere without asking."""
    body = json.dumps({**chat("say: hi"), "prompt": "x"}).encode()
    headers = {"origin": "http://evil.example"} | ({"content-type": kind} if kind else {})
    answer = await site.send("POST", path, content=body, headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert "application/json" in answer.json()["error"]["message"]
    assert not site.link.requests


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json "])
async def test_json_content_types_are_accepted(site: Site, kind: str) -> None:
    body = json.dumps({"model": MODEL, "messages": chat("x")["messages"]}).encode()
    answer = await site.send("POST", "/v1/chat/completions", content=body, headers={"content-type": kind})
    assert answer.status_code == 200


async def test_an_error_names_its_image(site: Site) -> None:
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = await site.chat([*LOOK, bad])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[2]"


async def test_too_long_prompt_names_the_prompt_parameter(site: Site) -> None:
    for prompt in ("x" * 3000, "x" * 3_000_000, [5] * 3000):
        answer = await site.complete(prompt)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "prompt"
