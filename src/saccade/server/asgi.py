"""The types of ASGI, and errors as they go over it.

takes   a `SaccadeError`
gives   OpenAI's JSON for it: {"error": {"message", "type", "param", "code"}}, and its HTTP headers
never   shows a class, a path or an address
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from saccade.errors import BodyTooSlow, NotAllowed, Overloaded, SaccadeError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def internal_error() -> SaccadeError:
    """What a client is told of a failure nobody foresaw: nothing about it."""
    return SaccadeError("the server failed to answer this request; the failure has been logged")


# Keys of ours in an ASGI scope.
SALT = "saccade.salt"  # the tenant, left by the guard
ABORT = "saccade.abort"  # drops the connection with everything unsent, left by the protocol


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Envelope(msgspec.Struct, frozen=True):
    error: _Error


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode(_Envelope(_Error(message, kind, param, code)))


def body_of(error: SaccadeError) -> bytes:
    return error_body(error.message, error.kind, error.param, error.code)


def headers_of(error: SaccadeError) -> Headers:
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, NotAllowed):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", b"1"))
    if isinstance(error, BodyTooSlow):
        headers.append((b"connection", b"close"))
    return headers


async def send_error(send: Send, error: SaccadeError, *extra: tuple[bytes, bytes]) -> None:
    """The whole response for an error; nothing may have been sent before."""
    await send_json(send, error.status, body_of(error), headers_of(error) + list(extra))


async def send_json(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def refuse_with(status: int, message: str, code: str) -> App:
    """An application that answers everything with one error."""
    body = error_body(message, "invalid_request_error", None, code)
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, status, body, headers)

    return refuse
