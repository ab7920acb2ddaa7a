"""Keeps Python's cyclic garbage collector away from objects that live as long as the process.

A full collection visits every object while all threads wait: with a model and its libraries loaded, 350,000
objects and 180 ms, in which a GPU runs out of work. Garbage of requests is still collected.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

FULL_COLLECTION_EVERY = 1024  # calls; the others collect only young objects (0.1 ms)
_calls = count(1)


def freeze_all_objects() -> None:
    """Excludes all present objects from collections. Call it after start-up and after later warm-up."""
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # otherwise libraries report leaked objects at exit


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Inside, collections skip older objects. No effect if objects are frozen or the collector is off."""
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    # Freezing resets the counters that trigger collections: many short calls would never collect anything.
    gc.collect(1 if next(_calls) % FULL_COLLECTION_EVERY else 2)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
