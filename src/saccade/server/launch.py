"""`saccade serve`: starts the engine core, serves HTTP until a signal or the engine's end, then drains.

Exit status: 0 after a drained shutdown, 1 if the engine died, 128 + signal number if stopped during startup.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
import uvloop

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig, ServeConfig
from saccade.engine.client import EngineClient, EngineInterface
from saccade.errors import ConfigError, EngineDied, Overloaded
from saccade.host.event_loop_lag import measure_event_loop_lag
from saccade.host.garbage_collection import freeze_all_objects
from saccade.host.malloc import MMAP_LARGE_BLOCKS, HeapTrimmer, configure_malloc
from saccade.inputs.processor import InputProcessor
from saccade.server.app import create_app
from saccade.server.generation import ServerState
from saccade.server.http_protocol import LimitedHttpProtocol, UvicornConfig

log = logging.getLogger("saccade.server")

# Python's thread switch interval. Next to a thread that decodes images on two busy cores the event loop lags
# 1.1 ms on average and 5.9 ms at p99; with the default of 5 ms, 1.2 and 6.9.
SWITCH_SECONDS = 2e-4
KEEP_ALIVE_SECONDS = 30  # of idle connections; longer than common proxies reuse one
FLUSH_SECONDS = 2  # for the last bytes of finished responses to reach their clients
BACKLOG = 2048
ENGINE_POLL_SECONDS = 0.25
EXIT_SECONDS = 2.0  # for worker threads to end
SIGNAL_STATUS = 128  # shells add the signal's number to it

# Printed for a checkpoint with an example image, as the embedded one has.
_EXAMPLE = """\
Ask it something, in another terminal:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @- <<EOF
{{"model": "{model}", "messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url": {{"url":
    "data:image/png;base64,$(base64 < {image} | tr -d '\\n')"}}}},
  {{"type": "text", "text": "What is the total amount?"}}]}}]}}
EOF
"""


def run_server(engine: EngineConfig, config: ServeConfig) -> int:
    """Run the server and its engine to their end; returns the exit status.

    A worker thread may still be decoding for a cancelled request, or loading: then the process exits here.
    """
    configure_malloc(MMAP_LARGE_BLOCKS)
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run_server(engine, config))
    stopped_early = status > SIGNAL_STATUS
    if not _join_threads(0.0 if stopped_early else EXIT_SECONDS):
        if not stopped_early:
            log.warning("a worker thread is still busy with a cancelled request; exiting without it")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a normal exit would wait for the thread
    return status


def _join_threads(seconds: float) -> bool:
    """Wait for all non-daemon threads; whether they have ended."""
    deadline = time.monotonic() + seconds
    current = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not current and not thread.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


async def _run_server(engine: EngineConfig, config: ServeConfig) -> int:
    """Stop startup on a signal, the engine included; `serve` handles later signals."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []

    def on_signal(number: int) -> None:
        if not received and task is not None:
            task.cancel()
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await _start_and_serve(engine, config)
    except asyncio.CancelledError:
        if not received:
            raise
        log.info("stopped by a signal during startup")
        return SIGNAL_STATUS + received[0]


async def _start_and_serve(engine: EngineConfig, config: ServeConfig) -> int:
    with bind(config) as listener:  # a port in use is reported before the model is loaded
        checkpoint = await _open_checkpoint(engine.model)
        client = EngineClient(engine)
        await client.start()
        try:
            processor = InputProcessor(
                checkpoint,
                client.info.max_model_len,
                config.media,
                reasoning_parser=config.reasoning_parser,
                tool_parser=config.tool_parser,
            )
            names = config.served_model_names or (checkpoint.name,)

            def on_started(url: str) -> None:
                print(f"serving {', '.join(names)} on {client.info.device} at {url}", flush=True)
                if (image := checkpoint.path / "examples" / "receipt.png").is_file():
                    print(_EXAMPLE.format(image=image, url=url, model=names[0]), flush=True)

            freeze_all_objects()
            with contextlib.closing(processor):
                return await serve(processor, client, config, listener=listener, on_started=on_started)
        finally:
            await client.stop()


async def _open_checkpoint(model: str) -> Checkpoint:
    """In a thread the event loop does not join at its end: it may be downloading."""
    thread = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, open_checkpoint, model)
    finally:
        thread.shutdown(wait=False)


# --- serving --------------------------------------------------------------------------------------------


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`serve` handles signals: it drains before uvicorn stops listening."""
        yield


def bind(config: ServeConfig) -> socket.socket:
    """A bound socket that does not listen yet; port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from error
    return listener


def _cannot_listen(config: ServeConfig, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror}")


async def serve(
    processor: InputProcessor,
    engine: EngineInterface,
    config: ServeConfig,
    *,
    listener: socket.socket | None = None,
    on_started: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status: 0, or 1 if the engine died.

    `on_started` gets the base URL once the server accepts requests. Setting `stop` acts like a signal.
    A second signal aborts all requests.
    """
    listener = listener or bind(config)
    try:
        listener.listen(BACKLOG)  # uvicorn would not report this failure
    except OSError as error:
        raise _cannot_listen(config, error) from error
    app = create_app(processor, engine, config)
    options = UvicornConfig(
        app,
        read_timeout=config.read_timeout,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        backlog=BACKLOG,
    )
    server = _UvicornServer(options)
    stop, abort = stop or asyncio.Event(), asyncio.Event()
    remove_handlers = _handle_signals(stop, abort)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if on_started is not None and server.started:
            on_started(_url(listener))
        async with measure_event_loop_lag(app.state.metrics.loop_lag.observe):
            engine_died = await _wait_for_end(app.state, stop, running)
        await _shut_down(app.state, engine_died, abort)
    finally:
        server.should_exit = True
        server.force_exit = abort.is_set()
        await asyncio.wait({running})
        app.state.close()
        remove_handlers()
    running.result()
    return 1 if engine_died else 0


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _handle_signals(stop: asyncio.Event, abort: asyncio.Event) -> Callable[[], None]:
    """The first signal sets `stop`, the second `abort`. Returns a function that removes the handlers."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            abort.set()
        stop.set()

    added: list[signal.Signals] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not on the main thread
            loop.add_signal_handler(number, on_signal)
            added.append(number)

    def remove() -> None:
        for number in added:
            loop.remove_signal_handler(number)

    return remove


async def _wait_for_end(state: ServerState, stop: asyncio.Event, running: asyncio.Task[None]) -> bool:
    """Wait for `stop` or the engine's end; returns whether the engine died.

    The heap is trimmed while no request is active, and rarely otherwise: the event loop stalls meanwhile.
    """
    heap = HeapTrimmer()
    while not stop.is_set() and not running.done():
        if not state.engine.alive:
            return True
        if heap.overdue or (heap.due and not state.active):
            await asyncio.to_thread(heap.trim)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), ENGINE_POLL_SECONDS)
    return False


async def _shut_down(state: ServerState, engine_died: bool, abort: asyncio.Event) -> None:
    if engine_died:
        log.error("the engine has stopped; the server exits")
        state.abort_all(EngineDied("the engine has stopped; the server is about to exit"))
    else:
        log.info("draining %d active requests", len(state.active))
    drained = asyncio.create_task(state.drain(0.0 if engine_died else state.config.shutdown_timeout))
    aborted = asyncio.create_task(abort.wait())
    await asyncio.wait({drained, aborted}, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        state.abort_all(
            Overloaded("the server was stopped before this answer was complete; send it elsewhere")
        )
    for task in (drained, aborted):
        task.cancel()
    await asyncio.wait({drained, aborted})
