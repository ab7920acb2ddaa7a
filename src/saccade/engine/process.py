"""The engine core's process: `python -m saccade.engine.process FD`, started by `EngineClient`.

A thread reads the channel; the main thread steps the engine. When the channel is closed, the process ends.
"""

import contextlib
import logging
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from functools import partial
from typing import NoReturn

from saccade.engine import ipc
from saccade.engine.core import Engine
from saccade.engine.memory import resolve_device
from saccade.errors import EngineDied, RequestError, SaccadeError
from saccade.host.garbage_collection import freeze_all_objects
from saccade.host.malloc import KEEP_LARGE_BLOCKS, MMAP_LARGE_BLOCKS, HeapTrimmer, configure_malloc

log = logging.getLogger("saccade.engine")

UNFORESEEN = "the engine could not take this request; the failure has been logged"


class Inbox:
    """Messages of the API server, read by a thread so that the API server never waits for a step."""

    def __init__(self, channel: ipc.Channel) -> None:
        self._messages: queue.SimpleQueue[ipc.ToEngine] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(channel,), daemon=True).start()

    def _read(self, channel: ipc.Channel) -> None:
        try:
            while (message := channel.receive(ipc.ToEngine)) is not None:
                self._messages.put(message)
        except Exception:
            # An engine core that reads no more messages must not look alive.
            log.exception("a message could not be read")
            channel.send(ipc.EngineFailed("the engine could not read a message and has stopped"))
        finally:
            self._messages.put(ipc.Stop())

    def receive(self, *, wait: bool, timeout: float | None = None) -> list[ipc.ToEngine]:
        """All messages; with `wait`, at least one, unless `timeout` seconds pass without any."""
        messages: list[ipc.ToEngine] = []
        with contextlib.suppress(queue.Empty):
            if wait:
                messages.append(self._messages.get(timeout=timeout))
            while True:
                messages.append(self._messages.get_nowait())
        return messages


def serve(engine: Engine, inbox: Inbox, channel: ipc.Channel) -> None:
    """Receive, step, send; until the API server says stop. While idle, one warm-up step at a time."""
    heap = HeapTrimmer() if engine.info.device == "cpu" else None  # on a GPU the device would wait for it
    warming_up = engine.stats().to_prepare > 0
    while True:
        idle = engine.idle and not engine.warm_up()
        if idle and warming_up:
            warming_up = False
            freeze_all_objects()  # CUDA graphs included: a collection through them takes several steps' time
            channel.send(ipc.StepOutputs((), engine.stats()))  # reports that warm-up is complete
        timeout = heap.seconds if heap is not None and heap.used else None
        messages = inbox.receive(wait=idle, timeout=timeout)
        if idle and not messages and heap is not None:
            heap.trim()
            continue
        if not handle(engine, channel, messages):
            return
        while (seconds := engine.planning_delay) > 0:
            if not handle(engine, channel, inbox.receive(wait=True, timeout=seconds)):
                return
        deltas = engine.step()
        channel.send(ipc.StepOutputs(tuple(deltas), engine.stats()))
        if heap is not None:
            heap.used = True
            if heap.due:
                heap.trim()


def handle(engine: Engine, channel: ipc.Channel, messages: Iterable[ipc.ToEngine]) -> bool:
    """Carry out messages; False when the engine core is to stop."""
    for message in messages:
        match message:
            case ipc.Stop():
                return False
            case ipc.Submit(request):
                try:
                    engine.submit(request)
                except RequestError as error:
                    channel.send(
                        ipc.RequestRejected(request.id, error.code or "", error.message, error.param)
                    )
                except Exception:  # other requests must still be answered
                    log.exception("request %s could not be taken", request.id)
                    engine.cancel([request.id])
                    channel.send(ipc.RequestRejected(request.id, "", UNFORESEEN, None))
            case ipc.Cancel(request_id):
                engine.cancel([request_id])
            case ipc.ImageQuery(query_id, content, delete):
                reply = partial(_reply, channel, ipc.ImageQueryReply(query_id, engine.image_tiers(content)))
                if delete:
                    engine.delete_image(content, reply)
                else:
                    reply()
            case ipc.Start():
                log.warning("a second start message was ignored")
    return True


def _reply(channel: ipc.Channel, message: ipc.ImageQueryReply) -> None:
    """May be called from any thread. If the channel is closed, the reading thread notices."""
    with contextlib.suppress(EngineDied):
        channel.send(message)


def _exit_while_starting(number: int, frame: object) -> NoReturn:
    """As an exception, so that progress bars are removed from the terminal."""
    raise SystemExit(128 + number)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # The API server handles signals sent to the process group: it lets answers finish, then stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_while_starting)
    channel = ipc.Channel(socket.socket(fileno=int(sys.argv[1])))
    start = channel.receive(ipc.ToEngine)
    if not isinstance(start, ipc.Start):
        return
    try:
        configure_malloc(
            KEEP_LARGE_BLOCKS if resolve_device(start.config).type == "cpu" else MMAP_LARGE_BLOCKS
        )
        engine = Engine(start.config)
        freeze_all_objects()
    except SaccadeError as error:
        channel.send(ipc.EngineFailed(error.message))
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(EngineDied):  # the API server is gone
        channel.send(ipc.EngineReady(engine.info, engine.stats()))
        serve(engine, Inbox(channel), channel)
    engine.close()


if __name__ == "__main__":
    main()
