"""Slots of host memory: nobody comes back with a block that is not the one that went."""

from random import Random

import pytest

from saccade.kv_cache.swap_space import SwapSpace

SIZE = 4


def key(*path: int) -> bytes:
    return bytes(path)


def put(space: SwapSpace, handle: int, keys: list[bytes], blocks: list[int], rank: float = 0.0) -> bool:
    computed = SIZE * (len(keys) + len(blocks)) - 1
    done = space.swap_out(handle, (rank, handle), computed, keys, blocks)
    space.check()
    return done


def test_only_blocks_unknown_to_the_prefix_cache_are_copied_at_once() -> None:
    space = SwapSpace(8)
    assert put(space, 1, [key(1), key(2)], [7, 9])
    assert [block for block, _ in space.take_copies()] == [7, 9]
    slots, computed = space.find(1, 2, SIZE)  # its first two blocks are still on the device
    assert (len(slots), computed) == (2, 15)
    assert space.find(1, 1, SIZE) == ([], 4)  # the second is neither there nor here
    space.save_evicted(key(2), 5)
    space.check()
    ((block, slot),) = space.take_copies()
    assert block == 5
    assert space.find(1, 1, SIZE) == ([slot, *slots], 15)


def test_evicted_blocks_that_no_sequence_wants_are_not_copied() -> None:
    space = SwapSpace(8)
    put(space, 1, [key(1)], [])
    space.save_evicted(key(3), 5)
    assert space.take_copies() == ()


def test_a_block_wanted_by_several_sequences_is_copied_once_and_kept_for_the_last() -> None:
    space = SwapSpace(8)
    for handle in (1, 2):
        put(space, handle, [key(1)], [])
    space.save_evicted(key(1), 5)
    space.save_evicted(key(1), 6)  # computed again by somebody, and given up again
    assert len(space.take_copies()) == 1
    slots, _ = space.find(1, 0, SIZE)
    space.swap_in(1, slots)
    space.take_copies()
    assert space.find(2, 0, SIZE)[0] == slots
    space.drop(2)
    space.check()
    assert space.stats.swap_slots_used == 0


def test_a_slot_that_is_read_is_free_only_after_the_step() -> None:
    space = SwapSpace(1)
    put(space, 1, [], [3])
    space.take_copies()
    slots, _ = space.find(1, 0, SIZE)
    space.swap_in(1, slots)
    space.check()
    assert not put(space, 2, [], [4])
    space.take_copies()
    assert put(space, 2, [], [4])


def test_a_slot_that_is_read_is_not_written_when_the_last_other_sequence_is_dropped() -> None:
    space = SwapSpace(1)
    put(space, 1, [key(1)], [], rank=1.0)
    put(space, 2, [key(1)], [], rank=9.0)
    space.save_evicted(key(1), 5)
    space.take_copies()
    slots, _ = space.find(1, 0, SIZE)
    space.swap_in(1, slots)  # the other still wants the slot
    assert not put(space, 3, [], [7], rank=2.0)  # it loses it, but not within this step
    space.check()
    assert space.take_copies() == ()
    assert put(space, 3, [], [7], rank=2.0)


def test_a_sequence_swapped_out_and_in_within_one_plan_is_copied_both_ways() -> None:
    space = SwapSpace(2)
    put(space, 1, [], [3])
    slots, _ = space.find(1, 0, SIZE)
    space.swap_in(1, slots)
    assert space.take_copies() == ((3, slots[0]),)


def test_the_last_by_rank_loses_its_slots_to_those_before_it_only() -> None:
    space = SwapSpace(4)
    put(space, 1, [], [1, 2], rank=5.0)
    put(space, 2, [], [3, 4], rank=3.0)
    assert not put(space, 3, [], [5], rank=9.0)
    assert put(space, 4, [], [5], rank=1.0)
    assert space.find(1, 0, SIZE) == ([], 0)
    assert len(space.find(2, 0, SIZE)[0]) == 2
    assert space.stats.swap_dropped == 1
    copied = {slot: block for block, slot in space.take_copies()}
    assert 1 not in copied.values() or 2 not in copied.values()  # the freed slot got another block


def test_a_gap_that_cannot_be_filled_drops_the_sequence() -> None:
    space = SwapSpace(1)
    put(space, 1, [key(1), key(2)], [], rank=1.0)
    space.save_evicted(key(2), 5)
    space.save_evicted(key(1), 6)
    space.check()
    assert space.stats == (0, 1, 0, 0, 0, 1)
    assert space.take_copies() == ()


def test_sequences_that_rely_on_a_failed_steps_copies_compute_again() -> None:
    space = SwapSpace(8)
    for handle, blocks in ((1, [4]), (2, [5]), (3, [])):
        put(space, handle, [key(1)], blocks)
    space.take_copies()
    space.save_evicted(key(1), 9)
    put(space, 4, [], [6])
    copies = space.take_copies()
    space.fail(copies)
    space.check()
    assert space.stats.swap_waiting == 0
    assert space.stats.swap_slots_used == 0


def test_without_slots_no_sequence_with_uncached_blocks_is_swapped_out() -> None:
    space = SwapSpace(0)
    assert not put(space, 1, [], [4])
    assert put(space, 2, [key(1)], [])  # it may find everything again
    space.save_evicted(key(1), 3)
    assert space.stats.swap_waiting == 0


@pytest.mark.parametrize("seed", range(12))
def test_a_slot_always_holds_the_block_recorded_for_it(seed: int) -> None:
    """Blocks hold names; a pretended host copies them as a device would, at the beginning of each step."""
    draw = Random(seed)
    space = SwapSpace(draw.choice([2, 5, 12]))
    host: dict[int, object] = {}
    away: dict[int, list[object]] = {}  # handle -> what its blocks held
    gone: set[bytes] = set()  # keys the device no longer has
    back = 0
    for handle in range(300):
        blocks: dict[int, object] = {}  # of the device in this step
        shared = [key(*range(depth + 1)) for depth in range(draw.randrange(4))]
        gone -= set(shared)  # whoever runs has its beginning on the device
        own = [f"{handle} {index}" for index in range(draw.randrange(3))]
        for name in own:
            blocks[len(blocks)] = name
        if put(space, handle, shared, list(blocks), rank=draw.random()):
            away[handle] = [*shared, *own]
        for depth in reversed(range(4)):  # a chain is given up from its end
            if draw.random() < 0.3 and key(*range(depth + 1)) not in gone:
                lost = key(*range(depth + 1))
                block = 100 + depth
                blocks[block] = lost
                space.save_evicted(lost, block)
                space.check()
                gone.add(lost)
            else:
                break
        if away and draw.random() < 0.7:
            who = draw.choice(list(away))
            held = away.pop(who)
            start = next((index for index, name in enumerate(held) if name in gone), len(held))
            start = min(start, sum(isinstance(name, bytes) for name in held))
            slots, _ = space.find(who, start, SIZE)
            wanted = held[start : start + len(slots)]
            known = who in space._swapped
            if known:
                space.swap_in(who, slots)
            for block, slot in space.take_copies():
                host[slot] = blocks[block]
            assert [host[slot] for slot in slots] == wanted
            back += len(slots)
        else:
            if away and draw.random() < 0.2:
                space.drop(away.popitem()[0])
            for block, slot in space.take_copies():
                host[slot] = blocks[block]
        space.check()
    assert back > 20
