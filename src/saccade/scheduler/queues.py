"""The waiting queues and the running sequences, each in order of rank, and the free slots. Also who waits for
blocks that another sequence computes."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Ordered
from heapq import heappop, heappush
from operator import attrgetter

from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.sequence import Sequence

_rank = attrgetter("rank")


class SequenceQueue(list[Sequence]):
    """Sequences in order of rank; adding and removing take a binary search."""

    def add(self, sequence: Sequence) -> None:
        insort(self, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self, sequence.rank, key=_rank)
        if index == len(self) or self[index] is not sequence:
            raise RuntimeError(f"sequence {sequence.seq_id} is not in the queue it is removed from")
        del self[index]


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
        heads = [queue[0].state.arrival_time for queue, starved in queues if queue and not starved]
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
        if any(queue != sorted(queue, key=_rank) for queue in (*self.waiting, self.running)):
            found.append("a queue is out of order")
        if self.slots_used != [sum(item.encoding is kind for item in self.running) for kind in (False, True)]:
            found.append("the slots of the classes are miscounted")
        if self.running_requests != len({item.state.request.id for item in self.running}):
            found.append("the running requests are miscounted")
        return found


def choose_preemption_victim(
    running: Ordered[Sequence], sequence: Sequence, can_free: Callable[[Sequence], bool]
) -> Sequence:
    """The last by rank whose preemption frees a block; `sequence` itself if none behind it does. The first is
    never preempted, so it finishes, and then the next is the first."""
    return next(one for one in reversed(running) if one is sequence or can_free(one))


class PrefixWait:
    """Blocks that running sequences are computing, which a waiting sequence with the same prefix should wait
    for. A block can be shared once the output of its step has arrived: of several questions about one image
    that arrive together, the first computes the image."""

    def __init__(self, config: SchedulerConfig, prefix: PrefixCache | None) -> None:
        self._least = config.blocks_for(config.wait_tokens)
        self._prefix = prefix
        self._keys: set[bytes] = set()

    def begin_step(self, running: Iterable[Sequence]) -> None:
        self._keys = set()
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """One more runs, from this step on."""
        if self._prefix is not None and sequence.chain is not None:
            for key in reversed(sequence.chain.keys[sequence.num_cached_blocks :]):
                if self._prefix.contains(key):
                    break  # and all before it
                self._keys.add(key)

    def still_waits(self, sequence: Sequence) -> bool:
        """Whether the block it waits for is still being computed; cheap, for every waiting sequence."""
        return sequence.awaited_block in self._keys

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether enough of what it needs next is being computed; notes the block to wait for."""
        if not self._keys or self._prefix is None or sequence.chain is None:
            return False
        chain = sequence.chain
        chain.extend(sequence.tokens)
        first = stop = len(self._prefix.match(chain))
        while stop < len(chain.keys) and chain.keys[stop] in self._keys:
            stop += 1
        if stop - first < self._least:
            return False
        sequence.awaited_block = chain.keys[stop - self._least]
        return True
