"""How long each step takes on the device.

A step begins when the one before it ends, or when it is launched if none was running. The output of a step
that samples nothing is available without waiting for the device: its end is not seen, and its time counts to
the next step that does sample.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class StepTimer(Protocol):
    def launch_started(self) -> None: ...

    def launched(self) -> None: ...

    def finished(self, *, waited: bool) -> float | None:
        """The output of the oldest running step is there; `waited`: by waiting for the device. Returns the
        step's seconds, None where its end was not seen."""

    def failed(self) -> None:
        """A step failed, the one being launched or else the oldest running one: discard its time."""

    def idle(self) -> None:
        """Nothing runs: the next step begins when it is launched."""


class HostStepTimer:
    """By the host's clock, for a device that is done when the launch returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running = 0
        self._since: float | None = None  # begin of the time not yet accounted for

    def launch_started(self) -> None:
        self._running += 1
        if self._since is None:
            self._since = self._clock()

    def launched(self) -> None:
        pass

    def finished(self, *, waited: bool) -> float | None:
        self._running -= 1
        if not waited or self._since is None:
            return None
        now = self._clock()
        seconds, self._since = now - self._since, now if self._running else None
        return seconds

    def failed(self) -> None:
        self._running = max(self._running - 1, 0)
        self._since = None

    def idle(self) -> None:
        self._since = None


class TimerEvent(Protocol):
    """A point in the work of a device."""

    def seconds_until(self, later: "TimerEvent") -> float:
        """Waits for the later one."""


class DeviceStepTimer:
    """By the device's clock. The host launches step N+1 before it reads the output of N: where launching
    takes longer than running, the host's clock would count the launch of N+1 as the time of N."""

    def __init__(self, record: Callable[[], TimerEvent]) -> None:
        self._record = record
        self._begun: TimerEvent | None = None  # of the step being launched
        self._running: deque[tuple[TimerEvent, TimerEvent]] = deque()  # begin and end, oldest step first
        self._since: TimerEvent | None = None  # begin of steps not yet accounted for

    def launch_started(self) -> None:
        self._begun = self._record()

    def launched(self) -> None:
        if self._begun is None:
            raise RuntimeError("launched() without launch_started()")
        self._running.append((self._begun, self._record()))
        self._begun = None

    def finished(self, *, waited: bool) -> float | None:
        first, last = self._running.popleft()
        first = self._since or first
        self._since = None if waited else first
        return first.seconds_until(last) if waited else None

    def failed(self) -> None:
        if self._begun is not None:
            self._begun = None
        elif self._running:
            self._running.popleft()
        self._since = None

    def idle(self) -> None:
        self._since = None
