"""A real input processor and the real server with a scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from saccade.config import ServeConfig
from saccade.inputs.processor import InputProcessor
from saccade.server.app import AuthMiddleware, create_app
from saccade.server.launch import serve
from tests.server.fakes import FakeLink, make_processor

MODEL = "tiny"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The event loop of the server."""
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    return make_processor(Path(tmp_path_factory.mktemp("checkpoint")) / MODEL)


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@dataclass
class Site:
    """A server in this process, called without a network."""

    app: AuthMiddleware
    link: FakeLink
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=self.headers
        ) as client:
            return await client.request(method, path, **options)

    async def get(self, path: str) -> httpx.Response:
        return await self.send("GET", path)

    async def post(self, path: str, body: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return await self.send("POST", path, content=body, headers=JSON)
        return await self.send("POST", path, json=body)

    async def chat(self, text: Any = "hello", **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **more})

    async def complete(self, prompt: Any = "hello", **more: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **more})

    async def well(self) -> None:
        """A good request still works and nothing of the earlier ones is left."""
        answer = await self.chat("say: fine")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "fine"
        assert (await self.get("/health")).status_code == 200
        assert not self.link.open
        assert not self.app.state.active


@pytest.fixture
def site(front: InputProcessor, link: FakeLink) -> Site:
    return Site(create_app(front, link, ServeConfig()), link)


@asynccontextmanager
async def running(front: InputProcessor, link: FakeLink, **options: Any) -> AsyncIterator[str]:
    """A real server on a free port; its address."""
    where: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = ServeConfig(port=0, **{"shutdown_timeout": 0.2, **options})
    stop = asyncio.Event()
    task = asyncio.create_task(serve(front, link, config, on_started=where.set_result, stop=stop))
    try:
        yield await where
    finally:
        stop.set()
        await task
