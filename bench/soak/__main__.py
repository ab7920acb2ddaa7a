"""Runs a soak test: measures a server's capacity, sends twice that for some minutes, then checks for
faults."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.soak.clients import ClientOutcome, play
from bench.soak.traffic import MODEL, Traffic
from bench.soak.verdict import held_faults, idle_faults, memory_faults, request_faults, table
from bench.soak.watch import MIB, Watch, engine_of, metrics, running

SERVED = re.compile(rb"at (http://127\.0\.0\.1:(\d+))")
# Features of a few images in each tier.
FEATURE_BYTES = {"gpu": 3 * MIB, "host": 2 * MIB, "disk": 4 * MIB}
# Budgets of a few MB: a pool in which two long requests do not fit together.
OPTIONS = {
    "--kv-cache-bytes": "24MiB",
    "--max-num-seqs": "12",
    "--max-queue": "24",
    "--max-queue-bytes": "32MiB",
    "--max-body-bytes": "8MiB",
    "--max-image-pixels": "4000000",
    "--request-timeout": "60",
    "--read-timeout": "5",
    "--log-level": "warning",
}
WORKERS = 16  # clients at once while the capacity is measured
SAMPLE_SECONDS = 2.0
SETTLE_SECONDS = 45.0  # for idle connections to time out


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    port: int
    log: Path
    scratch: Path  # its own folder for temporary files
    kept: Path  # and for features


@contextlib.contextmanager
def serving(model: str, extra: Sequence[str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="saccade-soak-") as folder:
        log, scratch = Path(folder) / "log", Path(folder) / "scratch"
        kept = Path(folder) / "features"
        scratch.mkdir()
        kept.mkdir()
        cache = ",".join(f"{tier}={size}" for tier, size in FEATURE_BYTES.items())
        given = [word for pair in OPTIONS.items() for word in pair if pair[0] not in extra]
        command = [sys.executable, "-m", "saccade", "serve", model, "--port", "0", *given, *extra]
        command += ["--served-model-name", MODEL, "--device", "cpu", "--vision-cache", f"{cache},dir={kept}"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(scratch)},
            )
        try:
            url, port = _await(process, log)
            yield Server(process, url, port, log, scratch, kept)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(process: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    for _ in range(3000):
        if found := SERVED.search(log.read_bytes()):
            return found[1].decode(), int(found[2])
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


async def measure_capacity(port: int, traffic: Traffic, seconds: float) -> float:
    """Answers per second when a fixed number of well-behaved clients ask one after another."""
    stop = time.monotonic() + seconds
    answered = 0

    async def ask() -> None:
        nonlocal answered
        while time.monotonic() < stop:
            kind = traffic.next(behaviour="read")
            if kind.wrong:
                continue
            outcome = await play(port, kind, 0.0)
            answered += outcome.end == "answered" and time.monotonic() < stop

    await asyncio.gather(*(ask() for _ in range(WORKERS)))
    return answered / seconds


async def overload(
    port: int, traffic: Traffic, rate: float, seconds: float, watch: Watch
) -> list[ClientOutcome]:
    """Open load: requests arrive whether or not the server keeps up."""
    outcomes: list[ClientOutcome] = []
    playing: set[asyncio.Task[None]] = set()
    stop = time.monotonic() + seconds
    watching = asyncio.create_task(_watch(watch))

    async def one() -> None:
        outcomes.append(await play(port, traffic.next(), traffic.share()))

    try:
        due = time.monotonic()
        while due < stop:
            task = asyncio.create_task(one())
            playing.add(task)
            task.add_done_callback(playing.discard)
            due += traffic.wait(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*playing)
    finally:
        watching.cancel()
    return outcomes


async def _watch(watch: Watch) -> None:
    while True:
        await asyncio.to_thread(watch.sample)
        await asyncio.sleep(SAMPLE_SECONDS)


def soak(given: argparse.Namespace) -> int:
    with serving(given.model, given.options) as server:
        traffic = Traffic(given.seed)
        capacity = asyncio.run(measure_capacity(server.port, traffic, given.calibrate))
        if not capacity:
            raise RuntimeError("the server answered nothing while its capacity was measured")
        time.sleep(1)
        engine = engine_of(server.process.pid)
        watch = Watch(server.process.pid, engine)
        before = watch.sample()
        blocks = sum(
            value for name, value in metrics(server.url).items() if name.startswith("saccade_kv_blocks{")
        )
        rate = given.overload * capacity
        print(
            f"capacity {capacity:.1f} answers/s; {rate:.1f} requests/s for {given.minutes:g} minutes",
            flush=True,
        )
        outcomes = asyncio.run(overload(server.port, traffic, rate, given.minutes * 60, watch))
        samples = watch.samples[1:]
        time.sleep(SETTLE_SECONDS)
        after = watch.sample()
        faults = request_faults(outcomes) + memory_faults(samples)
        faults += idle_faults(metrics(server.url), blocks, FEATURE_BYTES)
        faults += held_faults("front", before.front, after.front)
        faults += held_faults("engine", before.engine, after.engine)
        print(table(outcomes, samples))
        idle = [f"{name} {getattr(after, name).anonymous / MIB:.1f}" for name in ("front", "engine")]
        print(f"idle afterwards, MiB: {', '.join(idle)}")
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(60)
        faults += _left_behind(server, engine, status)
        if given.json:
            record = {
                "samples": [asdict(one) for one in watch.samples],
                "outcomes": [asdict(o) for o in outcomes],
            }
            Path(given.json).write_text(json.dumps(record))
        return _report(faults, server.log)


def _left_behind(server: Server, engine: int, status: int) -> list[str]:
    found = [f"the server ended with status {status}"] if status else []
    if running(engine):
        found.append(f"the engine, process {engine}, still runs")
    files = sorted(path.name for path in server.scratch.rglob("*") if path.is_file())
    found += [f"files are left: {', '.join(files[:5])}"] if files else []
    kept = sum(path.stat().st_size for path in server.kept.rglob("*") if path.is_file())
    most = FEATURE_BYTES["disk"]
    return found + ([f"{kept} bytes of features lie on disk over a budget of {most}"] if kept > most else [])


def _report(faults: list[str], log: Path) -> int:
    for fault in faults:
        print(f"FAULT: {fault}")
    text = log.read_text(errors="replace")
    errors = text.count("Traceback")
    if errors:
        print(f"FAULT: {errors} tracebacks in the server's log; the first:")
        start = text.index("Traceback")
        print(text[max(start - 300, 0) : start + 4000])
    print("no faults" if not faults and not errors else "")
    return 1 if faults or errors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak a server; see the package's docstring.")
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--overload", type=float, default=2.0, help="times the measured capacity")
    parser.add_argument("--calibrate", type=float, default=20.0, help="seconds to measure the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write every sample and outcome there")
    parser.add_argument("options", nargs="*", help="after --: further options of saccade serve")
    return soak(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
