"""What is there for good is not searched for cycles; what comes later still is."""

import gc
import subprocess
import sys
import weakref

from saccade.host.garbage_collection import FULL_COLLECTION_EVERY, existing_objects_frozen


class Loop:
    def __init__(self) -> None:
        self.me = self


def test_inside_only_younger_cycles_are_collected() -> None:
    older = Loop()
    gone = weakref.ref(older)
    with existing_objects_frozen():
        del older
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
        with existing_objects_frozen():
            raise ValueError
    except ValueError:
        pass
    assert gc.get_freeze_count() == 0


def test_a_frozen_process_has_few_objects_to_visit() -> None:
    code = """
import gc
from saccade.host.garbage_collection import freeze_all_objects
kept = [[] for _ in range(50_000)]
freeze_all_objects()
print(gc.get_freeze_count() > 50_000, len(gc.get_objects()) < 500)
more = [[] for _ in range(50_000)]
freeze_all_objects()
print(gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 500)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True"] * 4


def test_many_short_calls_leave_no_cycles_behind() -> None:
    """Freezing sets back what the interpreter counts towards its searches: it would never search again."""
    left: list[weakref.ref[Loop]] = []
    for _ in range(400):
        with existing_objects_frozen():
            left += [weakref.ref(Loop()) for _ in range(20)]
        left = [one for one in left if one() is not None]
    assert len(left) < 1000


def test_cycles_made_inside_are_collected_eventually() -> None:
    left: list[weakref.ref[Loop]] = []
    for _ in range(2 * FULL_COLLECTION_EVERY):
        older = Loop()
        left.append(weakref.ref(older))
        with existing_objects_frozen():
            del older  # frozen by now
    assert len([one for one in left if one() is not None]) <= FULL_COLLECTION_EVERY


def test_objects_the_program_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with existing_objects_frozen():
            pass
        assert gc.get_freeze_count() >= frozen - 100
    finally:
        gc.unfreeze()


def test_nested_calls_end_with_the_outer_one() -> None:
    with existing_objects_frozen():
        with existing_objects_frozen():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with existing_objects_frozen():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_objects_are_unfrozen_at_exit() -> None:
    """Libraries count their own objects there, and complain of each that is left."""
    program = (
        "import atexit, gc\n"
        "from saccade.host.garbage_collection import freeze_all_objects\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count()))\n"  # runs after its own
        "freeze_all_objects()\n"
        "print(gc.get_freeze_count() > 1000)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[:2] == ["True", "frozen 0"]
