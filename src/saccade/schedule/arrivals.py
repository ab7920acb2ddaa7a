"""How often requests come that soon have their first token, if no long step is in their way.

takes   the moment each comes
gives   how many came in the last second
never   keeps more than it tells: from `MOST` on, more are as many
"""

from collections import deque

SECONDS = 1.0
MOST = 64


class Arrivals:
    def __init__(self) -> None:
        self._moments: deque[float] = deque(maxlen=MOST)

    def came(self, now: float) -> None:
        self._moments.append(now)

    def rate(self, now: float) -> float:
        """A second."""
        while self._moments and self._moments[0] <= now - SECONDS:
            self._moments.popleft()
        return len(self._moments) / SECONDS
