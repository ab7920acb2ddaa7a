"""How often requests come that soon have their first token, if no long step is in their way.

takes   the moment each comes; of every step beside answers, whether it had prompts of theirs
gives   how many came in the last second; in how many of the last steps some were
never   keeps more than it tells: from `MOST` on, more are as many
"""

from collections import deque

SECONDS = 1.0
MOST = 64
STEPS = 64  # that a share is of, about: the last count more


class Arrivals:
    def __init__(self) -> None:
        self._moments: deque[float] = deque(maxlen=MOST)
        self.share = 0.0  # of steps

    def came(self, now: float) -> None:
        self._moments.append(now)

    def rate(self, now: float) -> float:
        """A second."""
        while self._moments and self._moments[0] <= now - SECONDS:
            self._moments.popleft()
        return len(self._moments) / SECONDS

    def ran(self, *, some: bool) -> None:
        """A step beside answers, with prompts of theirs or without."""
        self.share += (some - self.share) / STEPS
