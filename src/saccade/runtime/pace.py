"""When to plan the next step: as late as the device does not notice.

takes   word of every launch and result, as the stopwatch does
gives   the seconds for which the next step need not be planned yet
owns    how long before a step's expected end the next one is begun
never   pauses where it would not gain a request anything: beside short steps

Step N+1 is launched while N runs, so that the device never waits for the host. Planned as soon as N has
begun, it has no place for what comes meanwhile: that waits for the rest of N, and for N+1. Planned shortly
before the end of N it has, and whoever comes waits for the rest of N alone. Beside pictures, with steps of
13 ms, that is up to 10 ms less for a first token.

How long before is learnt: a result that is there before it is waited for means that the device had nothing to
do meanwhile, and the next step is begun earlier from then on.
"""

import time
from collections.abc import Callable

LEAST = 3e-3  # seconds before the end: planning and launching takes 0.5 to 3 ms of them
MOST = 20e-3
LATE = 5e-4  # of waiting, or less: the device was done, or nearly
EARLIER, LATER = 1e-3, 2e-5  # the lead's change by a step that came late, and by one that did not
WORTH = 2  # times the lead that a step must take
NAP = 2e-3  # seconds at most before it is asked again: a step may end sooner than expected


class Pace:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.lead = LEAST
        self._running = 0
        self._expected = 0.0  # seconds, of the step launched last
        self._end: float | None = None  # of the step that runs, as expected; None: nobody knows
        self._paused = False

    @property
    def spare(self) -> float:
        """Seconds, after which to ask again; 0: plan now."""
        if self._end is None or self._expected < WORTH * self.lead:
            return 0.0
        left = min(max(self._end - self.lead - self._clock(), 0.0), NAP)
        self._paused |= left > 0
        return left

    def launched(self, expected: float) -> None:
        """A step is on its way; `expected`: the milliseconds it should take."""
        self._expected = expected / 1e3
        self._end = None if self._running else self._clock() + self._expected
        self._running += 1

    def result(self, waited: float | None) -> None:
        """The oldest running step has given its result after so many seconds of waiting for the device; None:
        without, so that its end was not seen."""
        self._running -= 1
        if self._paused and waited is not None:
            change = EARLIER if waited < LATE else -LATER
            self.lead = min(max(self.lead + change, LEAST), MOST)
        self._paused = False
        seen = waited is not None and self._running > 0
        self._end = self._clock() + self._expected if seen else None
