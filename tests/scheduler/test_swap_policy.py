"""Giving way with one's KV in hand: when it is set aside, what is copied, and how its holder comes back."""

from typing import Any

import pytest

from saccade.request import Request
from saccade.step_plan import StepPlan
from tests.scheduler.simulated_device import IMAGE_ID, Engine, answer_alone, image, question, small_limits

TEXT = [2, 3, 4, 5, 6, 7, 8, 2, 4, 6, 8, 3, 5, 7, 2, 5, 8, 3, 6, 2]
ENDLESS: dict[str, Any] = {"stop_token_ids": ()}


def two(**options: Any) -> tuple[Engine, dict[str, Request]]:
    """Two streams whose prompts fit together, and whose answers do not: the second is preempted."""
    engine = Engine(**{"blocks": 9, "slots": 20, "prefix_caching": False, **options})
    asked = {
        "a": question("a", TEXT[:10], max_tokens=14, **ENDLESS),
        "b": question("b", TEXT[5:15], max_tokens=14, **ENDLESS),
    }
    for request in asked.values():
        engine.add(request)
    return engine, asked


def three(**options: Any) -> tuple[Engine, dict[str, Request]]:
    """The last is preempted and comes back when the first has ended, beside the second."""
    engine = Engine(blocks=12, slots=20, prefix_caching=False, **options)
    asked = {
        "a": question("a", TEXT[:10], max_tokens=10, **ENDLESS),
        "long": question("long", TEXT[2:12], max_tokens=20, **ENDLESS),
        "b": question("b", TEXT[5:15], max_tokens=14, **ENDLESS),
    }
    for request in asked.values():
        engine.add(request)
    return engine, asked


def verify(engine: Engine, asked: dict[str, Request]) -> None:
    for name, request in asked.items():
        for index in range(request.sampling.n):
            assert engine.tokens(name, index) == answer_alone(request, index, engine.limits)
    stats = engine.scheduler.stats()
    assert stats.swap_slots_used == stats.swap_waiting == stats.blocks_used == 0


def computed(engine: Engine) -> int:
    return sum(row.num_tokens for plan in engine.plans for row in plan.scheduled)


def swapping(engine: Engine) -> list[StepPlan]:
    return [plan for plan in engine.plans if plan.swap_ins]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_swapped_in_sequence_computes_nothing_twice(overlap: bool, prefix_caching: bool) -> None:
    engine, asked = two(overlap=overlap, prefix_caching=prefix_caching)
    engine.run()
    assert engine.scheduler.stats().preemptions == 1
    assert len(swapping(engine)) == 1
    assert computed(engine) == 2 * (10 + 13)
    verify(engine, asked)


def test_it_computes_again_where_copying_takes_longer() -> None:
    engine, asked = two(slot_milliseconds=1e9)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.preemptions, stats.swap_out_blocks, stats.swap_in_blocks) == (1, 0, 0)
    assert computed(engine) > 2 * (10 + 13)
    verify(engine, asked)


def test_the_cheaper_of_swap_and_recompute_is_taken_at_the_border() -> None:
    """Five or six blocks against 20 tokens or so, at 0.2 to 0.3 ms each and something for attention."""
    for milliseconds, swaps in ((0.6, True), (2.0, False)):
        engine, _ = two(slot_milliseconds=milliseconds)
        engine.run()
        assert bool(swapping(engine)) is swaps


def test_blocks_the_prefix_cache_still_has_are_not_copied() -> None:
    engine, asked = two(prefix_caching=True)
    engine.run()
    plain, _ = two()
    plain.run()
    found, copied = engine.scheduler.stats(), plain.scheduler.stats()
    assert 0 < found.swap_out_blocks < copied.swap_out_blocks
    assert copied.swap_out_blocks == copied.swap_in_blocks  # without a prefix cache, all of them at once
    outs = [len(plan.swap_outs) for plan in engine.plans if plan.swap_outs]
    assert max(outs) <= 2  # those given up in the step, and the one no one could find again
    verify(engine, asked)


