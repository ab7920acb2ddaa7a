"""Python's search for garbage in cycles, kept from going through what is there for good.

takes   word that a process has made what it keeps, or that a stretch of work begins
gives   searches that look at what came since
never   switches the search off: what a request leaves behind is found as ever

A full search goes through every object, and all threads wait for it: with a model and its libraries loaded,
350,000 objects and 180 ms, in which a GPU has long run out of work.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

FULL_COLLECTION_EVERY = (
    1024  # stretches: one begins with a search of everything, the others of what is young (0.1 ms)
)
_stretches = count(1)


def freeze_all_objects() -> None:
    """Whatever is there now stays as long as the process. Call it when everything has been made, and again
    when more has."""
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # or libraries find their objects alive at the end, and say so at length


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Inside, no search goes through what is older; afterwards all is as before. Nothing happens where the
    program has frozen something, or searches when it wants to."""
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    # Freezing sets back the counts that lead to searches: after many short stretches there would be none.
    gc.collect(1 if next(_stretches) % FULL_COLLECTION_EVERY else 2)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
