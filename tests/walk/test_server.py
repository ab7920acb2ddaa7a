"""Requests from the socket to the model and back."""

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from saccade import LLM, SamplingParams
from tests.parity.oracle import picture
from tests.server import client_checks
from tests.walk.conftest import Server, children, command_line


def data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def body(text: str, *pictures: Image.Image, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": data_uri(one)}} for one in pictures]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"messages": [message], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def ask(server: Server, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"model": server.model, **fields}, timeout=60)


@pytest.mark.parametrize("check", client_checks.SYNC_CHECKS, ids=lambda check: check.__name__)
def test_official_client(server: Server, check: Callable[..., Any]) -> None:
    check(server.url, server.model)
    server.wait_until_empty()


async def test_official_async_client(server: Server) -> None:
    await client_checks.check_chat_async(server.url, server.model)


def test_concurrent_requests_over_http_equal_the_library(server: Server, vl_folder: Path) -> None:
    questions = [("What is it?", picture(90, 70, seed)) for seed in range(6)]
    questions += [("And this?", picture(200, 40, 3)), ("What is it?", picture(90, 70, 0))]
    llm = LLM(str(vl_folder), device="cpu", progress=False, num_blocks=256)
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    expected = []
    for text, image in questions:
        content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        expected.append(llm.chat([{"role": "user", "content": content}], params)[0].outputs[0].text)

    async def all_at_once() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{server.url}/v1/chat/completions"
            bodies = [{"model": server.model, **body(text, image)} for text, image in questions]
            answers = await asyncio.gather(*(client.post(url, json=one) for one in bodies))
        return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

    assert asyncio.run(all_at_once()) == expected
    server.wait_until_empty()


def test_a_repeated_question_reports_cached_tokens(server: Server) -> None:
    question = body("Is this known? " * 8, picture(128, 128, 77))
    first, second = (ask(server, **question).json()["usage"]["prompt_tokens_details"] for _ in range(2))
    assert first["visual_tokens"] == second["visual_tokens"] == 16
    assert second["cached_tokens"] > first["cached_tokens"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_api_server_never_loads_torch(server: Server) -> None:
    ask(server, **body("What?", picture(64, 64, 1)))
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.engine_pid}/maps").read_text()


def test_disconnects_at_any_moment_free_all_blocks(server: Server) -> None:
    rng = np.random.default_rng(0)

    async def leave_after(seconds: float, number: int) -> None:
        more = {"max_tokens": 400, "stream": number % 2 == 0}
        fields = {
            "model": server.model,
            **body("Tell me everything. " * 20, picture(100, 100, number), **more),
        }
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), httpx.AsyncClient(timeout=60) as client:
                url = f"{server.url}/v1/chat/completions"
                async with client.stream("POST", url, json=fields) as answer:
                    async for _ in answer.aiter_bytes():
                        pass

    async def crowd() -> None:
        await asyncio.gather(*(leave_after(float(rng.uniform(0.001, 1.0)), number) for number in range(30)))

    before = ask(server, **body("Still there?")).json()["choices"]
    asyncio.run(crowd())
    server.wait_until_empty()
    assert ask(server, **body("Still there?")).json()["choices"] == before


def test_sigterm_lets_a_running_stream_finish(start_server: Callable[..., Server]) -> None:
    server = start_server()
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        fields = {"model": server.model, **body("Count.", max_tokens=300, stream=True)}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=fields, timeout=120) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    server.process.send_signal(signal.SIGTERM)
    reader.join(120)
    assert server.process.wait(60) == 0
    assert lines[-2:] == ["data: [DONE]", ""]
    finishes = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    assert finishes[-1][0]["finish_reason"] == "length"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_startup_ends_both_processes(
    vl_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "saccade", "serve", str(vl_folder), "--port", "0", "--num-blocks", "64"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    engine = None
    while engine is None and process.poll() is None:
        engine = next(
            (one for one in children(process.pid) if b"saccade.engine.process" in command_line(one)), None
        )
    process.send_signal(number)
    status = process.wait(30)
    told = (tmp_path / "log").read_text()
    assert status == 128 + number, told
    assert "Traceback" not in told
    assert "serving" not in told
    assert engine is not None
    assert not Path(f"/proc/{engine}").exists()


def test_a_dead_engine_is_reported_and_ends_the_server(start_server: Callable[..., Server]) -> None:
    server = start_server()
    answers: list[httpx.Response] = []
    slow = threading.Thread(target=lambda: answers.append(ask(server, **body("Count.", max_tokens=3000))))
    slow.start()
    while server.gauge('saccade_requests{state="running"}') == 0:
        pass
    os.kill(server.engine_pid, signal.SIGKILL)
    slow.join(60)
    assert answers[0].status_code == 503
    assert "error" in answers[0].json()
    assert server.process.wait(60) == 1
