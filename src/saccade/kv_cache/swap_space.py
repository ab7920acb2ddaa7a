"""Host memory for the KV of sequences that had to give way: which slot holds whose block.

takes   sequences that give way, with what they had; word of every block the prefix cache gives up
gives   (block, slot) copies for the next step to make, and the slots that bring a sequence back
owns    the slots and the tickets of those who are away
never   copies anything (kv_cache/swap_copies.py does); holds a block of the device

A slot holds one block. Who gives way gets a ticket for all it has computed, but little is copied at once:
only the blocks nobody could find again. Those the prefix cache knows stay where they are until they are given
up for somebody else, and are copied then, in the step that takes them, and once for all tickets that want
them. Many come back before that. A chain is given up from its end, so what is on the device is the beginning,
what is here is the rest.

When slots run out the ticket of the last by rank is dropped, and its holder computes again. A slot that is
read in a step is not written in the same: it is free again when the step has been sent off (`take_copies`).
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
        self._tickets: dict[int, SwappedSequence] = {}  # by handle
        self._wanted: dict[bytes, set[int]] = {}  # key -> handles of the tickets that name it
        self._keyed: dict[bytes, int] = {}  # blocks given up by the prefix cache: key -> slot
        self._copies: list[tuple[int, int]] = []  # (block, slot) since the last `take_copies`
        self._read: list[int] = []  # slots that are read by the step being planned, and free behind it
        self._reading: set[int] = set()  # those and others that it reads, though somebody still wants them
        self._out = self._in = self._dropped = 0

    @property
    def stats(self) -> SwapStats:
        used, waiting = self.count - len(self._free), len(self._tickets)
        return SwapStats(used, len(self._free), waiting, self._out, self._in, self._dropped)

    # Leaving

    def swap_out(
        self, handle: int, rank: Rank, computed: int, keys: Sequence[bytes], blocks: Sequence[int]
    ) -> bool:
        """A sequence gives way: the blocks of `keys` are the prefix cache's, `blocks` follow them and are
        copied now. False if there are no slots for them: then it has no ticket."""
        if handle in self._tickets:
            raise RuntimeError(f"sequence {handle} is away already")
        if not self._make_room(len(blocks), rank):
            return False
        ticket = SwappedSequence(rank, computed, tuple(keys))
        self._tickets[handle] = ticket
        for key in ticket.keys:
            self._wanted.setdefault(key, set()).add(handle)
        for index, block in enumerate(blocks, len(ticket.keys)):
            ticket.own[index] = self._copy(block)
        return True

    def save_evicted(self, key: bytes, block: int) -> None:
        """The prefix cache gives up a block, which will be written by the next step, not before."""
        wanted = self._wanted.get(key)
        if not wanted or key in self._keyed:
            return
        if self._make_room(1, min(self._tickets[handle].rank for handle in wanted)):
            self._keyed[key] = self._copy(block)
            return
        for handle in list(wanted):  # a gap: what they have behind it is worth nothing
            self.drop(handle)
            self._dropped += 1

    def _make_room(self, slots: int, rank: Rank) -> bool:
        """Have so many slots free for one of that rank: those behind it lose theirs."""
        while len(self._free) < slots:
            last = max(self._tickets, key=lambda handle: self._tickets[handle].rank, default=None)
            if last is None or self._tickets[last].rank <= rank:
                return False
            self.drop(last)
            self._dropped += 1
        return True

    def _copy(self, block: int) -> int:
        slot = self._free.pop()
        self._copies.append((block, slot))
        return slot

    # Coming back

    def find(self, handle: int, start: int, block_size: int) -> tuple[list[int], int]:
        """The slots of its blocks from block `start` on, as far as there is no gap, and how many of its
        tokens are computed with them."""
        ticket = self._tickets.get(handle)
        slots: list[int] = []
        while ticket is not None:
            index = start + len(slots)
            is_keyed = index < len(ticket.keys)
            slot = self._keyed.get(ticket.keys[index]) if is_keyed else ticket.own.get(index)
            if slot is None:
                return slots, min(index * block_size, ticket.computed)
            slots.append(slot)
        return slots, 0

    def swap_in(self, handle: int, slots: Sequence[int]) -> None:
        """A sequence comes back, with the blocks in `slots` of those found: its ticket is used up."""
        self._in += len(slots)
        self._reading.update(slots)
        self._forget(handle, self._read)

    def drop(self, handle: int) -> None:
        """The sequence of a ticket has ended, or computes again; nothing if it has none."""
        if handle in self._tickets:
            self._forget(handle, self._free)

    def _forget(self, handle: int, freed: list[int]) -> None:
        ticket = self._tickets.pop(handle)
        slots = list(ticket.own.values())
        for key in ticket.keys:
            self._wanted[key].discard(handle)
            if not self._wanted[key]:
                del self._wanted[key]
                if key in self._keyed:
                    slots.append(self._keyed.pop(key))
        for slot in slots:
            (self._read if slot in self._reading else freed).append(slot)

    # Steps

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The (block, slot) copies to be made at the beginning of the step that is sent off now."""
        # What was dropped meanwhile is not copied; of two copies into a slot the later one counts.
        used = {slot: block for block, slot in self._copies}
        for slot in self._free:
            used.pop(slot, None)
        self._copies = []
        self._free += self._read
        self._read = []
        self._reading.clear()
        self._out += len(used)
        return tuple((block, slot) for slot, block in used.items())

    def fail(self, copies: Sequence[tuple[int, int]]) -> None:
        """A step's copies may not have been made: nobody comes back with those slots."""
        bad = {slot for _, slot in copies}
        keys = [key for key, slot in self._keyed.items() if slot in bad]
        holders = {handle for key in keys for handle in self._wanted[key]}
        holders |= {handle for handle, t in self._tickets.items() if not bad.isdisjoint(t.own.values())}
        for handle in holders:
            self.drop(handle)
            self._dropped += 1

    def check(self) -> None:
        """Raise unless every slot is free, read, or in one place of use, and tickets and keys agree."""
        faults = []
        own = [slot for ticket in self._tickets.values() for slot in ticket.own.values()]
        slots = sorted([*self._free, *self._read, *self._keyed.values(), *own])
        if slots != list(range(self.count)):
            faults.append("a slot is not in exactly one place")
        wanted: dict[bytes, set[int]] = {}
        for handle, ticket in self._tickets.items():
            for key in ticket.keys:
                wanted.setdefault(key, set()).add(handle)
        if wanted != self._wanted or not set(self._keyed) <= set(wanted):
            faults.append("the keys wanted and those of the tickets differ")
        if faults:
            raise RuntimeError("swap space: " + "; ".join(faults))
