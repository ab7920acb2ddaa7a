"""How long each step takes, seen from the host: from when the device could begin it to its result.

takes   word of every launch and every result, in their order
gives   the seconds of a step, or None where its result says nothing of its end
never   waits

A step begins when the one before it ends, or when it is launched if none was running. A step that samples
nothing gives its result at once, without waiting for the device: its end is not seen, and its time is part of
the next step's that does sample.
"""

import time
from collections.abc import Callable


class Stopwatch:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running = 0
        self._since: float | None = None  # when the time not yet accounted for began

    def launch(self) -> None:
        self._running += 1
        if self._since is None:
            self._since = self._clock()

    def result(self, *, waited: bool) -> float | None:
        """The oldest running step has given its result; `waited`: by waiting for the device."""
        self._running -= 1
        if not waited or self._since is None:
            return None
        now = self._clock()
        seconds, self._since = now - self._since, now if self._running else None
        return seconds

    def reset(self) -> None:
        """A step has failed: whatever was measured is worth nothing."""
        self._running = max(self._running - 1, 0)
        self._since = None
