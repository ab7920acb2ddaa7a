"""When the next step is planned, on a clock of our own."""

from random import Random

import pytest

from saccade.engine.pacing import EARLIER, FIRST, LEAST, MARGIN, MOST, NAP, WORTH, Pace

LEAD = FIRST + MARGIN  # before anything was learnt


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def nap_through(pace: Pace, clock: Clock) -> float:
    """Sleep as told until it is time to plan; how long that was."""
    began = clock.now
    while (seconds := pace.spare) > 0:
        assert seconds <= NAP
        clock.now += seconds
    return clock.now - began


def step(pace: Pace, clock: Clock, expected: float, host: float = 0.0) -> None:
    """Plan and launch one, in so many seconds."""
    pace.begin()
    clock.now += host
    pace.launched(expected)


def test_the_next_step_is_planned_shortly_before_the_end_of_the_one_that_runs(clock: Clock) -> None:
    pace = Pace(clock)
    pace.launched(13.0)
    assert nap_through(pace, clock) == pytest.approx(0.013 - LEAD, abs=5e-5)
    step(pace, clock, 20.0, host=0.001)  # behind the first, which still runs
    assert pace.spare == 0  # its beginning has not been seen yet
    clock.now = 0.0125
    pace.result(0.0015)
    assert nap_through(pace, clock) == pytest.approx(0.020 - LEAD, abs=5e-5)


def test_beside_short_steps_nothing_is_put_off(clock: Clock) -> None:
    pace = Pace(clock)
    pace.launched(1e3 * WORTH * LEAD - 0.1)
    assert pace.spare == 0
    pace.launched(30.0)
    pace.result(0.002)
    assert pace.spare > 0


def test_a_device_that_was_kept_waiting_gets_its_next_step_earlier(clock: Clock) -> None:
    pace = Pace(clock)
    for _ in range(1000):
        step(pace, clock, 50.0)
        pace.result(None)
    assert pace.lead == LEAST
    step(pace, clock, 50.0)
    for _ in range(3):
        assert nap_through(pace, clock) > 0
        step(pace, clock, 50.0)
        pace.result(0.0)
    assert pace.lead == pytest.approx(MARGIN + 3 * EARLIER)
    for _ in range(1000):
        nap_through(pace, clock)
        step(pace, clock, 50.0)
        pace.result(0.004)
    assert pace.lead == LEAST
    for _ in range(100):
        nap_through(pace, clock)
        step(pace, clock, 90.0)
        pace.result(0.0)
    assert pace.lead == pytest.approx(MOST)


def test_a_result_nobody_was_put_off_for_is_never_late(clock: Clock) -> None:
    pace = Pace(clock)
    step(pace, clock, 2.0)
    for _ in range(5):
        assert pace.spare == 0
        step(pace, clock, 2.0)
        pace.result(0.0)
    assert pace.lead <= LEAD


def test_planning_that_takes_longer_is_begun_earlier_and_the_other_way_round(clock: Clock) -> None:
    """Whether or not steps are long enough to be put off: else a lead once grown would stay."""
    pace = Pace(clock)
    for host in (6e-3, 0.8e-3):
        for _ in range(1000):
            step(pace, clock, 4.0, host)
            pace.result(0.003)
        assert pace.lead == pytest.approx(host + MARGIN, abs=3e-4)


def played(*, paced: bool, milliseconds: float, steps: int = 6_000) -> tuple[float, float]:
    """A device, and a loop that launches one step ahead; texts come at any time, 16 a second, and take 4 ms
    more. Their mean wait, and how much of the time the device had nothing to do."""
    random, clock = Random(0), Clock()
    pace = Pace(clock)
    waits, idle, free, comes = [], 0.0, 0.0, random.expovariate(16)
    waiting: list[float] = []
    running: tuple[float, list[float]] | None = None
    for _ in range(steps):
        if paced and running is not None:
            nap_through(pace, clock)
        while comes <= clock.now:  # what came while it slept is heard before the plan
            waiting.append(comes)
            comes += random.expovariate(16)
        expected = milliseconds + (4 if waiting else 0)
        step(pace, clock, expected, random.uniform(0.6e-3, 1.0e-3))
        idle += max(clock.now - free, 0.0)
        free = max(clock.now, free) + expected / 1e3 * random.uniform(0.97, 1.03)
        behind, running, waiting = running, (free, waiting), []
        if behind is not None:
            waited = max(behind[0] - clock.now, 0.0)
            clock.now += waited
            waits += [clock.now - one for one in behind[1]]
            pace.result(waited)
            clock.now += 2e-4  # to tell what it brought
    return sum(waits) / len(waits), idle / clock.now


@pytest.mark.parametrize(("milliseconds", "gain"), [(4.3, 2e-3), (13.0, 9e-3)])
def test_texts_wait_less_and_the_device_never(milliseconds: float, gain: float) -> None:
    at_once, _ = played(paced=False, milliseconds=milliseconds)
    put_off, idle = played(paced=True, milliseconds=milliseconds)
    assert at_once - put_off > gain
    assert idle < 0.001


def test_where_the_end_of_a_step_was_not_seen_the_next_is_planned_at_once(clock: Clock) -> None:
    pace = Pace(clock)
    pace.launched(50.0)
    pace.launched(50.0)
    pace.result(None)  # it sampled nothing
    assert pace.spare == 0
    pace.launched(50.0)
    pace.result(0.03)
    assert pace.spare > 0
    pace.result(0.03)
    assert pace.spare == 0  # nothing runs any more
