"""Clients of a soak test, one connection each: they read to the end, read slowly, leave, or are killed.

Each gives a `ClientOutcome`: answered, refused with a reason, left on purpose; anything else is a fault.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from bench.soak.traffic import Shot

End = Literal["answered", "refused", "left", "fault"]
ANSWER_TIMEOUT = 120.0  # seconds for a whole answer; the server's own limit is shorter
REFUSALS = (400, 401, 404, 405, 408, 413, 415, 503, 504)  # statuses of a refusal; 500 is a fault
# A client in a process of its own, so that it can be killed as programs are: in the middle of anything.
VICTIM = """
import socket, sys
data = sys.stdin.buffer.read()
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.sendall(data)
while sock.recv(512):
    pass
"""


@dataclass(frozen=True)
class ClientOutcome:
    kind: str
    behaviour: str
    end: End
    status: int | None = None
    reason: str = ""
    tokens: int = 0  # pieces of text seen, for streams


async def play(port: int, shot: Shot, share: float) -> ClientOutcome:
    """One request by one client. `share`: how far it goes before it leaves."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            if shot.behaviour == "killed":
                return await _killed(port, shot, share)
            return await _connected(port, shot, share)
    except TimeoutError:
        return _fault(shot, f"no end after {ANSWER_TIMEOUT:.0f} s")
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return _fault(shot, f"{type(error).__name__}: {error}")


def _fault(shot: Shot, reason: str, status: int | None = None) -> ClientOutcome:
    return ClientOutcome(shot.kind, shot.behaviour, "fault", status, reason)


def _left(shot: Shot, tokens: int = 0) -> ClientOutcome:
    return ClientOutcome(shot.kind, shot.behaviour, "left", None, "", tokens)


def _request(shot: Shot) -> bytes:
    head = (
        f"POST {shot.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(shot.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + shot.body


@contextlib.asynccontextmanager
async def _connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=16 << 20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # at once, whatever is on its way: the server must cope


async def _connected(port: int, shot: Shot, share: float) -> ClientOutcome:
    data = _request(shot)
    async with _connection(port) as (reader, writer):
        if shot.behaviour == "half a body":
            writer.write(data[: len(data) - 1 - int(share * min(len(shot.body), 4096) * 0.9)])
            await writer.drain()
            await asyncio.sleep(share)
            return _left(shot)
        with contextlib.suppress(ConnectionError):  # refused before all of the body was sent
            writer.write(data)
            await writer.drain()
        if shot.behaviour == "leave before":
            await asyncio.sleep(share * 2)
            return _left(shot)
        return await _read(reader, shot, share)


async def _read(reader: asyncio.StreamReader, shot: Shot, share: float) -> ClientOutcome:
    first = await reader.readline()
    if not first:
        return _fault(shot, "closed without an answer")
    status = int(first.split(b" ", 2)[1])
    headers = {}
    while (line := (await reader.readline()).strip()) and b":" in line:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        length = int(headers.get(b"content-length", b"-1"))
        body = await (reader.readexactly(length) if length >= 0 else reader.read())
        return _whole(shot, status, body)
    if shot.wrong:
        return _fault(shot, "a wrong request was answered", status)
    leave_after = 1 + int(share * 40) if shot.behaviour == "leave within" else None
    pieces = 0
    while line := await reader.readline():  # chunk sizes stand on lines of their own and are passed over
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return ClientOutcome(shot.kind, shot.behaviour, "answered", status, "", pieces)
        event = json.loads(line[6:])
        if "error" in event:
            return _refusal(shot, status, event)
        pieces += 1
        if leave_after is not None and pieces >= leave_after:
            return _left(shot, pieces)
        if shot.behaviour == "slow" and pieces < 20:
            await asyncio.sleep(0.1)
    return _fault(shot, "the stream broke off", status)


def _whole(shot: Shot, status: int, body: bytes) -> ClientOutcome:
    answer = json.loads(body)
    if status == 200 and not shot.wrong:
        ended = all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])
        if not ended:
            return _fault(shot, "a choice without a finish reason", status)
        return ClientOutcome(shot.kind, shot.behaviour, "answered", status, "", len(answer["choices"]))
    if status == 200:
        return _fault(shot, "a wrong request was answered", status)
    return _refusal(shot, status, answer)


def _refusal(shot: Shot, status: int, answer: dict[str, dict[str, str]]) -> ClientOutcome:
    error = answer.get("error") or {}
    message, kind = error.get("message") or "", error.get("type") or ""
    if not message or kind == "internal_error" or (status != 200 and status not in REFUSALS):
        return _fault(shot, f"{kind} without a good reason: {message[:120]}", status)
    return ClientOutcome(shot.kind, shot.behaviour, "refused", status, f"{error.get('code')}")


async def _killed(port: int, shot: Shot, share: float) -> ClientOutcome:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-S",
        "-E",
        "-c",
        VICTIM,
        str(port),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        if process.stdin is not None:
            process.stdin.write(_request(shot))
            await process.stdin.drain()
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 0.1 + 4 * share)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    return _left(shot)
