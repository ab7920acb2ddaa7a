"""The bytes of an http(s): or file: URL, within limits. Blocks; call it in a worker thread.

Against server-side request forgery it connects only to public addresses, also after redirects, refuses URLs
that two parsers could read differently, and does not tell the caller which addresses, ports or files exist.
"""

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.media.cancellation import CancelToken, LoadingCancelled

MediaKind = Literal["image", "video"]
Result = TypeVar("Result")
Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[[str, int, float], socket.socket]  # address, port, seconds

MAX_URL = 8192  # characters of an http URL
_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]*)?")
_ODD_HOST = "The URL's host is neither a name nor a plainly written address."
# The IPv6 space in public use, and the parts of it that embed IPv4 addresses (6to4, Teredo).
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
_EMBEDDED_V4 = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("2001::/32"))
_RELAY_V4 = ipaddress.ip_network("192.88.99.0/24")
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_UNREACHED = "The URL could not be fetched."


def system_resolve(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


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


# --- addresses ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A checked http or https URL."""

    scheme: str
    host: str  # lower case ASCII; an IPv6 address without brackets
    port: int
    path: str  # with the query

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Parses an http(s) URL strictly."""
    if len(url) > MAX_URL:
        raise MediaRefused(f"The URL has {len(url)} characters; at most {MAX_URL} are allowed.")
    if not all("!" <= character <= "~" for character in url) or "\\" in url:
        raise MediaRefused(
            "The URL contains a space, a backslash, a control or a non-ASCII character; percent-encode it"
            " (and write an international host name in its ASCII form)."
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaRefused("The URL cannot be read.") from error
    if parts.scheme not in _PORTS or not parts.netloc:
        raise MediaRefused("Only http and https URLs with a host are fetched.")
    if "@" in parts.netloc:
        raise MediaRefused("The URL contains a user name or '@' before the path; remove it.")
    if "#" in url:
        raise MediaRefused("The URL contains a fragment ('#...'); remove it.")
    if port == 0:
        raise MediaRefused("The URL has the port 0.")
    host = _host(parts.netloc)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def _host(netloc: str) -> str:
    """The host of a network location: a name or an address in its usual form."""
    if match := _BRACKETED.fullmatch(netloc):
        return _address(ipaddress.IPv6Address, match[1])
    host = netloc.partition(":")[0].lower().removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise MediaRefused(_ODD_HOST)
    # A name that ends in a number is an address; decimal, octal, hexadecimal and short forms are refused.
    return _address(ipaddress.IPv4Address, host) if _NUMBER.fullmatch(labels[-1]) else host


def _address(kind: Callable[[str], object], text: str) -> str:
    try:
        return str(kind(text))
    except ValueError:
        raise MediaRefused(_ODD_HOST) from None


def check_domain(host: str, limits: MediaLimits) -> None:
    """`allowed_domains` holds host names; one that begins with a dot allows all its subdomains."""
    allowed = limits.allowed_domains
    if allowed is None:
        return
    for domain in (entry.lower() for entry in allowed):
        if host == domain or (domain.startswith(".") and host.endswith(domain)):
            return
    raise MediaRefused("Media may not be fetched from this host; use an allowed one or send a data URI.")


def is_public(address: str) -> bool:
    """Whether the address is public and embeds no IPv4 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_multicast or not parsed.is_global:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed not in _RELAY_V4
    return parsed in _PUBLIC_V6 and not any(parsed in network for network in _EMBEDDED_V4)


def resolve_checked(target: Target, limits: MediaLimits, resolve: Resolve) -> list[str]:
    """The addresses of the host. If one of them is not public, none is used."""
    try:
        found = list(dict.fromkeys(resolve(target.host, target.port)))
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise MediaRefused("The URL's host is not known.")
    if not limits.allow_private_addresses and not all(is_public(address) for address in found):
        raise MediaRefused("The URL leads to an address that is not public; send the media as a data URI.")
    return found


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
        url = urljoin(url, answer)
    raise MediaRefused(f"The URL redirects more than {limits.max_redirects} times.")


def _get(target: Target, limits: MediaLimits, most: int, network: Network, stop: CancelToken) -> bytes | str:
    """One request to one checked address; the body, or the location of a redirect."""
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


def _body(response: http.client.HTTPResponse, most: int) -> bytes | str:
    if response.status in _REDIRECTS:
        location = response.getheader("Location")
        if not location:
            raise MediaRefused(_UNREACHED)
        return location
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
