"""When to plan the next step: as late as possible without making the device wait.

Step N+1 is launched while N runs. If it is planned as soon as N has begun, requests that arrive meanwhile
wait for all of N+1; if it is planned shortly before the end of N, they join it. With 13 ms steps (beside
images) a first token comes up to 10 ms earlier.

The lead (how long before the expected end of N planning begins) is learnt: from the time that planning and
launching take, and from outputs that are there before the host waits for them, which means the device was
idle.
"""

import time
from collections.abc import Callable

MIN_LEAD = 1e-3  # seconds
MAX_LEAD = 20e-3
FIRST_ESTIMATE = 2.5e-3  # seconds for planning and launching, before the first was measured
ESTIMATE_UP, ESTIMATE_DOWN = 2.5e-4, 1e-5  # change by a step that took more, or less: 1 in 26 takes more
MARGIN = 5e-4  # seconds: steps do not take exactly the expected time
LATE = 2e-4  # seconds of waiting; with less, the device was done or nearly so
EXTRA_UP, EXTRA_DOWN = 1e-3, 2e-5  # change of the lead by a step that was late, and by one that was not
MIN_STEP = 1.5  # shortest step that is paced, in leads
MAX_SLEEP = 2e-3  # seconds before `delay` is read again: a step may end sooner than expected


class StepPacer:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._estimate = FIRST_ESTIMATE  # seconds of planning and launching
        self._extra = 0.0  # seconds on top of it, after late steps
        self._planning_since = clock()
        self._running = 0
        self._expected = 0.0  # seconds, of the step launched last
        self._end: float | None = None  # expected end of the running step; None: unknown
        self._delayed = False

    @property
    def lead(self) -> float:
        """Seconds before the expected end of a step at which the next is planned."""
        return min(max(self._estimate + self._extra + MARGIN, MIN_LEAD), MAX_LEAD)

    @property
    def delay(self) -> float:
        """Seconds after which to read this again; 0: plan now."""
        if self._end is None or self._expected < MIN_STEP * self.lead:
            return 0.0
        left = min(max(self._end - self.lead - self._clock(), 0.0), MAX_SLEEP)
        self._delayed |= left > 0
        return left

    def planning_started(self) -> None:
        self._planning_since = self._clock()

    def launched(self, expected_ms: float) -> None:
        took = self._clock() - self._planning_since
        if took > self._estimate:
            self._estimate = min(self._estimate + ESTIMATE_UP, MAX_LEAD)
        else:
            self._estimate = max(self._estimate - ESTIMATE_DOWN, 0.0)
        self._expected = expected_ms / 1e3
        self._end = None if self._running else self._clock() + self._expected
        self._running += 1

    def finished(self, waited: float | None) -> None:
        """The output of the oldest running step is there, after so many seconds of waiting for the device;
        None: without waiting, so that its end was not seen."""
        self._running -= 1
        late = self._delayed and waited is not None and waited < LATE
        self._extra = min(self._extra + EXTRA_UP, MAX_LEAD) if late else max(self._extra - EXTRA_DOWN, 0.0)
        self._delayed = False
        end_seen = waited is not None and self._running > 0
        self._end = self._clock() + self._expected if end_seen else None
