"""Which blocks of a sequence belong to the vision pool: those that hold nothing but views of certain roles.

takes   where a sequence's views stand, the size of a block, the roles
gives   for any range of its blocks how many belong there
never   changes; a sequence with other views has other kinds

Such a block depends on nothing that is written later: it is computed with the picture, never written again,
and shared by everyone who asks about that picture. All others (text, answers, blocks that text and views
share, zoomed views) are the text pool's.
"""

from bisect import bisect_right
from collections.abc import Sequence, Set

from saccade.step_plan import Role, Span

# What a user can ask for: the views of whole pictures and frames, or only those at less than full detail.
# Zoomed views are chosen because they matter, and their blocks are taken before it is known how many.
SCOPES: dict[str, frozenset[Role]] = {"all": frozenset({"whole", "global"}), "global": frozenset({"global"})}


class Kinds:
    def __init__(self, spans: Sequence[Span], block_size: int, roles: Set[Role]) -> None:
        self._starts: list[int] = []  # of runs of vision blocks, by index in the sequence
        self._stops: list[int] = []
        self._before: list[int] = []  # vision blocks before each run
        total = 0
        for start, stop in _runs(spans, roles):
            first, last = -(-start // block_size), stop // block_size
            if first < last:
                self._starts.append(first)
                self._stops.append(last)
                self._before.append(total)
                total += last - first

    def among(self, start: int, stop: int) -> int:
        """How many of the blocks start .. stop are vision blocks."""
        return max(self._up_to(stop) - self._up_to(start), 0)

    def __contains__(self, index: int) -> bool:
        return bool(self.among(index, index + 1))

    def _up_to(self, index: int) -> int:
        run = bisect_right(self._starts, index) - 1
        if run < 0:
            return 0
        return self._before[run] + min(index, self._stops[run]) - self._starts[run]


def _runs(spans: Sequence[Span], roles: Set[Role]) -> list[tuple[int, int]]:
    """Tokens of such views, those that follow each other at once taken together."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if span.role not in roles:
            continue
        if runs and runs[-1][1] == span.start:
            runs[-1] = runs[-1][0], span.stop
        else:
            runs.append((span.start, span.stop))
    return runs
