"""Fetching: from where it may, no further than the limits, never from an address that was not checked."""

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.media.fetch import Network, fetch_bytes


def png(size: tuple[int, int] = (3, 2)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "/etc/passwd", "../x", "C:\\x", "", "gopher://x", "file:/etc/passwd"]
)
def test_other_schemes_and_bare_paths_are_refused(url: str) -> None:
    with pytest.raises(MediaRefused):
        fetch_bytes(url, MediaLimits())


# --- files -------------------------------------------------------------------------------------------------


@pytest.fixture
def allowed(tmp_path: Path) -> MediaLimits:
    inside = tmp_path / "allowed"
    (inside / "sub").mkdir(parents=True)
    (inside / "sub" / "a b.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "x.png").write_bytes(png())
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "near.png").symlink_to(inside / "sub" / "a b.png")
    (inside / "up").symlink_to(tmp_path)
    return MediaLimits(allowed_local_path=inside)


def test_files_under_the_allowed_folder_are_read(allowed: MediaLimits) -> None:
    assert fetch_bytes(f"file://{allowed.allowed_local_path}/sub/a%20b.png", allowed) == png()
    assert fetch_bytes(f"file://localhost{allowed.allowed_local_path}/near.png", allowed) == png()


@pytest.mark.parametrize(
    "rest",
    [
        "/../secret.png",
        "/%2e%2e/secret.png",
        "/link.png",
        "/up/secret.png",
        "-too/x.png",
        "/none.png",
        "/sub",
        "/sub/a%20b.png%00.png",
    ],
)
def test_nothing_outside_the_allowed_folder_is_read(allowed: MediaLimits, rest: str) -> None:
    with pytest.raises(MediaRefused, match="may not be read"):
        fetch_bytes(f"file://{allowed.allowed_local_path}{rest}", allowed)


def test_files_are_not_read_at_all_unless_allowed(allowed: MediaLimits) -> None:
    with pytest.raises(MediaRefused, match="may not be read"):
        fetch_bytes(f"file://{allowed.allowed_local_path}/sub/a%20b.png", MediaLimits())
    with pytest.raises(MediaRefused):
        fetch_bytes(f"file://elsewhere{allowed.allowed_local_path}/near.png", allowed)


def test_files_over_the_limit_are_refused(allowed: MediaLimits) -> None:
    small = MediaLimits(allowed_local_path=allowed.allowed_local_path, max_bytes=10)
    with pytest.raises(MediaRefused, match="10 bytes"):
        fetch_bytes(f"file://{allowed.allowed_local_path}/near.png", small)


# --- the network: servers on this machine, names resolved by the test --------------------------------------


class Server:
    """Answers each path with what the test wrote for it, and remembers what it was asked."""

    def __init__(self) -> None:
        self.routes: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked.append((self.path, dict(self.headers.items())))
                owner.routes[self.path](self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, path: str, host: str = "pictures.example") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.http.shutdown()
    one.http.server_close()


def here(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


LOCAL = Network(resolve=here)
OPEN = MediaLimits(allow_private_addresses=True, fetch_timeout=5.0, max_bytes=10_000)
HASTY = MediaLimits(allow_private_addresses=True, fetch_timeout=0.4, max_bytes=10_000)


def sends(body: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_url_is_fetched_with_the_right_host_header(server: Server) -> None:
    server.routes["/a.png?x=1"] = sends(png())
    assert fetch_bytes(server.url("/a.png?x=1"), OPEN, network=LOCAL) == png()
    path, headers = server.asked[0]
    assert path == "/a.png?x=1"
    assert headers["Host"] == f"pictures.example:{server.port}"
    assert headers["Accept-Encoding"] == "identity"


def test_a_chunked_body_is_read(server: Server) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in (png()[:10], png()[10:], b""):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    server.routes["/c"] = answer
    assert fetch_bytes(server.url("/c"), OPEN, network=LOCAL) == png()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0.0.0.0",
    ],
)
def test_private_addresses_are_refused_and_never_connected_to(server: Server, host: str) -> None:
    server.routes["/canary"] = sends(png())
    with pytest.raises(MediaRefused) as caught:
        fetch_bytes(server.url("/canary", host), MediaLimits(fetch_timeout=5.0))
    assert server.asked == []
    assert "127" not in caught.value.message


