"""The gate in front of every route.

takes   every ASGI call
gives   401 without a right key, 500 for what nobody foresaw, a count of every response
never   lets a path through because it looks unlike the others: without a key only the open paths answer
"""

import hashlib
import hmac
import logging

from saccade.errors import NotAllowed
from saccade.server.asgi import SALT, App, Message, Receive, Scope, Send, internal_error, send_error
from saccade.server.state import Service

log = logging.getLogger("saccade.server")

OPEN = frozenset({"/health", "/ready"})  # probes have no key
LEFT = 499  # the client was gone before a status was sent
_ROUTES = frozenset(
    {
        "/",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/lod/preview",
        "/v1/models",
        "/v1/images",
        "/health",
        "/ready",
        "/metrics",
        "/version",
    }
)


class Guard:
    def __init__(self, app: App, service: Service) -> None:
        self._app = app
        self.service = service
        self._keys = [_digest(key.encode()) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = LEFT

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            scope[SALT] = self._tenant(scope)
            await self._app(scope, receive, counted)
        except NotAllowed as error:
            await send_error(counted, error)
        except Exception:
            log.exception("a request to %r failed", scope["path"][:64])
            if status == LEFT:
                await send_error(counted, internal_error())
        finally:
            self.service.metrics.responses.labels(_route(scope["path"]), str(status)).inc()

    def _tenant(self, scope: Scope) -> bytes:
        """Who is asking, as a salt for caches; empty on a server without keys."""
        if not self._keys or scope["path"] in OPEN:
            return b""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        # Every key is compared, and digests of one length: the time tells nothing about the keys.
        known = sum(hmac.compare_digest(digest, one) for one in self._keys)
        if scheme.lower() != b"bearer" or not known:
            raise NotAllowed("a valid API key is needed: send it as 'Authorization: Bearer KEY'")
        return digest


def _route(path: str) -> str:
    """A label of which there are few, whatever clients ask for."""
    for many in ("/v1/models", "/v1/images"):
        path = many if path.startswith(many + "/") else path
    return path if path in _ROUTES else "other"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"saccade tenant\0" + key).digest()
