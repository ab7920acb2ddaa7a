"""The workload mixed_load: text streams over HTTP, phase by phase with more images per second.

The load is open-loop: requests arrive by a Poisson process whether or not earlier ones are answered, and TTFT
counts from the moment a request was due, so a client that falls behind does not flatter the server."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import uvloop
from rich.progress import Progress, TaskID

from saccade.checkpoint import Checkpoint
from saccade.config import EngineConfig
from saccade.errors import ConfigError, SaccadeError
from saccade.host.event_loop_lag import measure_event_loop_lag
from saccade.host.garbage_collection import existing_objects_frozen
from saccade.inputs.tokenizer import Tokenizer
from saccade.tools.bench.client import Client, StreamBroken
from saccade.tools.bench.inputs import RandomInputs
from saccade.tools.bench.options import BenchOptions, Scale, Workload, chosen_scale
from saccade.tools.bench.server import SERVED_NAME, loop_lag_histogram, serving, wait_for_warmup
from saccade.tools.bench.workloads import Row
from saccade.tools.report import percentile

log = logging.getLogger(__name__)

Kind = Literal["text", "image"]
IMAGE_QUESTION_TOKENS = 16
ERROR_BYTES = 200  # shown of an error response
DRAIN_SECONDS = 60.0  # for requests still open at the end of a phase
WARM_REQUESTS = 2  # of each kind, before the first phase
WARMUP_SECONDS = 60.0  # at most, without requests: an idle engine captures CUDA graphs


@dataclass(frozen=True)
class DueRequest:
    due: float  # seconds from the start of its phase
    kind: Kind


@dataclass
class StreamTiming:
    """One request as the client saw it. Times are seconds; `first` counts from when it was due."""

    kind: Kind
    first: float | None = None
    gaps: list[float] = field(default_factory=list)  # between chunks with text
    done: bool = False
    error: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Failure(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """The fields of a stream's event that are read."""

    choices: list[_Choice] = []
    error: _Failure | None = None


_decode = msgspec.json.Decoder(_Event).decode


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> list[float]:
    """Arrivals of a Poisson process of `rate` per second in 0 .. seconds."""
    times: list[float] = []
    now = 0.0
    while (now := now + float(rng.exponential(1 / rate))) < seconds:
        times.append(now)
    return times


def plan_phase(text_rate: float, image_rate: float, seconds: float, seed: Sequence[int]) -> list[DueRequest]:
    """The arrivals of one phase, in order, at least one of each kind; the same for the same seed."""
    text_rng, image_rng = (np.random.default_rng([*seed, stream]) for stream in (0, 1))
    arrivals = [DueRequest(due, "text") for due in poisson(text_rate, seconds, text_rng) or [0.0]]
    if image_rate > 0:
        arrivals += [DueRequest(due, "image") for due in poisson(image_rate, seconds, image_rng) or [0.0]]
    return sorted(arrivals, key=lambda arrival: arrival.due)


class Bodies:
    """Request bodies. Every one is new."""

    def __init__(self, inputs: RandomInputs, scale: Scale) -> None:
        self._inputs = inputs
        self._scale = scale

    def make_all(self, arrivals: Sequence[DueRequest]) -> list[bytes]:
        return [self.make(arrival.kind) for arrival in arrivals]

    def make(self, kind: Kind) -> bytes:
        content: str | list[dict[str, object]]
        if kind == "text":
            content = self._inputs.words(self._scale.input_tokens)
        else:
            url = self._inputs.data_uri(self._scale.size)
            content = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": self._inputs.words(IMAGE_QUESTION_TOKENS)},
            ]
        return msgspec.json.encode(
            {
                "model": SERVED_NAME,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": self._scale.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
            }
        )


class _EventReader:
    """Times the server-sent events of one response."""

    def __init__(self, seen: StreamTiming, due: float) -> None:
        self._seen = seen
        self._due = due
        self._last = 0.0
        self._rest = b""  # of an incomplete line

    def on_chunk(self, status: int, chunk: bytes) -> None:
        now = time.perf_counter()
        if status != 200:
            self._rest += chunk[:ERROR_BYTES]
            self._seen.error = f"{status}: {self._rest[:ERROR_BYTES].decode(errors='replace')}"
            return
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self._event(line[6:].rstrip(b"\r"), now)

    def _event(self, data: bytes, now: float) -> None:
        seen = self._seen
        if data == b"[DONE]":
            seen.done = seen.error is None
            return
        event = _decode(data)
        if event.error is not None:
            seen.error = event.error.message
            return
        if seen.first is None:
            seen.first = now - self._due
        if event.choices and event.choices[0].delta.content:
            seen.gaps += [now - self._last] if self._last else []
            self._last = now


async def follow(client: Client, body: bytes, kind: Kind, due: float) -> StreamTiming:
    """Sends one request and times its stream; never raises."""
    seen = StreamTiming(kind)
    try:
        status = await client.post(body, _EventReader(seen, due).on_chunk)
        if status != 200 and seen.error is None:
            seen.error = str(status)
    except (StreamBroken, OSError) as error:
        seen.error = type(error).__name__
    return seen


def most_lag(before: Mapping[float, float], after: Mapping[float, float]) -> str:
    """An event loop's largest lag between two cumulative histograms, by their bucket."""
    bounds = sorted(after)
    grown = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    reached = next((bound for bound, count in zip(bounds, grown, strict=True) if count == grown[-1]), 0.0)
    return f"<= {reached * 1e3:g} ms"


