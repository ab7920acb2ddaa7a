"""The engine process: `python -m saccade.engine.process FD`, started by the link and by nobody else.

A thread reads the channel; the main thread steps. When the channel closes, the front is gone and so are we.
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

from saccade.engine.core import Engine
from saccade.engine.ipc import (
    Cancel,
    Channel,
    Failed,
    News,
    Ready,
    Recall,
    Recalled,
    Refused,
    Start,
    Stop,
    Submit,
    ToEngine,
)
from saccade.engine.memory import resolve_device
from saccade.errors import EngineDied, RequestError, SaccadeError
from saccade.host.garbage_collection import freeze_all_objects
from saccade.host.malloc import KEEP_LARGE_BLOCKS, MMAP_LARGE_BLOCKS, HeapTrimmer, configure_malloc

log = logging.getLogger("saccade.engine")

UNFORESEEN = "the engine could not take this request; the failure has been logged"


class Inbox:
    """Messages of the front, read by a thread so that the front never waits for a step."""

    def __init__(self, channel: Channel) -> None:
        self._messages: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(channel,), daemon=True).start()

    def _read(self, channel: Channel) -> None:
        try:
            while (message := channel.receive(ToEngine)) is not None:
                self._messages.put(message)
        except Exception:
            # An engine that hears nothing any more must not look alive.
            log.exception("a message could not be read")
            channel.send(Failed("the engine could not read a message and has stopped"))
        finally:
            self._messages.put(Stop())

    def take(self, *, wait: bool, seconds: float | None = None) -> list[ToEngine]:
        """All messages there are; with `wait`, at least one, unless `seconds` pass without any."""
        taken: list[ToEngine] = []
        with contextlib.suppress(queue.Empty):
            if wait:
                taken.append(self._messages.get(timeout=seconds))
            while True:
                taken.append(self._messages.get_nowait())
        return taken


def serve(engine: Engine, inbox: Inbox, channel: Channel) -> None:
    """Until the front says stop: listen, step, tell."""
    heap = HeapTrimmer() if engine.info.device == "cpu" else None  # a GPU would wait for it
    preparing = engine.stats().to_prepare > 0
    while True:
        idle = engine.idle and not engine.prepare()
        if idle and preparing:
            preparing = False
            freeze_all_objects()  # captured steps too: a search through them takes as long as several steps
            channel.send(News((), engine.stats()))  # who waits for that hears of it
        messages = inbox.take(wait=idle, seconds=heap.seconds if heap is not None and heap.used else None)
        if idle and not messages and heap is not None:
            heap.trim()  # it has been quiet for a while: what the last requests used is given back
            continue
        if not hear(engine, channel, messages):
            return
        while (seconds := engine.spare) > 0:
            if not hear(engine, channel, inbox.take(wait=True, seconds=seconds)):
                return
        deltas = engine.step()
        channel.send(News(tuple(deltas), engine.stats()))
        if heap is not None:
            heap.used = True
            if heap.due:
                heap.trim()


def hear(engine: Engine, channel: Channel, messages: Iterable[ToEngine]) -> bool:
    """Do as told; whether the front wants the engine any longer."""
    for message in messages:
        match message:
            case Stop():
                return False
            case Submit(request):
                try:
                    engine.submit(request)
                except RequestError as error:
                    refusal = Refused(request.id, error.code or "", error.message, error.param)
                    channel.send(refusal)
                except Exception:  # whatever is wrong with it, the others are to be answered
                    log.exception("request %s could not be taken", request.id)
                    engine.cancel([request.id])
                    channel.send(Refused(request.id, "", UNFORESEEN, None))
            case Cancel(request_id):
                engine.cancel([request_id])
            case Recall(number, content, drop):
                tell = partial(_tell, channel, Recalled(number, engine.picture(content)))
                if drop:
                    engine.forget(content, tell)
                else:
                    tell()
            case Start():
                log.warning("a second start message was ignored")
    return True


def _tell(channel: Channel, message: Recalled) -> None:
    """From any thread; if the front is gone, whoever reads the channel notices."""
    with contextlib.suppress(EngineDied):
        channel.send(message)


def _end_starting(number: int, frame: object) -> NoReturn:
    """The front does not want the engine any more; progress bars are taken off the terminal on the way."""
    raise SystemExit(128 + number)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # Whoever signals a whole group means the front, which lets answers end before it ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_starting)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    start = channel.receive(ToEngine)
    if not isinstance(start, Start):
        return
    try:
        configure_malloc(
            KEEP_LARGE_BLOCKS if resolve_device(start.config).type == "cpu" else MMAP_LARGE_BLOCKS
        )
        engine = Engine(start.config)
        freeze_all_objects()
    except SaccadeError as error:
        channel.send(Failed(error.message))
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(EngineDied):  # the front is gone, and nobody left to tell
        channel.send(Ready(engine.info, engine.stats()))
        serve(engine, Inbox(channel), channel)
    engine.close()


if __name__ == "__main__":
    main()
