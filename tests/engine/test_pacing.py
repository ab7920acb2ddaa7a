"""When the next step is planned, on a clock of our own."""

from random import Random

import pytest

from saccade.engine.pacing import (
    EXTRA_UP,
    FIRST_ESTIMATE,
    MARGIN,
    MAX_LEAD,
    MAX_SLEEP,
    MIN_LEAD,
    MIN_STEP,
    StepPacer,
)

LEAD = FIRST_ESTIMATE + MARGIN  # before anything was learnt


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sleep_until_due(pacer: StepPacer, clock: Clock) -> float:
    """Sleep as told until it is time to plan; how long that was."""
    began = clock.now
    while (seconds := pacer.delay) > 0:
        assert seconds <= MAX_SLEEP
        clock.now += seconds
    return clock.now - began


def step(pacer: StepPacer, clock: Clock, expected: float, host: float = 0.0) -> None:
    """Plan and launch one, in so many seconds."""
    pacer.planning_started()
    clock.now += host
    pacer.launched(expected)


def test_the_next_step_is_planned_shortly_before_the_end_of_the_running_one(clock: Clock) -> None:
    pacer = StepPacer(clock)
    pacer.launched(13.0)
    assert sleep_until_due(pacer, clock) == pytest.approx(0.013 - LEAD, abs=5e-5)
    step(pacer, clock, 20.0, host=0.001)  # behind the first, which still runs
    assert pacer.delay == 0  # its beginning has not been seen yet
    clock.now = 0.0125
    pacer.finished(0.0015)
    assert sleep_until_due(pacer, clock) == pytest.approx(0.020 - LEAD, abs=5e-5)


def test_short_steps_are_not_paced(clock: Clock) -> None:
    pacer = StepPacer(clock)
    pacer.launched(1e3 * MIN_STEP * LEAD - 0.1)
    assert pacer.delay == 0
    pacer.launched(30.0)
    pacer.finished(0.002)
    assert pacer.delay > 0


def test_the_lead_grows_after_a_late_step(clock: Clock) -> None:
    pacer = StepPacer(clock)
    for _ in range(1000):
        step(pacer, clock, 50.0)
        pacer.finished(None)
    assert pacer.lead == MIN_LEAD
    step(pacer, clock, 50.0)
    for _ in range(3):
        assert sleep_until_due(pacer, clock) > 0
        step(pacer, clock, 50.0)
        pacer.finished(0.0)
    assert pacer.lead == pytest.approx(MARGIN + 3 * EXTRA_UP)
    for _ in range(1000):
        sleep_until_due(pacer, clock)
        step(pacer, clock, 50.0)
        pacer.finished(0.004)
    assert pacer.lead == MIN_LEAD
    for _ in range(100):
        sleep_until_due(pacer, clock)
        step(pacer, clock, 90.0)
        pacer.finished(0.0)
    assert pacer.lead == pytest.approx(MAX_LEAD)


def test_a_step_without_delay_is_never_late(clock: Clock) -> None:
    pacer = StepPacer(clock)
    step(pacer, clock, 2.0)
    for _ in range(5):
        assert pacer.delay == 0
        step(pacer, clock, 2.0)
        pacer.finished(0.0)
    assert pacer.lead <= LEAD


def test_the_lead_follows_the_planning_time(clock: Clock) -> None:
    """Whether or not steps are long enough to be put off: else a lead once grown would stay."""
    pacer = StepPacer(clock)
    for host in (6e-3, 0.8e-3):
        for _ in range(1000):
            step(pacer, clock, 4.0, host)
            pacer.finished(0.003)
        assert pacer.lead == pytest.approx(host + MARGIN, abs=3e-4)


def played(*, paced: bool, milliseconds: float, steps: int = 6_000) -> tuple[float, float]:
    """A device, and a loop that launches one step ahead; texts come at any time, 16 a second, and take 4 ms
    more. Their mean wait, and how much of the time the device had nothing to do."""
    random, clock = Random(0), Clock()
    pacer = StepPacer(clock)
    waits, idle, free, comes = [], 0.0, 0.0, random.expovariate(16)
    waiting: list[float] = []
    running: tuple[float, list[float]] | None = None
    for _ in range(steps):
        if paced and running is not None:
            sleep_until_due(pacer, clock)
        while comes <= clock.now:  # what came while it slept is heard before the plan
            waiting.append(comes)
            comes += random.expovariate(16)
        expected = milliseconds + (4 if waiting else 0)
        step(pacer, clock, expected, random.uniform(0.6e-3, 1.0e-3))
        idle += max(clock.now - free, 0.0)
        free = max(clock.now, free) + expected / 1e3 * random.uniform(0.97, 1.03)
        behind, running, waiting = running, (free, waiting), []
        if behind is not None:
            waited = max(behind[0] - clock.now, 0.0)
            clock.now += waited
            waits += [clock.now - one for one in behind[1]]
            pacer.finished(waited)
            clock.now += 2e-4  # to tell what it brought
    return sum(waits) / len(waits), idle / clock.now


@pytest.mark.parametrize(("milliseconds", "gain"), [(4.3, 2e-3), (13.0, 9e-3)])
def test_pacing_shortens_the_wait_and_keeps_the_device_busy(milliseconds: float, gain: float) -> None:
    at_once, _ = played(paced=False, milliseconds=milliseconds)
    put_off, idle = played(paced=True, milliseconds=milliseconds)
    assert at_once - put_off > gain
    assert idle < 0.001


def test_without_a_seen_end_the_next_step_is_planned_at_once(clock: Clock) -> None:
    pacer = StepPacer(clock)
    pacer.launched(50.0)
    pacer.launched(50.0)
    pacer.finished(None)  # it sampled nothing
    assert pacer.delay == 0
    pacer.launched(50.0)
    pacer.finished(0.03)
    assert pacer.delay > 0
    pacer.finished(0.03)
    assert pacer.delay == 0  # nothing runs any more
