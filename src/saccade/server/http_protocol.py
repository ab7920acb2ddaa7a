"""uvicorn's HTTP/1.1 connection, with limits on the head of a request and on how long a request may trickle.

takes   bytes of a socket
gives   ASGI calls; 431 for a head over its limit, 408 for one that does not end, 400 for what is not HTTP
owns    one timer per connection
never   keeps more than the limit of an unfinished head
"""

import asyncio
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from saccade.server.asgi import ABORT, App, error_body, refuse_with

MAX_HEAD_BYTES = 64 << 10  # request line and headers
# Closing a socket with unread bytes resets it, and the reset overtakes the answer on its way to the client.
LINGER_SECONDS = 2.0
_TOO_LARGE = f"the request's headers are larger than the {MAX_HEAD_BYTES} bytes allowed"


class ServerConfig(Config):
    """uvicorn's options and ours: `read_timeout` is seconds from a request's first byte to its last."""

    def __init__(self, app: App, *, read_timeout: float, **options: Any) -> None:
        super().__init__(app, **options)
        self.read_timeout = read_timeout


class LimitedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._read_timeout = config.read_timeout if isinstance(config, ServerConfig) else 60.0
        self._head_bytes = 0  # of the request being read
        self._in_head = True
        self._lingering = False  # answered; what still comes is dropped
        self._arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering or self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head and not self._lingering:
            # An unfinished head is counted as it came; a finished one is measured in on_headers_complete.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._answer_and_close(431, _TOO_LARGE, "headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._in_head = True
        self._expect_arrival()

    def on_headers_complete(self) -> None:
        self._in_head = False
        head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        app = self.app
        if head > MAX_HEAD_BYTES:
            self.url = b"/"  # a path of that length is none to the parser
            self.app = refuse_with(431, _TOO_LARGE, "headers_too_large")
        cast("dict[str, Any]", self.scope)[ABORT] = self.transport.abort
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer_and_close(400, "this is not an HTTP request", "invalid_http")

    def _expect_arrival(self) -> None:
        self._arrived()
        self._arrival = self.loop.call_later(self._read_timeout, self._too_slow)

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_slow(self) -> None:
        """Ends a head that does not end and a body nobody reads; a body being read times out by itself."""
        if self._lingering or self.transport.is_closing():
            return
        if self._in_head:
            message = f"the request did not arrive within {self._read_timeout:g} seconds; send it faster"
            self._answer_and_close(408, message, "request_too_slow")
        elif self._answering():
            self._expect_arrival()
        else:
            self.transport.close()

    def _answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _answer_and_close(self, status: int, message: str, code: str) -> None:
        """Says why, unless an answer is under way (or due first) on this connection; ends it."""
        reading = not self._in_head and not self.pipeline and not self.cycle.response_started
        if not self.transport.is_closing() and (reading or not self._answering()):
            body = error_body(message, "invalid_request_error", None, code)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
            self._lingering = True
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()
