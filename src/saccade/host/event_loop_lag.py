"""How late an event loop is: whoever is served by it waits as long, whatever the rest does.

takes   somebody to tell
gives   word of every waking, how many seconds after its time it was
never   takes part in what it watches: twenty wakings a second take some thousandths of a core
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

INTERVAL_SECONDS = 0.05  # seconds


async def _watch(tell: Callable[[float], None]) -> None:
    while True:
        due = time.perf_counter() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        tell(max(time.perf_counter() - due, 0.0))


@asynccontextmanager
async def measure_event_loop_lag(tell: Callable[[float], None]) -> AsyncIterator[None]:
    """Within, the running loop is watched."""
    watching = asyncio.create_task(_watch(tell))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})