def test_a_name_that_resolves_to_a_private_address_is_refused(server: Server) -> None:
    with pytest.raises(MediaRefused, match="not public"):
        fetch_bytes(server.url("/canary"), MediaLimits(), network=LOCAL)
    assert server.asked == []


class Rebinding:
    """A name that is public when first asked for and private ever after; a wire that notes where it leads."""

    def __init__(self) -> None:
        self.answers = iter(["93.184.216.34"])
        self.connected: list[str] = []

    def resolve(self, host: str, port: int) -> list[str]:
        return [next(self.answers, "127.0.0.1")]

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        self.connected.append(address)
        raise ConnectionRefusedError


def test_only_the_address_that_was_checked_is_connected_to() -> None:
    wire = Rebinding()
    with pytest.raises(MediaRefused, match="could not be fetched"):
        fetch_bytes("http://rebind.example/x", MediaLimits(), network=Network(wire.resolve, wire.connect))
    assert wire.connected == ["93.184.216.34"]


def test_a_redirect_to_a_private_address_is_refused(server: Server) -> None:
    server.routes["/go"] = sends(b"", 302, Location="http://inside.example/secret")

    def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"] if host == "inside.example" else ["93.184.216.34"]

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        if address != "93.184.216.34":
            raise AssertionError("connected to an address that was not checked")
        return socket.create_connection(("127.0.0.1", server.port), seconds)

    with pytest.raises(MediaRefused, match="not public"):
        fetch_bytes("http://outside.example/go", MediaLimits(), network=Network(resolve, connect))
    assert [path for path, _ in server.asked] == ["/go"]


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://x/", "http://u@x/", "data:image/png;base64,AAAA", "\\\\x"]
)
def test_a_redirect_to_something_else_is_refused(server: Server, location: str) -> None:
    server.routes["/go"] = sends(b"", 301, Location=location)
    with pytest.raises(MediaRefused):
        fetch_bytes(server.url("/go"), OPEN, network=LOCAL)


def test_a_redirect_must_stay_within_the_allowed_domains(server: Server) -> None:
    server.routes["/go"] = sends(b"", 307, Location=server.url("/a", "other.example"))
    server.routes["/a"] = sends(png())
    limits = MediaLimits(allow_private_addresses=True, allowed_domains=("pictures.example",))
    with pytest.raises(MediaRefused, match="this host"):
        fetch_bytes(server.url("/go"), limits, network=LOCAL)
    assert fetch_bytes(server.url("/a"), limits, network=LOCAL) == png()


def test_three_redirects_are_followed_and_loops_are_not(server: Server) -> None:
    for number in range(3):
        server.routes[f"/{number}"] = sends(b"", 302, Location=f"/{number + 1}")
    server.routes["/3"] = sends(png())
    server.routes["/loop"] = sends(b"", 302, Location="/loop")
    assert fetch_bytes(server.url("/0"), OPEN, network=LOCAL) == png()
    server.asked.clear()
    with pytest.raises(MediaRefused, match="3 times"):
        fetch_bytes(server.url("/loop"), OPEN, network=LOCAL)
    assert len(server.asked) == 4


@pytest.mark.parametrize("status", [204, 206, 304, 404, 500])
def test_any_other_status_is_refused(server: Server, status: int) -> None:
    server.routes["/s"] = sends(b"", status)
    with pytest.raises(MediaRefused, match=str(status)):
        fetch_bytes(server.url("/s"), OPEN, network=LOCAL)


def test_a_body_announced_too_large_is_refused_unread(server: Server) -> None:
    server.routes["/big"] = sends(b"x" * 100, Content_Length=str(1 << 40))
    with pytest.raises(MediaRefused, match="10000 bytes"):
        fetch_bytes(server.url("/big"), OPEN, network=LOCAL)


