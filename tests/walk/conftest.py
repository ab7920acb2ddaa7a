"""A real server process with a real engine process behind it, on the tiny checkpoint."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

SERVED = re.compile(r"at (http://\S+)")


class Server:
    """`saccade serve` as a person would start it."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "saccade", "serve", str(model), "--port", "0", *options]
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.url = self._wait_for_url()
        self.model = model.name

    def _wait_for_url(self) -> str:
        for _ in range(1200):
            if found := SERVED.search(self.log):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def engine_pid(self) -> int:
        return next(
            pid for pid in children(self.process.pid) if b"saccade.engine.process" in command_line(pid)
        )

    def gauge(self, name: str) -> float:
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        raise KeyError(name)

    def wait_until_empty(self) -> None:
        """Every block given back and nobody waiting; fails if that does not come about."""
        for _ in range(200):
            busy = {
                name: self.gauge(name)
                for name in (
                    'saccade_kv_blocks{state="used"}',
                    'saccade_requests{state="running"}',
                    'saccade_requests{state="waiting"}',
                )
            }
            if not any(busy.values()):
                return
            time.sleep(0.05)
        raise AssertionError(f"not given back: {busy}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    """Of a running process; nothing for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture(scope="session")
def start_server(
    vl_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Start servers that end with the tests."""
    started: list[Server] = []

    def start(*options: str) -> Server:
        log = tmp_path_factory.mktemp("server") / "log"
        started.append(Server(vl_folder, log, "--num-blocks", "512", *options))
        return started[-1]

    yield start
    for server in started:
        server.stop(
            signal.SIGKILL if server.process.poll() is None and "draining" in server.log else signal.SIGTERM
        )


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    """One for all tests that leave it as they found it."""
    return start_server()
