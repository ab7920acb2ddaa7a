"""The set's questions, drawn a chunk ahead of who asks them.

takes   tasks, the set's size, how many of it to ask
gives   chunks of examples, in the set's order, the same ones for the same numbers
owns    processes that draw (no torch in them)
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from saccade import pictures
from saccade.errors import ConfigError

MOST_WORKERS = 8

Place = tuple[str, int] | tuple[str, int, int]  # task, index in the set, and its seed if not the fixed one


def chosen_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """The named tasks in the set's order; all of them when none is named."""
    for name in names:
        if name not in pictures.TASKS:
            raise ConfigError(f"there is no task {name!r}; known are {', '.join(pictures.TASKS)}")
    return tuple(task for task in pictures.TASKS if not names or task in names)


def places(tasks: Sequence[str], count: int, limit: int | None) -> list[tuple[str, int]]:
    """Which questions of a set of `count` per task to ask: all, or `limit` of each, spread evenly."""
    asked = count if limit is None else min(limit, count)
    return [(task, number * count // asked) for task in tasks for number in range(asked)]


def default_workers() -> int:
    return min(MOST_WORKERS, (os.cpu_count() or 1) // 2)


def draw(place: Place) -> pictures.Example:
    return pictures.example(*place)


def chunks(wanted: Sequence[Place], size: int, workers: int) -> Iterator[list[pictures.Example]]:
    """Examples, `size` at a time. While one chunk is being answered the next is drawn, and no more than
    that: two chunks of pictures are the most that is held."""
    parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
    if workers == 0:
        for part in parts:
            yield [draw(place) for place in part]
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            ahead = [pool.submit(draw, place) for place in parts[0]] if parts else []
            for following in (*parts[1:], ()):
                drawn = [future.result() for future in ahead]
                ahead = [pool.submit(draw, place) for place in following]
                yield drawn
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
