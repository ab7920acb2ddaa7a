"""An event loop that is held up tells how long; one that is not tells of next to nothing."""

import asyncio
import time

from saccade.host.event_loop_lag import EVERY, watched


async def test_a_loop_that_stands_still_is_told_of_once_and_by_how_much() -> None:
    told: list[float] = []
    async with watched(told.append):
        await asyncio.sleep(3 * EVERY)
        time.sleep(0.2)
        await asyncio.sleep(3 * EVERY)
    assert len(told) >= 3
    assert 0.2 - EVERY <= max(told) < 2.0
    assert min(told) < 0.1


async def test_nothing_watches_on_afterwards_however_it_ends() -> None:
    told: list[float] = []
    try:
        async with watched(told.append):
            await asyncio.sleep(2 * EVERY)
            raise ValueError
    except ValueError:
        pass
    count = len(told)
    await asyncio.sleep(3 * EVERY)
    assert len(told) == count
    assert len(asyncio.all_tasks()) == 1
