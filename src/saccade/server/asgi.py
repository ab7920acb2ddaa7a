"""JSON responses and OpenAI error bodies over ASGI, and our keys in an ASGI scope."""

import msgspec
from starlette.types import Send

from saccade.errors import BodyTooSlow, HeadersTooLarge, NotAllowed, Overloaded, SaccadeError

Headers = list[tuple[bytes, bytes]]

TENANT_SALT = "saccade.salt"  # bytes: the tenant's cache salt, set by AuthMiddleware
ABORT_CONNECTION = "saccade.abort"  # closes the connection and drops unsent bytes, set by LimitedHttpProtocol


def internal_error() -> SaccadeError:
    """The error for an unexpected failure; its message carries no detail of the cause."""
    return SaccadeError("the server failed to answer this request; the failure has been logged")


def error_body(error: SaccadeError) -> bytes:
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_headers(error: SaccadeError) -> Headers:
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, NotAllowed):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", b"1"))
    if isinstance(error, BodyTooSlow | HeadersTooLarge):
        headers.append((b"connection", b"close"))
    return headers


async def send_error(send: Send, error: SaccadeError, *extra: tuple[bytes, bytes]) -> None:
    """Send the whole response for an error; nothing may have been sent before."""
    await send_body(send, error.status, error_body(error), [*error_headers(error), *extra])


async def send_body(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
