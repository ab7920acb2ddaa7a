"""The ASGI application: routes, the image cache API, API keys, error responses."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable

import msgspec
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade import __version__
from saccade.config import ServeConfig
from saccade.engine.client import EngineInterface
from saccade.errors import InvalidValue, NotAllowed, NotFound, SaccadeError, TimedOut, WrongMethod
from saccade.inputs.media.image_names import image_not_found
from saccade.inputs.processor import InputProcessor
from saccade.metrics import CONTENT_TYPE
from saccade.server.anthropic_serving import CountTokensHandler, MessagesHandler, anthropic_error
from saccade.server.generation import ServerState
from saccade.server.json_body import TENANT_SALT, error_body, error_headers, internal_error, send_error
from saccade.server.lod_preview import PreviewHandler
from saccade.server.openai_serving import ChatHandler, CompletionHandler
from saccade.server.request_handler import GenerationHandler, GenerationRoute
from saccade.server.responses_serving import ResponsesHandler
from saccade.server.token_routes import DetokenizeHandler, TokenizeHandler

log = logging.getLogger("saccade.server")

NO_KEY_NEEDED = frozenset({"/health", "/ready"})  # probes; every other path, known or not, needs a key
CLIENT_CLOSED = 499  # the client disconnected before a status was sent
_PLAIN_ROUTES = """
    / /v1/chat/completions /v1/completions /v1/messages /v1/messages/count_tokens /v1/responses /v1/embeddings
    /tokenize /detokenize /v1/lod/preview /health /ready /metrics /version
"""
_ANTHROPIC = "/v1/messages"  # errors below it have Anthropic's format
_NAMED_ROUTES = ("/v1/models", "/v1/images")  # a name may follow
ROUTES = frozenset((*_PLAIN_ROUTES.split(), *_NAMED_ROUTES))


class AuthMiddleware:
    """Around every route: API keys, a neutral 500 for unexpected failures, the response counter."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self.state = state
        self._digests = [_digest(key.encode()) for key in state.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        status = CLIENT_CLOSED

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            scope[TENANT_SALT] = self._authenticate(scope)
            await self._app(scope, receive, counted)
        except NotAllowed as error:
            await send_error(counted, error, encode=_error_encoder(scope["path"]))
        except Exception:
            log.exception("a request to %r failed", scope["path"][:64])
            if status == CLIENT_CLOSED:
                await send_error(counted, internal_error(), encode=_error_encoder(scope["path"]))
        finally:
            path = scope["path"]
            for route in _NAMED_ROUTES:
                path = route if path.startswith(route + "/") else path
            # The number of labels is bounded whatever clients request.
            self.state.metrics.responses.labels(path if path in ROUTES else "other", str(status)).inc()

    def _authenticate(self, scope: Scope) -> bytes:
        """The tenant's salt for caches; empty on a server without keys."""
        if not self._digests or scope["path"] in NO_KEY_NEEDED:
            return b""
        # Anthropic's clients send the key as x-api-key.
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        given += [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        # Constant time: every key is compared, as digests of equal length.
        matches = sum(hmac.compare_digest(digest, one) for one in self._digests)
        if scheme.lower() != b"bearer" or not matches:
            message = "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise NotAllowed(message)
        return digest


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"saccade tenant\0" + key).digest()


def create_app(processor: InputProcessor, engine: EngineInterface, config: ServeConfig) -> AuthMiddleware:
    """The application; `engine` has been started."""
    state = ServerState(processor, engine, config)
    app = FastAPI(title="Saccade", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    handlers: dict[str, type[GenerationHandler]] = {
        "/v1/chat/completions": ChatHandler,
        "/v1/completions": CompletionHandler,
        "/v1/messages": MessagesHandler,
        "/v1/messages/count_tokens": CountTokensHandler,
        "/v1/responses": ResponsesHandler,
        "/tokenize": TokenizeHandler,
        "/detokenize": DetokenizeHandler,
        "/v1/lod/preview": PreviewHandler,
    }
    for path, handler in handlers.items():
        app.router.routes.append(Route(path, GenerationRoute(handler, state), methods=["POST"]))
    _add_models(app, state)
    _add_images(app, state)
    _add_status(app, state)
    _add_error_handlers(app)
    return AuthMiddleware(app, state)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _add_models(app: FastAPI, state: ServerState) -> None:
    def model_card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "saccade",
            "max_model_len": state.engine.info.max_model_len,
        }

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [model_card(name) for name in state.model_names]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        state.check_model(name)
        return _json(model_card(name))


def _add_images(app: FastAPI, state: ServerState) -> None:
    """Images a tenant has sent, by hash or uuid: whether their features are cached, and deleting them."""

    async def cached_views(content: bytes, *, drop: bool = False) -> dict[str, int]:
        limit = state.config.request_timeout
        try:
            async with asyncio.timeout(limit):
                return await state.engine.image_tiers(content, delete=drop)
        except TimeoutError:
            message = f"the engine did not answer within {limit:g} seconds; send the request again"
            raise TimedOut(message) from None

    @app.get("/v1/images/{name:path}")
    async def get_image(name: str, request: HTTPRequest) -> Response:
        hash_, content = state.processor.content(name, request.scope[TENANT_SALT])
        views = await cached_views(content)
        if not any(views.values()):
            raise image_not_found(name)
        return _json({"object": "image", "hash": hash_, "views": views})

    @app.delete("/v1/images/{name:path}")
    async def delete_image(name: str, request: HTTPRequest) -> Response:
        salt = request.scope[TENANT_SALT]
        hash_, content = state.processor.content(name, salt)
        views = await cached_views(content, drop=True)
        state.processor.forget_name(name, hash_, salt)  # unless it names another image by now
        return _json({"object": "image.deleted", "hash": hash_, "deleted": True, "views": views})


def _add_status(app: FastAPI, state: ServerState) -> None:
    @app.get("/")
    async def index() -> Response:
        generation = "POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/completions"
        routes = f"{generation}, GET /v1/models, /v1/images/HASH, /health, /ready, /metrics"
        return _json({"message": f"Saccade {__version__} serves {state.model_names[0]}: {routes}"})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        alive = state.engine.alive
        return _json({"status": "alive" if alive else "engine died"}, 200 if alive else 503)

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        status = "draining" if state.draining else "ready" if state.engine.alive else "engine died"
        return _json({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        message = "this model generates text and has no embeddings; use an embedding model for them"
        raise InvalidValue(message, param="model")

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})


def _error_encoder(path: str) -> Callable[[SaccadeError], bytes]:
    return anthropic_error if path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/") else error_body


def _error_response(error: SaccadeError, path: str) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(_error_encoder(path)(error), error.status, headers)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_error(request: HTTPRequest, error: Exception) -> Response:
        known = error if isinstance(error, SaccadeError) else internal_error()
        return _error_response(known, request.url.path)

    async def on_routing_error(request: HTTPRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 404:
            missing = NotFound(f"there is no route {request.method} {request.url.path[:64]}")
            return _error_response(missing, request.url.path)
        if status == 405 and isinstance(error, HTTPException):
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{request.url.path[:64]} does not take {request.method[:16]}; use {allowed}"
            response = _error_response(WrongMethod(message), request.url.path)
            response.headers["allow"] = allowed
            return response
        return _error_response(internal_error(), request.url.path)

    app.add_exception_handler(SaccadeError, on_error)
    app.add_exception_handler(HTTPException, on_routing_error)
    app.add_exception_handler(Exception, on_error)  # AuthMiddleware logs it
