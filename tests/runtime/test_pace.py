"""When the next step is planned, on a clock of our own."""

import pytest

from saccade.runtime.pace import EARLIER, LEAST, MOST, NAP, WORTH, Pace


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


def test_the_next_step_is_planned_shortly_before_the_end_of_the_one_that_runs(clock: Clock) -> None:
    pace = Pace(clock)
    pace.launched(13.0)
    assert nap_through(pace, clock) == pytest.approx(0.013 - LEAST)
    clock.now += 0.001
    pace.launched(20.0)  # behind the first, which still runs
    assert pace.spare == 0  # its beginning has not been seen yet
    clock.now = 0.0125
    pace.result(0.0015)
    assert nap_through(pace, clock) == pytest.approx(0.020 - LEAST)


def test_beside_short_steps_nothing_is_put_off(clock: Clock) -> None:
    pace = Pace(clock)
    pace.launched(1e3 * WORTH * LEAST - 0.1)
    assert pace.spare == 0
    pace.launched(30.0)
    pace.result(0.002)
    assert pace.spare > 0


def test_a_device_that_was_kept_waiting_gets_its_next_step_earlier(clock: Clock) -> None:
    pace = Pace(clock)
    pace.launched(50.0)
    for _ in range(3):
        nap_through(pace, clock)
        pace.launched(50.0)
        pace.result(0.0)
    assert pace.lead == pytest.approx(LEAST + 3 * EARLIER)
    for _ in range(1000):
        nap_through(pace, clock)
        pace.launched(50.0)
        pace.result(0.004)
    assert pace.lead == pytest.approx(LEAST)
    for _ in range(100):
        nap_through(pace, clock)
        pace.launched(90.0)
        pace.result(0.0)
    assert pace.lead == pytest.approx(MOST)


def test_a_step_nobody_put_off_says_nothing_about_the_lead(clock: Clock) -> None:
    pace = Pace(clock)
    pace.launched(4.0)
    for _ in range(5):
        assert pace.spare == 0
        pace.launched(4.0)
        pace.result(0.0)
    assert pace.lead == LEAST


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
