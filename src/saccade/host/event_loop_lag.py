"""Measures how late an event loop wakes up; everything it serves waits as long."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

INTERVAL_SECONDS = 0.05  # 20 wake-ups a second use some thousandths of a core


@asynccontextmanager
async def measure_event_loop_lag(report: Callable[[float], None]) -> AsyncIterator[None]:
    """Inside, `report` gets the seconds by which each wake-up of the running loop is late."""

    async def measure() -> None:
        while True:
            due = time.perf_counter() + INTERVAL_SECONDS
            await asyncio.sleep(INTERVAL_SECONDS)
            report(max(time.perf_counter() - due, 0.0))

    task = asyncio.create_task(measure())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
