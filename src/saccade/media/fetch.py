"""Bytes of a picture or video from where its URL says, within limits.

takes   a data:, http(s): or file: URL; `MediaLimits`
gives   the encoded bytes, never more than the limit
never   connects to an address that was not checked; follows a redirect unchecked; waits past the deadline;
        tells the caller which addresses, ports or files exist

Blocks; call it in a worker thread.
"""

import base64
import binascii
import contextlib
import http.client
import io
import os
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urljoin, urlsplit

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.media.address import Resolve, Target, addresses, check_domain, parse, system_resolve
from saccade.media.decode import sniff
from saccade.media.video import sniff_video

Kind = Literal["image", "video"]
Connect = Callable[[str, int, float], socket.socket]  # address, port, seconds

_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_DATA = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)((?:;[^;,]*)*),", re.IGNORECASE)
_MIME = {
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/png": "PNG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/x-ms-bmp": "BMP",
    "video/mp4": "mp4",
    "video/quicktime": "mp4",
    "video/x-m4v": "mp4",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
}
_UNREACHED = "The URL could not be fetched."


def _connect(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=seconds)


@dataclass(frozen=True)
class Network:
    """How names are resolved and addresses connected to; tests bring their own."""

    resolve: Resolve = system_resolve
    connect: Connect = _connect


def load(url: str, limits: MediaLimits, kind: Kind = "image", network: Network | None = None) -> bytes:
    """The bytes a URL stands for."""
    scheme = url[:8].partition(":")[0].lower()
    most = limits.max_bytes if kind == "image" else limits.max_video_bytes
    if scheme == "data":
        return _from_data(url, kind, most)
    if scheme in ("http", "https"):
        return _from_network(url, limits, most, network or Network())
    if scheme == "file":
        return _from_file(url, limits, most)
    raise MediaRefused(f"The {kind} is neither a data URI nor an http or https URL.")


# --- data URIs ---------------------------------------------------------------------------------------------


def _from_data(url: str, kind: Kind, most: int) -> bytes:
    match = _DATA.match(url[:256])
    if match is None or match[2].lower().split(";")[-1] != "base64":
        raise MediaRefused(f"The data URI is not of the form data:{kind}/...;base64,...")
    mime = match[1].lower()
    if mime not in _MIME or not (mime.startswith(f"{kind}/") or (kind, mime) == ("video", "image/gif")):
        raise MediaRefused(f"The data URI holds {mime}, which is not taken as {kind}.")
    encoded = url[match.end() :]
    if len(encoded) > 4 * (most // 3 + 1):
        raise MediaRefused(f"The {kind} has more than the {most} bytes allowed.")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaRefused("The data URI is not valid base64.") from error
    if not data:
        raise MediaRefused("The data URI is empty.")
    if len(data) > most:
        raise MediaRefused(f"The {kind} has more than the {most} bytes allowed.")
    if (sniff(data) or sniff_video(data)) != _MIME[mime]:
        raise MediaRefused(f"The data URI says {mime}, but its bytes are something else.")
    return data


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
    # The path has no links any more; if the last part has become one since, opening fails.
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as stream:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise refused
        opened = Path(f"/proc/self/fd/{handle}")
        if opened.exists() and not Path(os.path.realpath(opened)).is_relative_to(folder):
            raise refused  # a folder on the way was swapped for a link
        data = stream.read(most + 1)
    if len(data) > most:
        raise MediaRefused(f"The file has more than the {most} bytes allowed.")
    return data


# --- the network -------------------------------------------------------------------------------------------


def _from_network(url: str, limits: MediaLimits, most: int, network: Network) -> bytes:
    deadline = time.monotonic() + limits.fetch_timeout
    for _ in range(limits.max_redirects + 1):
        target = parse(url)
        check_domain(target.host, limits)
        try:
            answer = _ask(target, limits, most, network, deadline)
        except TimeoutError:
            raise MediaRefused(
                f"The URL did not give everything within {limits.fetch_timeout:g} seconds."
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MediaRefused(_UNREACHED) from error
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer.location)
    raise MediaRefused(f"The URL redirects more than {limits.max_redirects} times.")


@dataclass(frozen=True)
class _Redirect:
    location: str


def _ask(
    target: Target, limits: MediaLimits, most: int, network: Network, deadline: float
) -> bytes | _Redirect:
    """One request to one checked address; the body, or where to go instead."""
    found = _before(deadline, lambda: addresses(target, limits, network.resolve))
    with contextlib.closing(_open(target, found, network, deadline)) as sock:
        connection = _Connection(target, sock, deadline)
        connection.putrequest("GET", target.path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", target.authority)
        connection.putheader("User-Agent", "saccade")
        connection.putheader("Accept", "image/*, video/*")
        connection.putheader("Accept-Encoding", "identity")  # nothing that inflates
        connection.putheader("Connection", "close")
        connection.endheaders()
        with connection.getresponse() as response:
            return _body(response, most)


def _body(response: http.client.HTTPResponse, most: int) -> bytes | _Redirect:
    if response.status in _REDIRECTS:
        location = response.getheader("Location")
        if not location:
            raise MediaRefused(_UNREACHED)
        return _Redirect(location)
    if response.status != 200:
        raise MediaRefused(f"The URL was answered with status {response.status}.")
    if response.getheader("Content-Encoding", "identity").lower() != "identity":
        raise MediaRefused("The URL was answered with compressed content, which is not taken.")
    too_large = MediaRefused(f"The URL gives more than the {most} bytes allowed.")
    if response.length is not None and response.length > most:
        raise too_large
    data = bytearray()
    while chunk := response.read(_CHUNK):
        data += chunk
        if len(data) > most:
            raise too_large
    if response.length:  # promised more than it gave
        raise MediaRefused(_UNREACHED)
    return bytes(data)


def _open(target: Target, found: Sequence[str], network: Network, deadline: float) -> socket.socket:
    """Connects to one of exactly these addresses; TLS is checked against the name."""
    for place, address in enumerate(found):
        try:
            raw = network.connect(address, target.port, _left(deadline))
            break
        except OSError:
            if place == len(found) - 1:
                raise
    if target.scheme == "http":
        return raw
    try:
        raw.settimeout(_left(deadline))
        return _tls().wrap_socket(raw, server_hostname=target.host)
    except BaseException:
        raw.close()
        raise


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _before(deadline: float, work: Callable[[], list[str]]) -> list[str]:
    """Runs what cannot be interrupted (a name look-up) and stops waiting for it at the deadline."""
    result: list[list[str]] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="resolve")
    thread.start()
    thread.join(_left(deadline))
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError
    return result[0]


class _DeadlineReader(io.RawIOBase):
    """Reads a socket; every read gets only the time that is left, so that drops cannot add up past it."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._sock.recv_into(buffer)


class _DeadlineSocket:
    """As much of a socket as http.client uses."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._sock, self._deadline))

    def close(self) -> None:
        """http.client lets go of its socket while the body is still to be read; the caller closes it."""


class _Connection(http.client.HTTPConnection):
    """http.client over a socket that is already connected to a checked address."""

    def __init__(self, target: Target, sock: socket.socket, deadline: float) -> None:
        super().__init__(target.host, target.port)
        self.sock: Any = _DeadlineSocket(sock, deadline)

    def connect(self) -> None:
        raise OSError("the connection was closed")  # never connect anew, unchecked
