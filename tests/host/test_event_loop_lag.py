"""An event loop that is held up tells how long; one that is not tells of next to nothing."""

import asyncio
import time

from saccade.host.event_loop_lag import INTERVAL_SECONDS, measure_event_loop_lag


async def test_a_blocked_loop_is_reported_once_with_its_lag() -> None:
    told: list[float] = []
    async with measure_event_loop_lag(told.append):
        await asyncio.sleep(3 * INTERVAL_SECONDS)
        time.sleep(0.2)
        await asyncio.sleep(3 * INTERVAL_SECONDS)
    assert len(told) >= 3
    assert 0.2 - INTERVAL_SECONDS <= max(told) < 2.0
    assert min(told) < 0.1


async def test_measuring_ends_however_the_block_ends() -> None:
    told: list[float] = []
    try:
        async with measure_event_loop_lag(told.append):
            await asyncio.sleep(2 * INTERVAL_SECONDS)
            raise ValueError
    except ValueError:
        pass
    count = len(told)
    await asyncio.sleep(3 * INTERVAL_SECONDS)
    assert len(told) == count
    assert len(asyncio.all_tasks()) == 1
