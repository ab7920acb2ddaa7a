"""The HTTP server: routes, and its life from the first connection to the drained end.

takes   a front and a started engine link
gives   an ASGI application; `serve` runs it until a signal, or until the engine is gone (run.py has both)
never   answers on any address but the one it was given
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from saccade import __version__
from saccade.config import ServeConfig
from saccade.engine.client import EngineLink
from saccade.errors import ConfigError, EngineDied, NotFound, Overloaded, SaccadeError, WrongMethod
from saccade.host.event_loop_lag import measure_event_loop_lag
from saccade.host.malloc import HeapTrimmer
from saccade.inputs.processor import InputProcessor
from saccade.metrics import CONTENT_TYPE
from saccade.server.asgi import body_of, headers_of, internal_error
from saccade.server.auth import Guard
from saccade.server.http_protocol import LimitedProtocol, ServerConfig
from saccade.server.images_api import add_images
from saccade.server.lod_preview import PreviewExchange
from saccade.server.openai_schema import ChatBody, CompletionBody
from saccade.server.openai_serving import GenerationExchange
from saccade.server.state import Service

log = logging.getLogger("saccade.server")

KEEP_ALIVE_SECONDS = 30  # an idle connection is kept; longer than common proxies reuse one
FLUSH_SECONDS = 2  # for the last bytes of ended answers to reach their clients
BACKLOG = 2048
ENGINE_POLL_SECONDS = 0.25


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(error: SaccadeError) -> Response:
    headers = {name.decode(): value.decode() for name, value in headers_of(error)}
    return Response(body_of(error), error.status, headers)


class _Generation(Response):
    """Lets a FastAPI route hand the connection to an exchange, which reads and writes by itself."""

    def __init__(self, exchange: GenerationExchange) -> None:
        super().__init__()
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchange(scope, receive, send)


def create_app(front: InputProcessor, link: EngineLink, config: ServeConfig) -> Guard:
    """The application. `link` is started; the names of the model are the config's, or the checkpoint's."""
    service = Service(front, link, config)
    app = FastAPI(title="Saccade", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_generation(app, service)
    _add_models(app, service)
    add_images(app, service)
    _add_state(app, service)
    _add_errors(app)
    return Guard(app, service)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        return _Generation(GenerationExchange(service, ChatBody))

    @app.post("/v1/completions")
    async def completions() -> Response:
        return _Generation(GenerationExchange(service, CompletionBody))

    @app.post("/v1/lod/preview")
    async def preview() -> Response:
        return _Generation(PreviewExchange(service))


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "saccade",
            "max_model_len": service.link.info.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(card(service.model_name(name)))


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/")
    async def hint() -> Response:
        asked = "POST /v1/chat/completions, /v1/completions, /v1/lod/preview"
        routes = f"{asked}, GET /v1/models, /v1/images/HASH, /health, /ready, /metrics"
        return _json({"message": f"Saccade {__version__} serves {service.names[0]}: {routes}"})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        alive = service.link.alive
        return _json({"status": "alive" if alive else "engine died"}, 200 if alive else 503)

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        state = "draining" if service.draining else "ready" if service.link.alive else "engine died"
        return _json({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})


def _add_errors(app: FastAPI) -> None:
    async def known(request: HTTPRequest, error: Exception) -> Response:
        return _error(error if isinstance(error, SaccadeError) else internal_error())

    async def routing(request: HTTPRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 404:
            return _error(NotFound(f"there is no route {request.method} {request.url.path[:64]}"))
        if status == 405 and isinstance(error, HTTPException):
            allowed = (error.headers or {}).get("Allow", "")
            text = f"{request.url.path[:64]} does not take {request.method[:16]}; use {allowed}"
            response = _error(WrongMethod(text))
            response.headers["allow"] = allowed
            return response
        return _error(internal_error())

    app.add_exception_handler(SaccadeError, known)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(Exception, known)  # sent as it is; the guard logs it


# --- life -----------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `serve`'s: it drains before uvicorn stops listening."""
        yield


def bind(config: ServeConfig) -> socket.socket:
    """A bound socket, on which nothing listens yet; port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from error
    return listener


def _cannot_listen(config: ServeConfig, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror}")


async def serve(
    front: InputProcessor,
    link: EngineLink,
    config: ServeConfig,
    *,
    listener: socket.socket | None = None,
    started: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, then drains; the exit status: 0, or 1 if the engine died.

    `started` is called with the server's base URL once it answers. Setting `stop` is the same as a signal. A
    second signal ends everything at once.
    """
    listener = listener or bind(config)
    try:
        listener.listen(BACKLOG)  # the event loop would keep it to itself that this failed
    except OSError as error:
        raise _cannot_listen(config, error) from error
    app = create_app(front, link, config)
    server = _Server(
        ServerConfig(
            app,
            read_timeout=config.read_timeout,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            backlog=BACKLOG,
        )
    )
    stop, now = stop or asyncio.Event(), asyncio.Event()
    restore = _on_signals(stop, now)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if started is not None and server.started:
            started(_url(listener))
        async with measure_event_loop_lag(app.service.metrics.late.observe):
            died = await _until_over(app.service, stop, running)
        await _end(app.service, died, now)
    finally:
        server.should_exit = True
        server.force_exit = now.is_set()
        await asyncio.wait({running})
        app.service.close()
        restore()
    running.result()
    return 1 if died else 0


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _on_signals(stop: asyncio.Event, now: asyncio.Event) -> Callable[[], None]:
    """The first signal sets `stop`, the second `now`. Gives what puts things back."""
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        if stop.is_set():
            now.set()
        stop.set()

    added: list[signal.Signals] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller's business
            loop.add_signal_handler(number, signalled)
            added.append(number)

    def restore() -> None:
        for number in added:
            loop.remove_signal_handler(number)

    return restore


async def _until_over(service: Service, stop: asyncio.Event, running: asyncio.Task[None]) -> bool:
    """Waits for a signal or the engine's end; whether it was the engine's end. The heap is trimmed while
    nobody is being answered, and seldom otherwise: the loop waits for that."""
    heap = HeapTrimmer()
    while not stop.is_set() and not running.done():
        if not service.link.alive:
            return True
        if heap.overdue or (heap.due and not service.exchanges):
            await asyncio.to_thread(heap.trim)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), ENGINE_POLL_SECONDS)
    return False


async def _end(service: Service, died: bool, now: asyncio.Event) -> None:
    if died:
        log.error("the engine has stopped; the server exits")
        service.abort_all(EngineDied("the engine has stopped; the server is about to exit"))
    else:
        log.info("draining: %d requests are being answered", len(service.exchanges))
    drain = asyncio.create_task(service.drain(0.0 if died else service.config.shutdown_timeout))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        service.abort_all(Overloaded("the server was told to stop at once"))
    for task in (drain, hurry):
        task.cancel()
    await asyncio.wait({drain, hurry})
