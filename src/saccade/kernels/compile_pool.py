"""Processes that compile kernels into Triton's cache on disk, for warm-up.

Threads are not enough: a good part of a compilation holds the GIL, so sixteen threads took 58 s for what
takes 27 one after the other. A worker that fails never fails a start: the caller compiles what is missing.
"""

import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Self

MOST = 16
LEAST_CORES = 4  # with fewer, starting processes costs more than they gain
SECONDS = 60.0  # for one kernel; the longest takes 3
DONE, FAILED = b"done\n", b"failed\n"  # answers of a worker
COMMAND = (sys.executable, "-P", "-m", "saccade.kernels.compile_worker")

_CURRENT: ContextVar["CompilePool | None"] = ContextVar("workers", default=None)


def current_pool() -> "CompilePool | None":
    """The pool of this context."""
    return _CURRENT.get()


def default_workers() -> int:
    """How many workers are useful on this machine; one core is left to the caller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A frozen program has no interpreter to start: its executable is the program.
    return min(MOST, cores - 1) if cores >= LEAST_CORES and not getattr(sys, "frozen", False) else 0


class CompilePool:
    """Within `with`, `current_pool` gives it. As many threads as workers may ask."""

    def __init__(self, count: int, command: Sequence[str] = COMMAND, seconds: float = SECONDS) -> None:
        self.count = count
        self._command, self._seconds = tuple(command), seconds
        self._started = self._dismissed = False
        self._starting = threading.Lock()
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._token: Token[CompilePool | None] | None = None

    @property
    def alive(self) -> int:
        """The number of running processes."""
        return sum(worker.poll() is None for worker in self._all)

    def start(self) -> None:
        """Start the processes, which are ready in a second; jobs may be given before."""
        with self._starting:
            if self._started:
                return
            self._started = True
            with suppress(Exception):  # e.g. processes are not allowed
                for _ in range(self.count):
                    self._all.append(self._spawn())
                    self._idle.put(self._all[-1])

    def _spawn(self) -> subprocess.Popen[bytes]:
        listed: list[object] = list(sys.path)  # Python ignores other entries, too
        paths = os.pathsep.join(path or str(Path.cwd()) for path in listed if isinstance(path, str))
        return subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,  # a worker ends when it closes
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C of the terminal is for the parent
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )

    def compile(self, job: Mapping[str, object]) -> bool:
        """Whether a worker compiled it. One that dies or does not answer is not asked again."""
        if self._dismissed:
            return False
        self.start()
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            return False
        answer = self._ask(worker, repr(dict(job)).encode() + b"\n")
        if answer in (DONE, FAILED):
            self._idle.put(worker)
        else:
            worker.kill()
        return answer == DONE

    def _ask(self, worker: subprocess.Popen[bytes], line: bytes) -> bytes:
        if worker.stdin is None or worker.stdout is None:
            return b""
        try:
            worker.stdin.write(line)  # shorter than a pipe: never waits
            poll = select.poll()
            poll.register(worker.stdout, select.POLLIN)
            return os.read(worker.stdout.fileno(), 64) if poll.poll(self._seconds * 1000) else b""
        except (OSError, ValueError):  # it has died, or the pool was closed
            return b""

    def dismiss(self) -> None:
        """Ask the workers no more."""
        self._dismissed = True

    def close(self) -> None:
        """End the processes. Triton writes a kernel to its cache atomically, so none is left half written."""
        self.dismiss()
        with self._starting:
            self._started = True
            for worker in self._all:
                worker.kill()
            for worker in self._all:
                with worker:  # closes the pipes and waits for it
                    pass
            self._all.clear()

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
        self.close()
