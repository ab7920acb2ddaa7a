"""What one is computing, others wait for rather than compute it too; no one waits in vain."""

import pytest

from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.scheduler.queues import PrefixWait
from saccade.scheduler.sequence import Sequence
from saccade.step_plan import StepPlan
from tests.scheduler.simulated_device import IMAGE_ID, Engine, answer_alone, image, question, small_limits

TEXT = [2, 3, 4, 5, 6, 7, 8, 2, 4, 6, 8, 3, 5, 7, 2, 5, 8, 3, 6, 2]  # 20 tokens: five blocks of four


def starts(plan: StepPlan | None) -> dict[int, int]:
    """By sequence: where its row of a plan begins."""
    return {} if plan is None else {row.seq_id: row.start for row in plan.scheduled}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_of_several_equal_prefixes_is_computed_for_all(overlap: bool) -> None:
    engine = Engine(overlap=overlap, limits=small_limits(wait_tokens=8, max_step_tokens=100))
    asked = [question(name, [*TEXT, number], max_tokens=2) for number, name in enumerate("abc", 2)]
    for one in asked:
        engine.add(one)
    assert starts(engine.step()) == {0: 0}
    engine.run()
    begun = {sequence: start for plan in reversed(engine.plans) for sequence, start in starts(plan).items()}
    assert begun == {0: 0, 1: 20, 2: 20}
    for one in asked:
        assert engine.tokens(one.id) == answer_alone(one, 0, engine.limits)


def test_an_image_asked_about_several_times_at_once_is_computed_once() -> None:
    engine = Engine(limits=small_limits(wait_tokens=8, max_step_tokens=100))
    for number, name in enumerate("ab", 2):
        engine.add(question(name, [IMAGE_ID, number, 3], (image(1, 0, 4, 4),), max_tokens=1))
    assert starts(engine.step()) == {0: 0}
    assert starts(engine.step()) == {1: 16}


def test_a_sequence_with_another_prefix_overtakes_those_that_wait() -> None:
    engine = Engine(limits=small_limits(wait_tokens=8, max_step_tokens=100))
    engine.add(question("a", [*TEXT, 2], max_tokens=1))
    engine.add(question("b", [*TEXT, 3], max_tokens=1))
    engine.add(question("c", TEXT[::-1], max_tokens=1))
    assert starts(engine.step()) == {0: 0, 2: 0}


def test_a_sequence_does_not_wait_for_few_tokens() -> None:
    engine = Engine(limits=small_limits(wait_tokens=8, max_step_tokens=100))
    engine.add(question("a", [*TEXT[:7], 2], max_tokens=1))
    engine.add(question("b", [*TEXT[:7], 3], max_tokens=1))  # one block and three tokens in common
    assert starts(engine.step()) == {0: 0, 1: 0}


def test_the_sequence_waited_for_may_be_cancelled_or_preempted() -> None:
    engine = Engine(overlap=True, limits=small_limits(wait_tokens=8, max_step_tokens=8))
    engine.add(question("a", [*TEXT, 2], max_tokens=1))
    engine.add(question("b", [*TEXT, 3], max_tokens=1))
    assert starts(engine.step()) == {0: 0}
    engine.cancel("a")
    assert starts(engine.step()) == {1: 0}
    engine.run()


def test_a_sequence_starts_as_soon_as_its_awaited_block_is_cached() -> None:
    engine = Engine(limits=small_limits(wait_tokens=8, max_step_tokens=24))
    for number, name in enumerate("abcd", 2):
        engine.add(question(name, [*TEXT, number], max_tokens=3, stop_token_ids=()))
    assert starts(engine.step()) == {0: 0}
    assert set(starts(engine.step())) == {0, 1, 2, 3}


def test_a_prefix_wait_is_not_evaluated_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand questions about one image would else take longer to ask than a step lasts."""
    limits = small_limits(wait_tokens=8, max_step_tokens=100, itl_target=0.001, min_chunk=2)
    engine = Engine(limits=limits)
    engine.add(question("stream", [2, 3], max_tokens=50, stop_token_ids=()))
    engine.step()
    told: list[bool] = []
    real = PrefixWait.should_wait

    def noted(coming: PrefixWait, sequence: Sequence) -> bool:
        told.append(real(coming, sequence))
        return told[-1]

    monkeypatch.setattr(PrefixWait, "should_wait", noted)
    engine.add(question("a", [*TEXT, 2], max_tokens=1))
    engine.add(question("b", [*TEXT, 3], max_tokens=1))
    engine.run(until=lambda: bool(engine.tokens("b")))
    assert told.count(True) == 1
    begun = next(plan for plan in engine.plans if 2 in starts(plan))
    assert starts(begun)[2] >= 16  # one block is less than it would wait for
    assert engine.tokens("b") == answer_alone(question("b", [*TEXT, 3], max_tokens=1), 0, engine.limits)


def test_cached_blocks_are_not_scanned_for_every_sequence_that_shares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(limits=small_limits(wait_tokens=8, max_step_tokens=100))
    engine.add(question("first", [*TEXT, 2], max_tokens=1))
    engine.run()
    looked_up: list[bytes] = []
    real = PrefixCache.contains

    def noted(cache: PrefixCache, key: bytes) -> bool:
        looked_up.append(key)
        return real(cache, key)

    monkeypatch.setattr(PrefixCache, "contains", noted)
    engine.add(question("again", [*TEXT, 3, 4, 5, 6], max_tokens=1))  # five blocks from the cache, and one
    assert starts(engine.step()) == {1: 20}
    assert len(looked_up) == 2
