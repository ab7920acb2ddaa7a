"""uvicorn's HTTP/1.1 protocol with a limit on header size and on the time a request takes to arrive.

Responds 431 to headers over the limit, 408 to a request that does not arrive, 400 to bytes that are not HTTP.
"""

import asyncio
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState as UvicornState

from saccade.errors import BodyTooSlow, HeadersTooLarge, InvalidHTTP, SaccadeError
from saccade.server.json_body import ABORT_CONNECTION, error_body, send_error

MAX_HEADER_BYTES = 64 << 10  # request line and headers
# Closing a socket with unread bytes sends a reset, which may overtake the response.
LINGER_SECONDS = 2.0
_HEADERS_TOO_LARGE = HeadersTooLarge(
    f"the request's headers are larger than the {MAX_HEADER_BYTES} bytes allowed; send fewer or shorter ones"
)


async def _refuse_headers(scope: Scope, receive: Receive, send: Send) -> None:
    await send_error(send, _HEADERS_TOO_LARGE)


class UvicornConfig(Config):
    """uvicorn's options and ours: `read_timeout` is seconds from a request's first byte to its last."""

    def __init__(self, app: ASGIApp, *, read_timeout: float, **options: Any) -> None:
        super().__init__(app, **options)
        self.read_timeout = read_timeout


class LimitedHttpProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._read_timeout = config.read_timeout if isinstance(config, UvicornConfig) else 60.0
        self._header_bytes = 0  # of the request being read
        self._in_headers = True
        self._lingering = False  # an error was sent; further bytes are dropped
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_read_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering or self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_headers and not self._lingering:
            # Incomplete headers are counted as they arrive, complete ones in on_headers_complete.
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse_and_close(_HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._in_headers = True
        self._start_read_timer()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        app = self.app
        if size > MAX_HEADER_BYTES:
            self.url = b"/"  # the URL parser rejects a path of that length
            self.app = _refuse_headers
        cast("dict[str, Any]", self.scope)[ABORT_CONNECTION] = self.transport.abort
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    def on_message_complete(self) -> None:
        self._cancel_read_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse_and_close(InvalidHTTP("this is not an HTTP request"))

    def _start_read_timer(self) -> None:
        self._cancel_read_timer()
        self._read_timer = self.loop.call_later(self._read_timeout, self._on_read_timeout)

    def _cancel_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_read_timeout(self) -> None:
        """Ends incomplete headers, and a body that no route reads; `read_body` has its own timeout."""
        if self._lingering or self.transport.is_closing():
            return
        if self._in_headers:
            seconds = f"{self._read_timeout:g} seconds"
            self._refuse_and_close(
                BodyTooSlow(f"the request did not arrive within {seconds}; send it faster")
            )
        elif self._response_pending():
            self._start_read_timer()
        else:
            self.transport.close()

    def _response_pending(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _refuse_and_close(self, error: SaccadeError) -> None:
        """Send the error, unless another response is under way or due first on this connection; close it."""
        reading = not self._in_headers and not self.pipeline and not self.cycle.response_started
        if not self.transport.is_closing() and (reading or not self._response_pending()):
            body = error_body(error)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
            self._lingering = True
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()
