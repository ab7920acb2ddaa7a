"""A server and its engine as one process tree: from loading to the end.

takes   the two configs
gives   the process's exit status: `serve`'s, or 128 and the signal's number if that came before anything was
        served
owns    the engine it starts, the signals until `serve` has them
never   leaves an engine behind; waits for what nobody waits for any more
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import uvloop

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig, ServeConfig
from saccade.engine.client import ProcessLink
from saccade.host.garbage_collection import freeze_all_objects
from saccade.host.malloc import MMAP_LARGE_BLOCKS, configure_malloc
from saccade.inputs.processor import InputProcessor
from saccade.server.app import bind, serve

log = logging.getLogger("saccade.server")

# Seconds after which a thread that prepares a request lets the event loop go on. Beside a thread that reads
# one picture after another the loop is late by 1.1 ms in the mean and 5.9 at the 99th percentile (two busy
# cores); with Python's own 5 ms by 1.2 and 6.9.
SWITCH_SECONDS = 2e-4
EXIT_SECONDS = 2.0  # for threads to notice that everything is over
SIGNALLED = 128  # what a shell adds to the number of the signal that ended a process

# Printed for a checkpoint that brings a picture to try, as the embedded one does.
_EXAMPLE = """\
Ask it something, in another terminal:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @- <<EOF
{{"model": "{model}", "messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url": {{"url":
    "data:image/png;base64,$(base64 < {picture} | tr -d '\\n')"}}}},
  {{"type": "text", "text": "What is the total amount?"}}]}}]}}
EOF
"""


def run_server(engine: EngineConfig, config: ServeConfig) -> int:
    """A server and its engine, from loading to the end; the process's exit status.

    Everything has been answered and the engine has ended when this is over. A thread that is not (it decodes
    what nobody waits for, or still loads) ends with the process, which then ends here.
    """
    configure_malloc(MMAP_LARGE_BLOCKS)
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run_server(engine, config))
    early = status > SIGNALLED
    if not _threads_over(0.0 if early else EXIT_SECONDS):
        if not early:
            log.warning("a thread still works for a request nobody waits for; the process ends without it")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # leaving by any other way waits for it
    return status


def _threads_over(seconds: float) -> bool:
    """Whether every thread that would keep the process from ending has ended, given so much time."""
    deadline = time.monotonic() + seconds
    others = [
        one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon
    ]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


async def _run_server(engine: EngineConfig, config: ServeConfig) -> int:
    """A signal while it starts ends it, engine included; from then on signals are `serve`'s."""
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    told: list[int] = []

    def signalled(number: int) -> None:
        if not told and running is not None:
            running.cancel()
        told.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    try:
        return await _start_and_serve(engine, config)
    except asyncio.CancelledError:
        if not told:
            raise
        log.info("told to stop before anything was served")
        return SIGNALLED + told[0]


async def _start_and_serve(engine: EngineConfig, config: ServeConfig) -> int:
    with bind(config) as listener:  # a port that is taken is told before a model is loaded
        checkpoint = await _opened(engine.model)
        link = ProcessLink(engine)
        await link.start()
        try:
            front = InputProcessor(checkpoint, link.info.max_model_len, config.media)
            names = config.served_model_names or (checkpoint.name,)

            def started(url: str) -> None:
                print(f"serving {', '.join(names)} on {link.info.device} at {url}", flush=True)
                if (example := checkpoint.path / "examples" / "receipt.png").is_file():
                    print(_EXAMPLE.format(picture=example, url=url, model=names[0]), flush=True)

            freeze_all_objects()
            with contextlib.closing(front):
                return await serve(front, link, config, listener=listener, started=started)
        finally:
            await link.stop()


async def _opened(model: str) -> Checkpoint:
    """In a thread that the loop does not wait for at its end: it may be downloading."""
    thread = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, open_checkpoint, model)
    finally:
        thread.shutdown(wait=False)
