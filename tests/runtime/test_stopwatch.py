"""Every second between a launch and a result is somebody's, and nobody's twice."""

from saccade.runtime.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_one_after_the_other_a_step_lasts_from_its_launch_to_its_result() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in (2.0, 3.0):
        clock.passes(50)  # nothing runs
        watch.launch()
        clock.passes(seconds)
        assert watch.result(waited=True) == seconds


def test_overlapped_a_step_lasts_from_the_result_before_it() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.launch()
    clock.passes(1)
    watch.launch()
    clock.passes(4)
    assert watch.result(waited=True) == 5
    watch.launch()
    clock.passes(3)
    assert watch.result(waited=True) == 3
    clock.passes(2)
    assert watch.result(waited=True) == 2


def test_a_step_without_samples_lends_its_time_to_the_next() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.launch()
    clock.passes(1)
    assert watch.result(waited=False) is None
    watch.launch()
    clock.passes(4)
    assert watch.result(waited=True) == 5


def test_after_a_failure_it_starts_anew() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.launch()
    clock.passes(9)
    watch.reset()
    clock.passes(9)
    watch.launch()
    clock.passes(2)
    assert watch.result(waited=True) == 2
