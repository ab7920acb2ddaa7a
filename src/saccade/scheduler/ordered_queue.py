"""Sequences in the order of their rank: the two queues, and those that run.

takes   sequences, each once
gives   them in order; joining and leaving cost a search by halves, however long the line
never   changes a sequence
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from saccade.scheduler.sequence import Sequence

_rank = attrgetter("rank")


class Line:
    def __init__(self) -> None:
        self._members: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __getitem__(self, place: int) -> Sequence:
        return self._members[place]

    def join(self, sequence: Sequence) -> None:
        insort(self._members, sequence, key=_rank)

    def leave(self, sequence: Sequence) -> None:
        place = bisect_left(self._members, sequence.rank, key=_rank)
        if place == len(self._members) or self._members[place] is not sequence:
            raise RuntimeError(f"sequence {sequence.handle} is not in the line it is to leave")
        del self._members[place]

    @property
    def ordered(self) -> bool:
        return self._members == sorted(self._members, key=_rank)
