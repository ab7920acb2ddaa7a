"""The bytes of an http(s): or file: URL, within limits. Blocks; call it in a worker thread.

It connects only to checked addresses (ssrf.py), also after redirects, and does not tell the caller which
addresses, ports or files exist.
"""

import contextlib
import http.client
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.media.cancellation import CancelToken, LoadingCancelled
from saccade.inputs.media.ssrf import (
    Resolve,
    Target,
    check_domain,
    parse_url,
    resolve_checked,
    system_resolve,
)

MediaKind = Literal["image", "video"]
Result = TypeVar("Result")
Connect = Callable[[str, int, float], socket.socket]  # address, port, seconds

_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_UNREACHED = "The URL could not be fetched."


def _connect(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=seconds)


@dataclass(frozen=True)
class Network:
    """How names are resolved and addresses connected to. Tests replace it."""

    resolve: Resolve = system_resolve
    connect: Connect = _connect


def fetch_bytes(
    url: str,
    limits: MediaLimits,
    kind: MediaKind = "image",
    network: Network | None = None,
    cancel: CancelToken | None = None,
) -> bytes:
    """The bytes of a URL, never more than the limit."""
    scheme = url[:8].partition(":")[0].lower()
    most = limits.max_bytes if kind == "image" else limits.max_video_bytes
    if scheme in ("http", "https"):
        return _from_network(url, limits, most, network or Network(), cancel or CancelToken())
    if scheme == "file":
        return _from_file(url, limits, most)
    raise MediaRefused(f"The {kind} is neither a data URI nor an http or https URL.")


# --- files -------------------------------------------------------------------------------------------------


def _from_file(url: str, limits: MediaLimits, most: int) -> bytes:
    refused = MediaRefused("This file may not be read; send the media as a data URI.")
    if limits.allowed_local_path is None:
        raise refused
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise refused
    try:
        folder = Path(os.path.realpath(limits.allowed_local_path, strict=True))
        file = Path(os.path.realpath(path, strict=True))
        if not file.is_relative_to(folder):
            raise refused
        return _read_within(file, folder, most, refused)
    except OSError:
        raise refused from None


def _read_within(file: Path, folder: Path, most: int, refused: MediaRefused) -> bytes:
    # The path is resolved; if its last part has become a link since, opening fails.
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as stream:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise refused
        opened = Path(f"/proc/self/fd/{handle}")
        if opened.exists() and not Path(os.path.realpath(opened)).is_relative_to(folder):
            raise refused  # a folder of the path was replaced by a link
        data = stream.read(most + 1)
    if len(data) > most:
        raise MediaRefused(f"The file has more than the {most} bytes allowed.")
    return data


# --- the network -------------------------------------------------------------------------------------------


def _from_network(url: str, limits: MediaLimits, most: int, network: Network, cancel: CancelToken) -> bytes:
    stop = CancelToken()  # cancelled by the caller or at the deadline
    deadline = threading.Timer(limits.fetch_timeout, stop.cancel)
    deadline.daemon = True
    deadline.start()
    try:
        with cancel.on_cancel(stop.cancel):
            return _follow(url, limits, most, network, stop)
    except (MediaRefused, LoadingCancelled):
        cancel.raise_if_cancelled()
        if stop.cancelled:
            text = f"The URL did not send everything within {limits.fetch_timeout:g} seconds."
            raise MediaRefused(text) from None
        raise
    finally:
        deadline.cancel()


def _follow(url: str, limits: MediaLimits, most: int, network: Network, stop: CancelToken) -> bytes:
    for _ in range(limits.max_redirects + 1):
        target = parse_url(url)
        check_domain(target.host, limits)
        try:
            answer = _get(target, limits, most, network, stop)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MediaRefused(_UNREACHED) from error
        stop.raise_if_cancelled()  # a body without a length looks complete when its socket is shut down
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer.location)
    raise MediaRefused(f"The URL redirects more than {limits.max_redirects} times.")


@dataclass(frozen=True)
class _Redirect:
    location: str


def _get(
    target: Target, limits: MediaLimits, most: int, network: Network, stop: CancelToken
) -> bytes | _Redirect:
    """One request to one checked address; the body or a redirect."""
    addresses = _in_thread(lambda: resolve_checked(target, limits, network.resolve), stop)

    def connect() -> socket.socket:
        for address in addresses[:-1]:
            stop.raise_if_cancelled()
            with contextlib.suppress(OSError):
                return network.connect(address, target.port, limits.fetch_timeout)
        return network.connect(addresses[-1], target.port, limits.fetch_timeout)

    raw = _in_thread(connect, stop, discard=socket.socket.close)
    with contextlib.closing(_secure(raw, target, stop)) as sock, stop.on_cancel(_shut_down(sock)):
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock, connection.auto_open = sock, 0  # never reconnects to an unchecked address
        connection.putrequest("GET", target.path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", target.authority)
        connection.putheader("User-Agent", "saccade")
        connection.putheader("Accept", "image/*, video/*")
        connection.putheader("Accept-Encoding", "identity")  # no decompression bombs
        connection.putheader("Connection", "close")
        connection.endheaders()
        with connection.getresponse() as response:
            return _body(response, most)


def _in_thread(
    work: Callable[[], Result], stop: CancelToken, discard: Callable[[Result], None] | None = None
) -> Result:
    """Runs what cannot be interrupted (look-up, connecting) in a thread; `discard` gets a late result."""
    outcome: Future[Result] = Future()
    over = threading.Event()
    outcome.add_done_callback(lambda done: over.set())

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    def late(done: "Future[Result]") -> None:
        if discard is not None and not done.exception():
            discard(done.result())

    threading.Thread(target=run, daemon=True, name="fetch").start()
    try:
        with stop.on_cancel(over.set):
            over.wait()
        if not outcome.done():
            stop.raise_if_cancelled()
    except LoadingCancelled:
        outcome.add_done_callback(late)
        raise
    return outcome.result()


def _body(response: http.client.HTTPResponse, most: int) -> bytes | _Redirect:
    if response.status in _REDIRECTS:
        location = response.getheader("Location")
        if not location:
            raise MediaRefused(_UNREACHED)
        return _Redirect(location)
    if response.status != 200:
        raise MediaRefused(f"The URL was answered with status {response.status}.")
    if response.getheader("Content-Encoding", "identity").lower() != "identity":
        raise MediaRefused("The URL was answered with compressed content, which is not accepted.")
    too_large = MediaRefused(f"The URL sends more than the {most} bytes allowed.")
    if response.length is not None and response.length > most:
        raise too_large
    data = bytearray()
    while chunk := response.read(_CHUNK):
        data += chunk
        if len(data) > most:
            raise too_large
    if response.length:  # the body is shorter than its Content-Length
        raise MediaRefused(_UNREACHED)
    return bytes(data)


def _secure(raw: socket.socket, target: Target, stop: CancelToken) -> socket.socket:
    """The socket itself for http; for https a TLS socket, checked against the host name."""
    if target.scheme == "http":
        return raw
    secure = _tls().wrap_socket(raw, server_hostname=target.host, do_handshake_on_connect=False)
    try:
        with stop.on_cancel(_shut_down(secure)):
            secure.do_handshake()
        return secure
    except BaseException:
        secure.close()
        raise


def _shut_down(sock: socket.socket) -> Callable[[], None]:
    """Ends every read and write of a socket, below TLS; closing it would only free its descriptor."""

    def shut_down() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    return shut_down


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
