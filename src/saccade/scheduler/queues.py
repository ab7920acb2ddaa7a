"""The waiting queues and the running sequences, each in order of rank, and the free slots."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Ordered
from heapq import heappop, heappush
from operator import attrgetter

from saccade.scheduler.sequence import Sequence

_rank = attrgetter("rank")


class SequenceQueue:
    """Sequences in order of rank; adding and removing take a binary search."""

    def __init__(self) -> None:
        self._members: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __getitem__(self, index: int) -> Sequence:
        return self._members[index]

    def add(self, sequence: Sequence) -> None:
        insort(self._members, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._members, sequence.rank, key=_rank)
        if index == len(self._members) or self._members[index] is not sequence:
            raise RuntimeError(f"sequence {sequence.seq_id} is not in the queue it is removed from")
        del self._members[index]

    @property
    def is_ordered(self) -> bool:
        return self._members == sorted(self._members, key=_rank)


class Queues:
    def __init__(self, num_slots: int) -> None:
        # By class: sequences without, and with views to encode.
        self.waiting = (SequenceQueue(), SequenceQueue())
        self.starved = [False, False]  # whether the queue's head last failed for lack of slots or memory
        self.running = SequenceQueue()
        self.slots_used = [0, 0]  # by class
        self.running_requests = 0
        self.free_slots = list(range(num_slots))  # a heap: low slots first
        self._num_slots = num_slots

    def add(self, sequence: Sequence, *, encoding: bool) -> None:
        sequence.encoding = encoding
        self.waiting[encoding].add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move a waiting sequence to a slot."""
        self.waiting[sequence.encoding].remove(sequence)
        self.running.add(sequence)
        self.slots_used[sequence.encoding] += 1
        sequence.slot = heappop(self.free_slots)
        sequence.state.num_slots += 1
        self.running_requests += sequence.state.num_slots == 1

    def remove(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            self.waiting[sequence.encoding].remove(sequence)
            return
        self.running.remove(sequence)
        self.slots_used[sequence.encoding] -= 1
        sequence.state.num_slots -= 1
        self.running_requests -= sequence.state.num_slots == 0
        heappush(self.free_slots, sequence.slot)
        sequence.slot = None
        sequence.prompt_changed = False
        sequence.epoch += 1

    def longest_wait(self, prefills: Ordered[list[Sequence]], now: float) -> float:
        """Seconds that a prompt without output has waited for step time: since its arrival, or since it got a
        slot. Heads that lack slots or memory do not count: longer steps would not help them."""
        queues = zip(self.waiting, self.starved, strict=True)
        heads = [queue[0].state.arrival_time for queue, starved in queues if len(queue) and not starved]
        fresh = (one for kind in prefills for one in kind if one.num_tokens <= one.prompt_length)
        since = heads + [one.state.started_at for one in fresh]
        return now - min(since) if since else 0.0

    @property
    def bottleneck(self) -> str | None:
        """What the heads of the queues lacked in the last step planned: rows (slots), memory or step time."""
        short = [starved for queue, starved in zip(self.waiting, self.starved, strict=True) if queue]
        if not short:
            return None
        return "rows" if not self.free_slots else "memory" if any(short) else "time"

    def stats(self) -> dict[str, int]:
        """Names as in EngineStats."""
        return {
            "waiting_encode": len(self.waiting[True]),
            "waiting_other": len(self.waiting[False]),
            "running": self.running_requests,
        }

    def find_faults(self, unfinished: Collection[Sequence]) -> list[str]:
        """Contradictions in the bookkeeping, given all sequences that have not finished."""
        found = []
        waiting = [*self.waiting[False], *self.waiting[True]]
        placed = len(waiting) + len(self.running) == len(unfinished)
        if not placed or {*unfinished} != {*waiting, *self.running}:
            found.append("a sequence is neither waiting nor running")
        taken = [-1 if item.slot is None else item.slot for item in self.running]
        if sorted([*self.free_slots, *taken]) != list(range(self._num_slots)):
            found.append("a slot is neither free nor owned by one sequence")
        if any(
            item.slot is not None or item.blocks or item.pins or item.num_computed_tokens for item in waiting
        ):
            found.append("a waiting sequence holds something")
        if not all(queue.is_ordered for queue in (*self.waiting, self.running)):
            found.append("a queue is out of order")
        if self.slots_used != [sum(item.encoding is kind for item in self.running) for kind in (False, True)]:
            found.append("the slots of the classes are miscounted")
        if self.running_requests != len({item.state.request.id for item in self.running}):
            found.append("the running requests are miscounted")
        return found


def choose_preemption_victim(
    running: SequenceQueue | Ordered[Sequence], sequence: Sequence, can_free: Callable[[Sequence], bool]
) -> Sequence:
    """The last by rank whose preemption frees a block; `sequence` itself if none behind it does. The first is
    never preempted, so it finishes, and then the next is the first."""
    last_first = (running[index] for index in range(len(running) - 1, -1, -1))
    return next(one for one in last_first if one is sequence or can_free(one))
