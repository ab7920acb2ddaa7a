"""Processes that compile kernels into Triton's cache on disk, where this process then finds them.

takes   a kernel's name and all that Triton compiles it by, as Python literals
gives   whether it lies in the cache now; what does not, its asker compiles
owns    the processes, from the first kernel that is missing (or `start`) until `close`
never   forks what this process has in memory; ends a start, or holds it up for long, because a worker fails

Threads are not enough: a good part of a compilation holds the interpreter's lock, so sixteen threads took
58 s together for what takes 27 one after the other, and the thread that asked for kernels waited with them.
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
LEAST_CORES = 4  # with fewer, what processes need to start is more than they gain
SECONDS = 60.0  # for one kernel; the longest takes 3
DONE, FAILED = b"done\n", b"failed\n"  # what a worker answers
COMMAND = (sys.executable, "-P", "-m", "saccade.kernels.compile_worker")

_CURRENT: ContextVar["CompilePool | None"] = ContextVar("workers", default=None)


def current() -> "CompilePool | None":
    """Those that compile for who asks here."""
    return _CURRENT.get()


def default_workers() -> int:
    """How many workers this machine has use for; one core is left to who asks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A frozen program has no interpreter to start: its executable is the program.
    return min(MOST, cores - 1) if cores >= LEAST_CORES and not getattr(sys, "frozen", False) else 0


class CompilePool:
    """Within `with`, `current` gives them. They are asked by as many threads as there are workers."""

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
        """Processes that run."""
        return sum(worker.poll() is None for worker in self._all)

    def start(self) -> None:
        """They are ready in a second; jobs may come before."""
        with self._starting:
            if self._started:
                return
            self._started = True
            with suppress(Exception):  # whatever it is that lets nobody start a process
                for _ in range(self.count):
                    self._all.append(self._spawn())
                    self._idle.put(self._all[-1])

    def _spawn(self) -> subprocess.Popen[bytes]:
        listed: list[object] = list(sys.path)  # what is no text there Python passes over too
        paths = os.pathsep.join(path or str(Path.cwd()) for path in listed if isinstance(path, str))
        return subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,  # that it closes tells a worker that we are gone
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is ours to handle
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )

    def compile(self, job: Mapping[str, object]) -> bool:
        """Whether a worker compiled it. One that dies, is silent or talks nonsense is not asked again."""
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
        except (OSError, ValueError):  # it has died; or they were closed
            return b""

    def dismiss(self) -> None:
        """They are not asked any more."""
        self._dismissed = True

    def close(self) -> None:
        """None is left, and none is asked any more. A kernel half compiled is not in the cache: Triton puts
        it there in one move."""
        self.dismiss()
        with self._starting:
            self._started = True
            for worker in self._all:
                worker.kill()
            for worker in self._all:
                with worker:  # closes the pipes, waits for its end
                    pass
            self._all.clear()

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
        self.close()