def forever(piece: bytes, pause: float, stop: threading.Event) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(200):  # long enough to be refused, short enough to fail a test that would wait
                if stop.wait(pause):
                    break
                handler.wfile.write(piece)
        except OSError:
            pass

    return answer


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_an_endless_body_is_cut_at_the_limit(server: Server, stop: threading.Event) -> None:
    server.routes["/endless"] = forever(b"x" * 4096, 0.0, stop)
    with pytest.raises(MediaRefused, match="10000 bytes"):
        fetch_bytes(server.url("/endless"), OPEN, network=LOCAL)


def test_a_body_that_trickles_ends_at_the_deadline(server: Server, stop: threading.Event) -> None:
    server.routes["/drip"] = forever(b"x", 0.05, stop)  # every read succeeds; only the sum is too long
    with pytest.raises(MediaRefused, match=r"0\.4 seconds"):
        fetch_bytes(server.url("/drip"), HASTY, network=LOCAL)


def test_a_body_shorter_than_announced_is_refused(server: Server) -> None:
    server.routes["/short"] = sends(png(), Content_Length=str(len(png()) + 50))
    with pytest.raises(MediaRefused):
        fetch_bytes(server.url("/short"), OPEN, network=LOCAL)


def test_compressed_content_is_refused(server: Server) -> None:
    server.routes["/gz"] = sends(b"x", Content_Encoding="gzip")
    with pytest.raises(MediaRefused, match="compressed"):
        fetch_bytes(server.url("/gz"), OPEN, network=LOCAL)


def raw_server(talk: Callable[[socket.socket], None]) -> int:
    """A server that says whatever `talk` says to its one visitor."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        visitor, _ = listener.accept()
        with visitor, listener, contextlib.suppress(OSError):
            talk(visitor)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def test_headers_that_trickle_end_at_the_deadline() -> None:
    def talk(visitor: socket.socket) -> None:
        visitor.sendall(b"HTTP/1.1 200 OK\r\n")
        for _ in range(200):
            visitor.sendall(b"X")
            time.sleep(0.05)

    with pytest.raises(MediaRefused, match="seconds"):
        fetch_bytes(f"http://slow.example:{raw_server(talk)}/", HASTY, network=LOCAL)


def test_a_server_that_says_nothing_ends_at_the_deadline() -> None:
    port = raw_server(lambda visitor: time.sleep(3))
    with pytest.raises(MediaRefused, match="seconds"):
        fetch_bytes(f"http://mute.example:{port}/", HASTY, network=LOCAL)
    port = raw_server(lambda visitor: time.sleep(3))
    with pytest.raises(MediaRefused):
        fetch_bytes(f"https://mute.example:{port}/", HASTY, network=LOCAL)


@pytest.mark.parametrize(
    "said", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500, b"\0" * 70000]
)
def test_garbage_is_refused(said: bytes) -> None:
    with pytest.raises(MediaRefused):
        fetch_bytes(
            f"http://odd.example:{raw_server(lambda visitor: visitor.sendall(said))}/", OPEN, network=LOCAL
        )


def test_a_name_look_up_that_hangs_ends_at_the_deadline(stop: threading.Event) -> None:
    def hang(host: str, port: int) -> list[str]:
        stop.wait(5)
        return ["127.0.0.1"]

    with pytest.raises(MediaRefused, match="seconds"):
        fetch_bytes("http://hang.example/", HASTY, network=Network(resolve=hang))


def test_tls_names_the_host_and_an_unproven_server_is_refused() -> None:
    heard: list[bytes] = []

    def talk(visitor: socket.socket) -> None:
        heard.append(visitor.recv(4096))  # the greeting, which carries the name in clear
        visitor.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with pytest.raises(MediaRefused, match="could not be fetched"):
        fetch_bytes(f"https://named.example:{raw_server(talk)}/", OPEN, network=LOCAL)
    assert b"named.example" in heard[0]
