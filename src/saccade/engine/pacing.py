"""When to plan the next step: as late as the device does not notice.

takes   word of every launch and result, as the stopwatch does
gives   the seconds for which the next step need not be planned yet
owns    how long before a step's expected end the next one is begun
never   pauses beside steps hardly longer than planning the next one takes

Step N+1 is launched while N runs, so that the device never waits for the host. Planned as soon as N has
begun, it has no place for what comes meanwhile: that waits for the rest of N, and for N+1. Planned shortly
before the end of N it has, and whoever comes waits for the rest of N alone. Beside pictures, with steps of
13 ms, that is up to 10 ms less for a first token; beside texts alone, with steps of 4.3 ms of which one takes
0.8 to plan and launch, a played device gives 12.1 ms instead of 14.7. On a chip a token still takes 4.34 ms.

How long before is learnt in two ways. What planning and launching takes is seen with every step, put off or
not. And a result that is there before it is waited for means that the device had nothing to do meanwhile: the
next step is begun earlier from then on.
"""

import time
from collections.abc import Callable

LEAST = 1e-3  # seconds before the end
MOST = 20e-3
FIRST = 2.5e-3  # seconds that planning and launching are taken to need before one was seen
SLOWER, QUICKER = 2.5e-4, 1e-5  # that figure's change by a step that took more, or less: 1 in 26 takes more
MARGIN = 5e-4  # seconds beyond that: steps do not take quite what is expected
LATE = 2e-4  # of waiting, or less: the device was done, or nearly
EARLIER, LATER = 1e-3, 2e-5  # the lead's change by a step that came late, and by one that did not
WORTH = 1.5  # times the lead that a step must take
NAP = 2e-3  # seconds at most before it is asked again: a step may end sooner than expected


class Pace:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._need = FIRST  # seconds of planning and launching
        self._extra = 0.0  # seconds beyond that, for having been late
        self._began = clock()
        self._running = 0
        self._expected = 0.0  # seconds, of the step launched last
        self._end: float | None = None  # of the step that runs, as expected; None: nobody knows
        self._paused = False

    @property
    def lead(self) -> float:
        """Seconds before the expected end of a step at which the next is begun."""
        return min(max(self._need + self._extra + MARGIN, LEAST), MOST)

    @property
    def spare(self) -> float:
        """Seconds, after which to ask again; 0: plan now."""
        if self._end is None or self._expected < WORTH * self.lead:
            return 0.0
        left = min(max(self._end - self.lead - self._clock(), 0.0), NAP)
        self._paused |= left > 0
        return left

    def begin(self) -> None:
        """The next step is about to be planned."""
        self._began = self._clock()

    def launched(self, expected: float) -> None:
        """A step is on its way; `expected`: the milliseconds it should take."""
        took = self._clock() - self._began
        self._need = min(self._need + SLOWER, MOST) if took > self._need else max(self._need - QUICKER, 0.0)
        self._expected = expected / 1e3
        self._end = None if self._running else self._clock() + self._expected
        self._running += 1

    def result(self, waited: float | None) -> None:
        """The oldest running step has given its result after so many seconds of waiting for the device; None:
        without, so that its end was not seen."""
        self._running -= 1
        late = self._paused and waited is not None and waited < LATE
        self._extra = min(self._extra + EARLIER, MOST) if late else max(self._extra - LATER, 0.0)
        self._paused = False
        seen = waited is not None and self._running > 0
        self._end = self._clock() + self._expected if seen else None
