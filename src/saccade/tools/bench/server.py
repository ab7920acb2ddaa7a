"""Starts `saccade serve` in a process for a load test, waits until it is ready, stops it."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from saccade.config import EngineConfig
from saccade.errors import ConfigError

SERVED_NAME = "bench"
START_SECONDS = 900.0  # a large checkpoint on a slow disk
STOP_SECONDS = 30.0
LOG_LINES = 15  # shown when the server does not start
WARMUP_STEPS, LOOP_LAG = "saccade_steps_to_prepare", "saccade_front_late_seconds"


def engine_flags(config: EngineConfig) -> list[str]:
    """The engine's options that are not the defaults, as flags of `saccade serve`."""
    flags = []
    plain = EngineConfig(model=config.model)
    for field in fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        if value == getattr(plain, field.name):
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


@contextlib.contextmanager
def serving(config: EngineConfig) -> Iterator[str]:
    """The base URL of a ready server."""
    with tempfile.TemporaryDirectory(prefix="saccade-bench-") as folder:
        log = Path(folder) / "server.log"
        port = _free_port()
        command = [sys.executable, "-m", "saccade", "serve", config.model, *engine_flags(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
        command += ["--shutdown-timeout", "5"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, log)
            yield url
        finally:
            _stop(process)


def wait_for_warmup(url: str, seconds: float) -> bool:
    """Waits until the engine has captured its CUDA graphs, at most `seconds`; returns whether it has."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if _metrics(url).get(WARMUP_STEPS) == 0:
                return True
        time.sleep(0.25)
    return False


def loop_lag_histogram(url: str) -> dict[float, float]:
    """Of the server's event loop: how often it lagged by at most so many seconds."""
    found = {}
    for name, value in _metrics(url).items():
        if name.startswith(f"{LOOP_LAG}_bucket"):
            found[float(name.partition('le="')[2].partition('"')[0])] = value
    return found


def _get(url: str) -> bytes:
    """The body of a 200 response, past any proxy; OSError for everything else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5.0) as response:
        body: bytes = response.read()
    return body


def _metrics(url: str) -> dict[str, float]:
    lines = _get(f"{url}/metrics").decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise ConfigError(
                f"the server ended with status {process.returncode} before it was ready: {last}"
            )
        with contextlib.suppress(OSError):
            _get(f"{url}/ready")
            return
        time.sleep(0.1)
    raise ConfigError(f"the server was not ready after {START_SECONDS:.0f} seconds")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
