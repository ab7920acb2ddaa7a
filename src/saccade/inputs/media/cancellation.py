"""Cancelling threads that load media, and limiting what they hold at once.

A thread cannot be interrupted, but what it waits for can: a socket is shut down, a process is killed, a
condition is notified.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from saccade.errors import Overloaded


class LoadingCancelled(Overloaded):
    """The caller no longer wants the result."""


class CancelToken:
    """Any thread may cancel it, once: it runs the registered callbacks, and later checks raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            callbacks = [] if self.cancelled else list(self._callbacks.values())
            self.cancelled = True
        for callback in callbacks:
            callback()

    def raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise LoadingCancelled("The request was cancelled while its media were being loaded.")

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Inside, cancelling calls `callback`, which must not block. Raises if it is already cancelled."""
        key = object()
        with self._lock:
            if not self.cancelled:
                self._callbacks[key] = callback
        self.raise_if_cancelled()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.pop(key, None)


class FairSemaphore:
    """`total` units, granted in the order of requests, so that small requests cannot starve a large one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def holding(self, units: int, cancel: CancelToken, seconds: float) -> Iterator[None]:
        """Waits up to `seconds` for `units` (at most the total) and holds them inside. 0 units never wait."""
        if not units:
            yield
            return
        units = min(units, self.total)
        ticket = object()
        with cancel.on_cancel(self._wake), self._changed:
            self._waiting.append(ticket)
            try:
                served = self._changed.wait_for(
                    lambda: cancel.cancelled or (self._waiting[0] is ticket and self.free >= units), seconds
                )
                cancel.raise_if_cancelled()
                if not served:
                    raise Overloaded("Too many images or videos are being decoded; try again later.")
                self.free -= units
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.free += units
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
