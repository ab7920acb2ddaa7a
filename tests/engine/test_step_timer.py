"""Every second between a launch and a result is somebody's, and nobody's twice."""

from collections.abc import Callable
from functools import partial

import pytest

from saccade.engine.core import HostTimerEvent, StepTimer, TimerEvent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def host_timer(clock: Callable[[], float]) -> StepTimer:
    return StepTimer(partial(HostTimerEvent, clock))


def test_a_serial_step_lasts_from_launch_to_output() -> None:
    clock = Clock()
    timer = host_timer(clock)
    for seconds in (2.0, 3.0):
        clock.passes(50)  # nothing runs
        timer.launch_started()
        clock.passes(seconds)
        timer.launched()
        assert timer.finished(waited=True) == seconds


def test_an_overlapped_step_lasts_as_long_as_its_launch_on_a_cpu() -> None:
    clock = Clock()
    timer = host_timer(clock)
    timer.launch_started()
    clock.passes(5)
    timer.launched()
    timer.launch_started()
    clock.passes(3)
    timer.launched()
    assert timer.finished(waited=True) == 5
    timer.launch_started()
    clock.passes(2)
    timer.launched()
    assert timer.finished(waited=True) == 3
    assert timer.finished(waited=True) == 2


def test_the_time_of_a_step_without_samples_counts_to_the_next() -> None:
    clock = Clock()
    timer = host_timer(clock)
    timer.launch_started()
    clock.passes(1)
    timer.launched()
    assert timer.finished(waited=False) is None
    timer.launch_started()
    clock.passes(4)
    timer.launched()
    assert timer.finished(waited=True) == 5


def test_a_failure_resets_the_timer() -> None:
    clock = Clock()
    timer = host_timer(clock)
    timer.launch_started()
    clock.passes(9)
    timer.failed()
    clock.passes(9)
    timer.launch_started()
    clock.passes(2)
    timer.launched()
    assert timer.finished(waited=True) == 2


class Moment:
    def __init__(self, at: float) -> None:
        self.at = at

    def seconds_until(self, later: TimerEvent) -> float:
        assert isinstance(later, Moment)
        return later.at - self.at


class Device:
    """Marks are reached when what was launched before them is done."""

    def __init__(self) -> None:
        self.now = 0.0  # of the host
        self.busy_until = 0.0

    def mark(self) -> Moment:
        return Moment(max(self.now, self.busy_until))

    def launch(self, host: float, device: float) -> None:
        """Launching takes the host so long, and the device goes on for so long from the first kernel on."""
        begin = max(self.now, self.busy_until)
        self.now += host
        self.busy_until = max(begin + device, self.now)


def test_device_timer_does_not_count_a_slow_launch_to_the_previous_step() -> None:
    device = Device()
    timer = StepTimer(device.mark)
    took: list[float | None] = []
    for host, work in ((0.1, 5.0), (50.0, 20.0), (0.1, 5.0)):
        timer.launch_started()
        device.launch(host, work)
        timer.launched()
        if host != 0.1 or took:
            took.append(timer.finished(waited=True))
    took.append(timer.finished(waited=True))
    # The second waits for its launch: 50 less the 4.9 that the first still ran meanwhile.
    assert took == pytest.approx([5.0, 45.1, 5.0])


def test_device_timer_counts_a_step_without_wait_to_the_next() -> None:
    device = Device()
    timer = StepTimer(device.mark)
    for work in (3.0, 4.0, 5.0):
        timer.launch_started()
        device.launch(0.0, work)
        timer.launched()
    assert timer.finished(waited=False) is None
    assert timer.finished(waited=True) == 7.0
    assert timer.finished(waited=True) == 5.0


def test_device_timer_discards_the_time_of_a_failed_step() -> None:
    device = Device()
    timer = StepTimer(device.mark)
    timer.launch_started()
    device.launch(0.0, 3.0)
    timer.launched()
    timer.launch_started()
    timer.failed()  # the second could not be launched
    assert timer.finished(waited=True) == 3.0
    timer.launch_started()
    timer.launched()
    timer.failed()  # its result could not be had
    timer.launch_started()
    device.launch(0.0, 2.0)
    timer.launched()
    assert timer.finished(waited=True) == 2.0


def test_idle_discards_time_that_was_not_accounted_for() -> None:
    clock, device = Clock(), Device()
    timer, by_device = host_timer(clock), StepTimer(device.mark)
    timer.launch_started()
    clock.passes(1)
    timer.launched()
    assert timer.finished(waited=False) is None
    by_device.launch_started()
    device.launch(0.0, 1.0)
    by_device.launched()
    assert by_device.finished(waited=False) is None
    timer.idle()
    by_device.idle()
    clock.passes(50)
    device.now += 50
    timer.launch_started()
    clock.passes(2)
    timer.launched()
    assert timer.finished(waited=True) == 2
    by_device.launch_started()
    device.launch(0.0, 2.0)
    by_device.launched()
    assert by_device.finished(waited=True) == 2
