"""How long each step takes: from when the device could begin it to its end.

takes   word of every launch and every result, in their order
gives   the seconds of a step, or None where its result says nothing of its end
never   waits for more than the result itself

A step begins when the one before it ends, or when it is launched if none was running. A step that samples
nothing gives its result at once, without waiting for the device: its end is not seen, and its time is part of
the next step's that does sample.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Watch(Protocol):
    def launch(self) -> None:
        """A step is about to be launched."""

    def launched(self) -> None:
        """All of it is on its way."""

    def result(self, *, waited: bool) -> float | None:
        """The oldest running step has given its result; `waited`: by waiting for the device."""

    def reset(self) -> None:
        """A step has failed, being launched or the oldest running one: what was measured is worth nothing."""

    def rest(self) -> None:
        """Nothing runs and nobody waits: the next step begins when it is launched."""


class Stopwatch:
    """By the host's clock, for a device that is done when its launch is."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running = 0
        self._since: float | None = None  # when the time not yet accounted for began

    def launch(self) -> None:
        self._running += 1
        if self._since is None:
            self._since = self._clock()

    def launched(self) -> None:
        pass

    def result(self, *, waited: bool) -> float | None:
        self._running -= 1
        if not waited or self._since is None:
            return None
        now = self._clock()
        seconds, self._since = now - self._since, now if self._running else None
        return seconds

    def reset(self) -> None:
        self._running = max(self._running - 1, 0)
        self._since = None

    def rest(self) -> None:
        self._since = None


class Mark(Protocol):
    """A moment in the work of a device."""

    def until(self, later: "Mark") -> float:
        """Seconds; waits for the later one."""


class DeviceStopwatch:
    """By the device's own clock. The host launches the next step before it looks at the result of the last:
    where launching takes longer than running, its clock would count the one's launch as the other's time."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._begun: Mark | None = None  # of the step being launched
        self._running: deque[tuple[Mark, Mark]] = deque()  # first and last moment, oldest step first
        self._since: Mark | None = None  # first moment of steps not yet accounted for

    def launch(self) -> None:
        self._begun = self._mark()

    def launched(self) -> None:
        if self._begun is None:
            raise RuntimeError("a step was launched that was never begun")
        self._running.append((self._begun, self._mark()))
        self._begun = None

    def result(self, *, waited: bool) -> float | None:
        first, last = self._running.popleft()
        first = self._since or first
        self._since = None if waited else first
        return first.until(last) if waited else None

    def reset(self) -> None:
        if self._begun is not None:
            self._begun = None
        elif self._running:
            self._running.popleft()
        self._since = None

    def rest(self) -> None:
        self._since = None