async def run_phase(
    client: Client,
    arrivals: Sequence[DueRequest],
    bodies: Sequence[bytes],
    bar: Progress,
    task: TaskID,
) -> list[StreamTiming]:
    """Sends every request when it is due and waits until all are answered, at most DRAIN_SECONDS."""
    start = time.perf_counter()
    streams: list[asyncio.Task[StreamTiming]] = []
    for arrival, body in zip(arrivals, bodies, strict=True):
        await asyncio.sleep(max(0.0, start + arrival.due - time.perf_counter()))
        streams.append(asyncio.create_task(follow(client, body, arrival.kind, start + arrival.due)))
        streams[-1].add_done_callback(lambda _: bar.advance(task))
    _, late = await asyncio.wait(streams, timeout=DRAIN_SECONDS)
    for stream in late:
        stream.cancel()
    if late:
        await asyncio.wait(late)
    return [stream.result() for stream in streams if stream not in late]


def summarise(
    phase: str, arrivals: Sequence[DueRequest], streams: Sequence[StreamTiming], note: str = ""
) -> list[Row]:
    """p50 and p99 of TTFT and inter-token latency of one phase, in milliseconds."""
    good = [stream for stream in streams if stream.done and stream.first is not None]
    lost = len(arrivals) - len(good)
    if lost:
        reasons = sorted({stream.error for stream in streams if stream.error})
        unanswered = f"{lost} of {len(arrivals)} unanswered" + (f" ({reasons[0]})" if reasons else "")
        note = f"{unanswered}; {note}" if note else unanswered
    rows = []
    for metric, samples in _latencies(good).items():
        for share in (50, 99):
            rows.append(
                Row(
                    workload="mixed_load",
                    metric=f"{phase}: {metric} p{share}",
                    unit="ms",
                    value=percentile(samples, share / 100),
                    samples=tuple(round(sample, 3) for sample in samples) if share == 50 else (),
                    parameters={"requests": len(arrivals), "lost": lost},
                    note=note,
                )
            )
    if not rows:
        raise SaccadeError(f"mixed_load, {phase}: no request was answered; {note}")
    return rows


def _latencies(streams: Sequence[StreamTiming]) -> dict[str, list[float]]:
    """Milliseconds by metric; a metric without samples is left out."""
    found: dict[str, list[float | None]] = {
        "text ttft": [stream.first for stream in streams if stream.kind == "text"],
        "inter-token": [gap for stream in streams if stream.kind == "text" for gap in stream.gaps],
        "image ttft": [stream.first for stream in streams if stream.kind == "image"],
    }
    return {name: [wait * 1e3 for wait in each if wait is not None] for name, each in found.items() if each}


async def _phases(
    url: str,
    bodies: Bodies,
    workload: Workload,
    options: BenchOptions,
    bar: Progress,
    on_rows: Callable[[list[Row]], None],
) -> list[Row]:
    rates = (0.0, *options.image_rates)
    task = bar.add_task(workload.name, total=None)
    rows: list[Row] = []
    async with Client(url, "/v1/chat/completions") as client:
        for kind in ("text", "image") * WARM_REQUESTS:
            request = follow(client, bodies.make(kind), kind, time.perf_counter())
            warm = await asyncio.wait_for(request, options.phase_seconds + 2 * DRAIN_SECONDS)
            if warm.error:
                raise SaccadeError(f"mixed_load: the server refused a request: {warm.error}")
        bar.update(task, description=f"{workload.name}: engine warm-up")
        if not await asyncio.to_thread(wait_for_warmup, url, WARMUP_SECONDS):
            log.warning(
                "after %.0f s the engine is still warming up; the first phase may show it", WARMUP_SECONDS
            )
        for number, rate in enumerate(rates):
            arrivals = plan_phase(options.text_rate, rate, options.phase_seconds, (options.seed, number))
            bar.update(task, total=len(arrivals), completed=0, description=f"preparing phase {number + 1}")
            ready = await asyncio.to_thread(bodies.make_all, arrivals)
            phase = f"+ {rate:g} images/s" if rate else "text only"
            bar.update(task, description=f"{workload.name} {phase}")
            before, own = await asyncio.to_thread(loop_lag_histogram, url), [0.0]
            with existing_objects_frozen():  # a full garbage collection would delay the client
                async with measure_event_loop_lag(own.append):
                    streams = await run_phase(client, arrivals, ready, bar, task)
            lag = most_lag(before, await asyncio.to_thread(loop_lag_histogram, url))
            note = f"event loop lag: client {max(own) * 1e3:.0f} ms, server {lag}"
            found = summarise(phase, arrivals, streams, note)
            on_rows(found)
            rows += found
    return rows


def mixed_load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    workload: Workload,
    options: BenchOptions,
    bar: Progress,
    on_rows: Callable[[list[Row]], None],
) -> list[Row]:
    """Calls `on_rows` with the rows of each phase when it ends."""
    if checkpoint.chat_template is None:
        raise ConfigError(f"mixed_load asks over the chat route; {checkpoint.name} has no chat template")
    scale = chosen_scale(workload, options)
    bodies = Bodies(RandomInputs(checkpoint, Tokenizer.load(checkpoint), options.seed), scale)
    with serving(config) as url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_phases(url, bodies, workload, options, bar, on_rows))
