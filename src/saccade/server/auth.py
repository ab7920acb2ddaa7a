"""Middleware around every route: API keys, a neutral 500 for unexpected failures, the response counter."""

import hashlib
import hmac
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.errors import NotAllowed
from saccade.server.asgi import TENANT_SALT, internal_error, send_error
from saccade.server.generation import ServerState

log = logging.getLogger("saccade.server")

NO_KEY_NEEDED = frozenset({"/health", "/ready"})  # probes; every other path, known or not, needs a key
CLIENT_CLOSED = 499  # the client disconnected before a status was sent
_PLAIN_ROUTES = "/ /v1/chat/completions /v1/completions /v1/lod/preview /health /ready /metrics /version"
_NAMED_ROUTES = ("/v1/models", "/v1/images")  # a name may follow
ROUTES = frozenset((*_PLAIN_ROUTES.split(), *_NAMED_ROUTES))


class AuthMiddleware:
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
            await send_error(counted, error)
        except Exception:
            log.exception("a request to %r failed", scope["path"][:64])
            if status == CLIENT_CLOSED:
                await send_error(counted, internal_error())
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
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        # Constant time: every key is compared, as digests of equal length.
        matches = sum(hmac.compare_digest(digest, one) for one in self._digests)
        if scheme.lower() != b"bearer" or not matches:
            raise NotAllowed("a valid API key is needed: send it as 'Authorization: Bearer KEY'")
        return digest


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"saccade tenant\0" + key).digest()