def test_it_comes_back_beside_a_step_and_runs_in_the_next() -> None:
    """While anybody else runs; the device of these tests has nothing to read in its blocks before."""
    engine, asked = three()
    engine.run()
    back = [plan for plan in swapping(engine) if not plan.await_swaps]
    assert back
    for plan in back:
        following = engine.plans[plan.number + 1]
        entering = {enter.slot for enter in plan.new_slots}
        assert not entering & {row.slot for row in plan.scheduled}
        assert entering <= {row.slot for row in following.scheduled}
    verify(engine, asked)


def test_alone_it_runs_at_once_and_the_step_waits_for_its_blocks() -> None:
    engine, asked = two()
    engine.run(until=lambda: engine.scheduler.stats().preemptions > 0)
    engine.cancel("a")
    plan = engine.step()
    assert plan is not None
    assert plan.swap_ins
    assert plan.await_swaps
    engine.run()
    del asked["a"]
    verify(engine, asked)


def test_a_request_cancelled_while_swapped_out_frees_its_host_blocks() -> None:
    engine, asked = two()
    engine.run(until=lambda: engine.scheduler.stats().preemptions > 0)
    assert engine.scheduler.stats().swap_slots_used > 0
    engine.cancel("b")
    stats = engine.scheduler.stats()
    assert stats.swap_slots_used == stats.swap_waiting == 0
    engine.run()
    del asked["b"]
    verify(engine, asked)


def test_when_the_step_that_copies_fails_it_computes_again() -> None:
    engine, asked = two(overlap=True)
    engine.run(until=lambda: engine.scheduler.stats().preemptions > 0)
    assert engine.plans[-1].swap_outs
    engine.fail()  # of that step: it ends those it had rows for
    assert engine.finish("a") == "error"
    assert engine.scheduler.stats().swap_waiting == 0
    engine.run()
    assert not swapping(engine)
    del asked["a"]
    verify(engine, asked)


def test_a_failed_swap_in_step_ends_the_sequence_it_restores() -> None:
    engine, asked = three(overlap=True)
    engine.run(until=lambda: bool(swapping(engine)))
    plan = engine.plans[-1]
    assert not plan.await_swaps
    (entering,) = plan.new_slots
    name = next(name for name, request in asked.items() if request.prompt == entering.prompt)
    engine.fail()
    assert engine.finish(name) == "error"
    engine.run()
    failed = {name for name in asked if engine.finish(name) == "error"}
    verify(engine, {name: request for name, request in asked.items() if name not in failed})


def test_without_room_for_its_slots_it_computes_again() -> None:
    engine, asked = two(slots=2)
    engine.run()
    assert not swapping(engine)
    verify(engine, asked)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_image_that_is_swapped_in_is_not_encoded_again(overlap: bool, prefix_caching: bool) -> None:
    engine = Engine(overlap=overlap, blocks=10, slots=30, prefix_caching=prefix_caching, feature_bytes=0)
    asked = {
        "a": question("a", TEXT[:10], max_tokens=16, **ENDLESS),
        "b": question("b", [3, IMAGE_ID, 4], (image(1, 1, 2, 5),), max_tokens=16, **ENDLESS),
    }
    for request in asked.values():
        engine.add(request)
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    assert len(engine.device.encoded) == 1
    verify(engine, asked)


@pytest.mark.parametrize("overlap", [True, False])
def test_swapped_out_sequences_share_what_they_shared(overlap: bool) -> None:
    """The prompt of three sequences is given up once all of them are away, and kept in the host once."""
    engine = Engine(overlap=overlap, blocks=13, slots=30, limits=small_limits(max_num_seqs=5))
    asked = {
        "first": question("first", TEXT[:6], max_tokens=40, **ENDLESS),
        "n": question("n", TEXT, max_tokens=9, n=3, **ENDLESS),
    }
    for request in asked.values():
        engine.add(request)
    most = 0
    while not engine.scheduler.idle:
        engine.step()
        most = max(most, engine.scheduler.stats().swap_slots_used)
    assert swapping(engine)
    assert most < 3 * 5
    verify(engine, asked)
