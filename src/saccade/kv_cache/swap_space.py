"""Host memory for the KV of preempted sequences: which slot holds which block.

A slot holds one block. A preempted sequence is recorded with all it has computed, but only the blocks that
the prefix cache does not know are copied at once. Cached blocks stay on the device until they are evicted,
and are copied then, by the step that overwrites them, once for all sequences that want them; many sequences
resume before that. Chains are evicted from their end, so the device has the beginning and the host has the
rest.

When slots run out, the sequence last by rank loses its record and computes again. A slot read by a step is
not written by the same step: it is free when the step has been sent off (`take_copies`). swap_copies.py makes
the copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Rank = tuple[float, int]


@dataclass
class SwappedSequence:
    rank: Rank
    computed: int  # tokens whose KV it had
    keys: tuple[bytes, ...]  # of its first blocks, which the prefix cache knew
    own: dict[int, int] = field(default_factory=dict)  # its other blocks: index -> slot


class SwapStats(NamedTuple):
    """Names and meanings as in EngineStats."""

    swap_slots_used: int
    swap_slots_free: int
    swap_waiting: int
    swap_out_blocks: int
    swap_in_blocks: int
    swap_dropped: int


class SwapSpace:
    def __init__(self, slots: int, milliseconds: float = 0.0) -> None:
        self.count = slots
        self.milliseconds = milliseconds  # to copy a block out and in again
        self._free = list(reversed(range(slots)))
        self._swapped: dict[int, SwappedSequence] = {}  # by handle
        self._wanted: dict[bytes, set[int]] = {}  # key -> handles of the sequences that have it
        self._evicted: dict[bytes, int] = {}  # blocks evicted from the prefix cache: key -> slot
        self._copies: list[tuple[int, int]] = []  # (block, slot) since the last `take_copies`
        self._read: list[int] = []  # slots read by the step being planned, free behind it
        self._reading: set[int] = set()  # those, and slots it reads that are still wanted
        self._out = self._in = self._dropped = 0
        self.in_use = False  # a sequence is swapped out, or the next step has copies

    @property
    def stats(self) -> SwapStats:
        used, waiting = self.count - len(self._free), len(self._swapped)
        return SwapStats(used, len(self._free), waiting, self._out, self._in, self._dropped)

    def swap_out(
        self, handle: int, rank: Rank, computed: int, keys: Sequence[bytes], blocks: Sequence[int]
    ) -> bool:
        """A sequence is preempted: the blocks of `keys` are cached, `blocks` follow them and are copied now.
        False without slots for them: then nothing is recorded."""
        if handle in self._swapped:
            raise RuntimeError(f"sequence {handle} is swapped out already")
        if not self._make_room(len(blocks), rank):
            return False
        self.in_use = True
        sequence = SwappedSequence(rank, computed, tuple(keys))
        self._swapped[handle] = sequence
        for key in sequence.keys:
            self._wanted.setdefault(key, set()).add(handle)
        for index, block in enumerate(blocks, len(sequence.keys)):
            sequence.own[index] = self._copy(block)
        return True

    def save_evicted(self, key: bytes, block: int) -> None:
        """The prefix cache evicts a block, which the next step overwrites, not an earlier one."""
        wanted = self._wanted.get(key)
        if not wanted or key in self._evicted:
            return
        if self._make_room(1, min(self._swapped[handle].rank for handle in wanted)):
            self._evicted[key] = self._copy(block)
            return
        for handle in list(wanted):  # a gap: their later blocks are useless
            self._give_up(handle)

    def _make_room(self, slots: int, rank: Rank) -> bool:
        """Free slots for a sequence of that rank at the cost of sequences behind it."""
        while len(self._free) < slots:
            last = max(self._swapped, key=lambda handle: self._swapped[handle].rank, default=None)
            if last is None or self._swapped[last].rank <= rank:
                return False
            self._give_up(last)
        return True

    def _give_up(self, handle: int) -> None:
        self.drop(handle)
        self._dropped += 1

    def _copy(self, block: int) -> int:
        slot = self._free.pop()
        self._copies.append((block, slot))
        return slot

    def find(self, handle: int, start: int, block_size: int) -> tuple[list[int], int]:
        """The slots of its blocks from block `start` on, up to the first gap, and how many of its tokens are
        computed with them."""
        sequence = self._swapped.get(handle)
        slots: list[int] = []
        while sequence is not None:
            index = start + len(slots)
            is_keyed = index < len(sequence.keys)
            slot = self._evicted.get(sequence.keys[index]) if is_keyed else sequence.own.get(index)
            if slot is None:
                return slots, min(index * block_size, sequence.computed)
            slots.append(slot)
        return slots, 0

    def swap_in(self, handle: int, slots: Sequence[int]) -> None:
        """A sequence resumes with the blocks in `slots`, of those found."""
        self._in += len(slots)
        self._reading.update(slots)
        self._forget(handle, self._read)

    def drop(self, handle: int) -> None:
        """The sequence has ended or computes again; no effect if it is not swapped out."""
        if handle in self._swapped:
            self._forget(handle, self._free)

    def _forget(self, handle: int, freed: list[int]) -> None:
        sequence = self._swapped.pop(handle)
        slots = list(sequence.own.values())
        for key in sequence.keys:
            self._wanted[key].discard(handle)
            if not self._wanted[key]:
                del self._wanted[key]
                if key in self._evicted:
                    slots.append(self._evicted.pop(key))
        for slot in slots:
            (self._read if slot in self._reading else freed).append(slot)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The (block, slot) copies for the beginning of the step that is sent off now."""
        # Dropped slots are not copied; of two copies into a slot the later one counts.
        used = {slot: block for block, slot in self._copies}
        for slot in self._free:
            used.pop(slot, None)
        self._copies = []
        self._free += self._read
        self._read = []
        self._reading.clear()
        self._out += len(used)
        self.in_use = bool(self._swapped)
        return tuple((block, slot) for slot, block in used.items())

    def fail(self, copies: Sequence[tuple[int, int]]) -> None:
        """A step's copies may not have been made: no sequence resumes with those slots."""
        bad = {slot for _, slot in copies}
        keys = [key for key, slot in self._evicted.items() if slot in bad]
        affected = {handle for key in keys for handle in self._wanted[key]}
        affected |= {handle for handle, one in self._swapped.items() if not bad.isdisjoint(one.own.values())}
        for handle in affected:
            self._give_up(handle)

    def check(self) -> None:
        """Raise unless every slot is free, read, or used once, and sequences and keys agree."""
        faults = []
        own = [slot for sequence in self._swapped.values() for slot in sequence.own.values()]
        slots = sorted([*self._free, *self._read, *self._evicted.values(), *own])
        if slots != list(range(self.count)):
            faults.append("a slot is not in exactly one state")
        wanted: dict[bytes, set[int]] = {}
        for handle, sequence in self._swapped.items():
            for key in sequence.keys:
                wanted.setdefault(key, set()).add(handle)
        if wanted != self._wanted or not set(self._evicted) <= set(wanted):
            faults.append("the wanted keys and those of the sequences differ")
        if faults:
            raise RuntimeError("swap space: " + "; ".join(faults))
