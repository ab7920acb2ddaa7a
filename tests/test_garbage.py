"""What is there for good is not searched for cycles; what comes later still is."""

import gc
import subprocess
import sys
import weakref

from saccade.garbage import nothing_older


class Loop:
    def __init__(self) -> None:
        self.me = self


def test_inside_older_objects_are_not_gone_through_and_younger_cycles_are_found() -> None:
    older = Loop()
    gone = weakref.ref(older)
    del older
    with nothing_older():
        younger = Loop()
        lost = weakref.ref(younger)
        del younger
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
        gc.collect()
        assert lost() is None
        assert gone() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None


def test_nothing_stays_frozen_when_the_work_fails() -> None:
    try:
        with nothing_older():
            raise ValueError
    except ValueError:
        pass
    assert gc.get_freeze_count() == 0


def test_a_process_that_keeps_all_has_little_left_to_go_through() -> None:
    code = """
import gc
from saccade.garbage import keep_all
kept = [[] for _ in range(50_000)]
keep_all()
print(gc.get_freeze_count() > 50_000, len(gc.get_objects()) < 500)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "True"]
