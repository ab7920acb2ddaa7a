"""Counts the files and functions that one request executes, from the ASGI application to its last token.

    python -m bench.trace_request [--kind image] [--kind text] [--list]

The API server and the engine core run in one process, without a socket between them. A first request of the
same kind warms everything up; the second one is traced in every thread. Only code of the package counts.
"""

import asyncio
import base64
import json
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click

import saccade
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig, ServeConfig
from saccade.engine.core import Engine
from saccade.engine.ipc import EngineInfo
from saccade.inputs.processor import InputProcessor
from saccade.metrics import EngineStats
from saccade.request import Delta, Request
from saccade.server.app import create_app

PACKAGE = Path(saccade.__file__).parent
EXAMPLES = PACKAGE / "embedded" / "examples"


class InProcessEngine:
    """An engine core stepped by a thread of this process, behind the API server's engine interface."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: queue.SimpleQueue[tuple[Request, asyncio.AbstractEventLoop, asyncio.Queue[Delta]]] = (
            queue.SimpleQueue()
        )

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def alive(self) -> bool:
        return True

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def cancel(self, request_id: str) -> None:
        raise NotImplementedError("traced requests are not cancelled")

    async def image_tiers(self, content: bytes, *, delete: bool = False) -> dict[str, int]:
        raise NotImplementedError("traced requests name no cached image")

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        outputs: asyncio.Queue[Delta] = asyncio.Queue()
        self._requests.put((request, asyncio.get_running_loop(), outputs))
        while True:
            delta = await outputs.get()
            yield delta
            if delta.finish is not None:
                return

    def serve_one(self) -> None:
        """Runs in a thread: answer the next request."""
        request, loop, outputs = self._requests.get()
        self._engine.submit(request)
        while not self._engine.idle:
            for delta in self._engine.step():
                loop.call_soon_threadsafe(outputs.put_nowait, delta)


class Tracer:
    """Installed before any thread starts; records only while `recording` is active."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self._enabled = False
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if self._enabled and event == "call":
            self.codes.add(frame.f_code)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._enabled = True
        try:
            yield
        finally:
            self._enabled = False
            sys.setprofile(None)
            threading.setprofile(None)

    def functions(self) -> dict[str, set[str]]:
        """Names of the executed functions by file; comprehensions and lambdas belong to their function."""
        found: dict[str, set[str]] = {}
        for code in self.codes:
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) and not code.co_name.startswith("<"):
                found.setdefault(str(path.relative_to(PACKAGE)), set()).add(code.co_qualname)
        return found


def body(kind: str, number: int) -> bytes:
    text = {"type": "text", "text": "What is the total amount?" + " Please." * number}
    content: list[dict[str, Any]] = [text]
    if kind == "image":
        image = sorted(EXAMPLES.glob("*.png"))[number]
        url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    message = {"role": "user", "content": content}
    request = {"model": "embedded", "messages": [message], "max_tokens": 8, "temperature": 0, "stream": True}
    return json.dumps(request).encode()


async def post(app: Any, data: bytes) -> bytes:
    """One POST through the ASGI interface; the whole response body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "headers": [(b"host", b"127.0.0.1"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    sent = False
    received = b""

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal received
        received += message.get("body", b"")

    await app(scope, receive, send)
    return received


def trace(kind: str) -> Tracer:
    tracer = Tracer()
    config = EngineConfig(model="embedded", device="cpu")
    engine = InProcessEngine(Engine(config, progress=False))
    processor = InputProcessor(open_checkpoint("embedded"), engine.info.max_model_len)
    app = create_app(processor, engine, ServeConfig())

    def run(number: int) -> None:
        worker = threading.Thread(target=engine.serve_one)
        worker.start()
        answer = asyncio.run(post(app, body(kind, number)))
        worker.join()
        if b"[DONE]" not in answer:
            raise click.ClickException(f"the request failed: {answer.decode()[:500]}")

    run(0)
    with tracer.recording():
        run(1)
    processor.close()
    return tracer


@click.command(help=__doc__)
@click.option(
    "--kind", "kinds", type=click.Choice(["image", "text"]), multiple=True, default=("image", "text")
)
@click.option("--list", "listed", is_flag=True, help="print every file with its functions")
def main(kinds: tuple[str, ...], listed: bool) -> None:
    for kind in kinds:
        found = trace(kind).functions()
        count = sum(map(len, found.values()))
        print(f"{kind}: {len(found)} files, {count} functions")
        for path, names in sorted(found.items()) if listed else ():
            print(f"  {path}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
