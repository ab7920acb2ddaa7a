"""How threads that load media are stopped, and how they wait for their turn.

takes   one thread's word that nobody wants the result any more
gives   `CancelToken`, which ends what another thread waits for; `FairSemaphore`
never   leaves a thread waiting after its cancel

A thread cannot be interrupted, but what it waits for can: a socket is shut down, a process is killed, a
condition is notified.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from saccade.errors import Overloaded


class LoadingCancelled(Overloaded):
    """The work was given up by who asked for it."""


class CancelToken:
    """Cancelled once, from any thread: registered callbacks run, checks raise `LoadingCancelled`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._ways: dict[object, Callable[[], None]] = {}

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        with self._lock:
            ways = [] if self._cancelled else list(self._ways.values())
            self._cancelled = True
        for way in ways:
            way()

    def raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise LoadingCancelled("The request was given up while its media were being loaded.")

    @contextmanager
    def on_cancel(self, way: Callable[[], None]) -> Iterator[None]:
        """While inside, a cancel calls `way`, which must not block; raises at once if it was said before."""
        mark = object()
        with self._lock:
            if not self._cancelled:
                self._ways[mark] = way
        self.raise_if_cancelled()
        try:
            yield
        finally:
            with self._lock:
                self._ways.pop(mark, None)


class FairSemaphore:
    """`total` units; who waits longest is served first, so that much is not starved by little."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def free(self) -> int:
        return self._free

    @contextmanager
    def holding(self, units: int, cancel: CancelToken, seconds: float) -> Iterator[None]:
        """Waits for `units` (of more than there are, for all) and keeps them while inside."""
        units = min(units, self.total)
        self._take(units, cancel, seconds)
        try:
            yield
        finally:
            with self._changed:
                self._free += units
                self._changed.notify_all()

    def _take(self, units: int, cancel: CancelToken, seconds: float) -> None:
        ticket = object()

        def ready() -> bool:
            return cancel.cancelled or (self._waiting[0] is ticket and self._free >= units)

        with cancel.on_cancel(self._wake), self._changed:
            self._waiting.append(ticket)
            try:
                served = self._changed.wait_for(ready, seconds)
                cancel.raise_if_cancelled()
                if not served:
                    raise Overloaded("Too many pictures or videos are being decoded; try again later.")
                self._free -= units
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
