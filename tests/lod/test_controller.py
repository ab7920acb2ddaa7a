"""The length of a request is decided in the middle of its life, once, and everything it holds goes along."""

from typing import Any

import numpy as np
import pytest

from saccade.errors import ContextTooLong
from saccade.lod.types import LodParams, Region, RelevanceMaps, ViewRule, ZoomChoice
from saccade.request import Request
from saccade.scheduler.policy import EarlyExit
from tests.scheduler.simulated_device import (
    IMAGE_ID,
    Engine,
    answer_alone,
    image,
    question,
    small_limits,
    work_of,
    zooming,
)

QUESTION = [IMAGE_ID, 2, 4, 5, 6, 7, 2, 4]  # and the turn's end behind it
ENDLESS: dict[str, Any] = {"stop_token_ids": (), "min_tokens": 0}


def looking(name: str, tokens: int = 6, **options: Any) -> Request:
    images = (image(1, 0, 2, 3),)
    return question(
        name, [*QUESTION, 8, 8], images, zooming=zooming(len(QUESTION), (0,), tokens, images), **options
    )


def choosing(engine: Engine, *regions: Region) -> None:
    """From now on these are chosen, whatever is seen."""

    def choose(images: object, budget: int, params: LodParams, rule: ViewRule) -> tuple[ZoomChoice, ...]:
        return (ZoomChoice(regions=regions, relevance=np.zeros((2, 3), dtype=np.float32)),)

    engine.lod.chooser = choose


def test_only_the_request_itself_waits_for_its_relevance_pass() -> None:
    engine = Engine(overlap=True)
    engine.add(looking("a", **ENDLESS))
    engine.add(question("b", [5, 5, 5], max_tokens=9, **ENDLESS))
    engine.step()  # both prompts; the look is on its way
    plan = engine.step()
    assert plan is not None
    assert [row.start for row in plan.scheduled] == [3]  # b's next token alone
    plan = engine.step()
    assert plan is not None
    assert len(plan.scheduled) == 2
    engine.run()
    assert engine.tokens("a") == answer_alone(looking("a", **ENDLESS), 0, engine.limits)
    assert engine.device.probed == 1


def test_blocks_reserved_for_views_not_chosen_are_freed() -> None:
    engine = Engine(prefix_caching=False)
    choosing(engine)
    engine.add(looking("a", tokens=20, **ENDLESS))
    engine.step()
    # 13 tokens up to the look and 2 behind it; while undecided also 20 of views and a mark for each of two
    assert engine.pool.used == 4
    engine.run()

    claimed = []
    engine = Engine(overlap=True, prefix_caching=False)
    choosing(engine)
    engine.add(looking("a", tokens=20, **ENDLESS))
    engine.step()
    claimed.append(engine.pool.used)
    engine.step()
    claimed.append(engine.pool.used)
    assert claimed == [-(-(15 + 20 + 2) // 4), 4]


def test_chosen_views_stay_after_preemption() -> None:
    limits = small_limits(max_num_seqs=2, max_step_tokens=64)
    engine = Engine(limits=limits, blocks=13, prefix_caching=False)
    engine.add(question("first", [5] * 6, max_tokens=40, **ENDLESS))
    engine.step()
    engine.add(looking("a", max_tokens=20, **ENDLESS))
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    assert engine.device.probed == 1, "it looked again"
    assert engine.tokens("a") == answer_alone(looking("a", max_tokens=20, **ENDLESS), 0, limits)


def test_relevance_that_arrives_after_preemption_still_decides() -> None:
    engine = Engine(overlap=True, prefix_caching=False)
    engine.add(looking("a", **ENDLESS))
    engine.step()  # the look is on its way
    (sequence,) = engine.scheduler._requests["a"].sequences
    engine.scheduler._planner.preempt(sequence)
    engine.scheduler.check()
    engine.run()
    assert engine.scheduler.stats().looks == 1
    assert engine.tokens("a") == answer_alone(looking("a", **ENDLESS), 0, engine.limits)


@pytest.mark.parametrize("overlap", [False, True])
def test_all_sequences_get_the_views_chosen_once(overlap: bool) -> None:
    engine = Engine(overlap=overlap)
    request = looking("a", n=3, seed=1, **ENDLESS)
    engine.add(request)
    engine.run()
    assert engine.device.probed == 1
    told = [delta.zoomed for delta in engine.deltas["a"] if delta.zoomed]
    assert len(told) == 1
    for index in range(3):
        assert engine.tokens("a", index) == answer_alone(request, index, engine.limits)


def test_a_cancelled_request_leaves_nothing_though_its_relevance_arrives() -> None:
    engine = Engine(overlap=True)
    engine.add(looking("a"))
    engine.step()
    engine.cancel("a")
    engine.run()
    assert engine.finish("a") == "cancelled"
    assert engine.pool.used == 0
    assert not engine.store.pins


def test_a_request_that_may_become_too_long_is_refused_before_it_begins() -> None:
    engine = Engine()
    fits = 64 - 15 - 2 - 4  # of the context, beside the prompt, two marks and four tokens to answer
    engine.add(looking("a", tokens=fits))
    with pytest.raises(ContextTooLong, match="prompt has 64 tokens"):
        engine.add(looking("b", tokens=fits + 4))
    small = Engine(blocks=8)
    with pytest.raises(ContextTooLong, match="KV blocks"):
        small.add(looking("c", tokens=20))


def test_unusable_relevance_ends_its_request_alone() -> None:
    engine = Engine()

    def refuse(images: object, budget: int, params: LodParams, rule: ViewRule) -> tuple[ZoomChoice, ...]:
        raise ValueError("strength of a look is nan")

    engine.lod.chooser = refuse
    engine.add(looking("a"))
    engine.add(question("b", [5, 5, 5], max_tokens=3, **ENDLESS))
    engine.run()
    assert engine.finish("a") == "error"
    assert "nan" in str(engine.deltas["a"][-1].error)
    assert engine.finish("b") == "length"


def test_views_are_never_chosen_beyond_what_was_claimed() -> None:
    engine = Engine()
    choosing(engine, Region((0, 0, 3, 2), (3, 3), 1.0))  # 9 tokens; 6 were allowed
    engine.add(looking("a", tokens=6))
    with pytest.raises(RuntimeError, match="claimed"):
        engine.run()


def test_a_preview_ends_with_the_maps_and_no_token() -> None:
    engine = Engine()
    request = looking("a")
    assert request.zooming is not None
    images = request.media
    only = question(
        "a",
        [*QUESTION, 8, 8],
        images,
        zooming=zooming(len(QUESTION), (0,), 6, images, preview_only=True),
    )
    engine.add(only)
    engine.run()
    assert engine.tokens("a") == []
    assert engine.finish("a") == "stop"
    (told,) = [delta.zoomed for delta in engine.deltas["a"] if delta.zoomed]
    assert isinstance(told.looks[0], RelevanceMaps)
    assert len(told.choices) == 1


def test_a_second_question_shares_the_image_and_the_zooms_that_agree() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=64))
    same = Region((0, 0, 1, 1), (1, 2), 1.0)
    choosing(engine, same)
    engine.add(looking("a", **ENDLESS))
    engine.run()
    before = engine.scheduler.stats()
    images = (image(1, 0, 2, 3),)
    other = [IMAGE_ID, 2, 4, 6, 6]
    engine.add(question("b", [*other, 8], images, zooming=zooming(len(other), (0,), 6, images), **ENDLESS))
    engine.run()
    after = engine.scheduler.stats()
    assert engine.cached("b") >= 8, "the picture's tokens and those in front of the questions' difference"
    assert after.encodes == before.encodes, "neither the picture nor the zoom is encoded again"
    assert after.zooms == before.zooms + 1


def briefly(**changes: Any) -> Engine:
    """An engine that has seen the image, and whose looks may be brief."""
    engine = Engine(limits=small_limits(early_exit=EarlyExit(8, 0.5)), **changes)
    engine.add(looking("before", max_tokens=1, **ENDLESS))
    engine.run()
    assert engine.device.early_exits == 0, "the picture itself was to be computed"
    return engine


def another(name: str, end: int = 6, **options: Any) -> Request:
    """Another question about the same image: 5 tokens behind it, the first as it was."""
    images = (image(1, 0, 2, 3),)
    prompt = [IMAGE_ID, 2, 6, 5, 6, end]
    return question(name, [*prompt, 8, 8], images, zooming=zooming(len(prompt), (0,), 6, images), **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_positions_of_an_early_exit_are_computed_again_with_the_chosen_views(overlap: bool) -> None:
    engine = briefly(overlap=overlap)
    engine.add(another("a", **ENDLESS))
    plan = engine.step()
    assert plan is not None
    assert plan.early_exit
    (look,) = plan.scheduled
    (sequence,) = engine.scheduler._requests["a"].sequences
    assert sequence.num_computed_tokens == look.start, "nobody may go on from what has not passed all layers"
    while not (plan := engine.step()):
        pass
    assert not plan.early_exit
    assert plan.scheduled[0].start == look.start
    assert plan.scheduled[0].num_tokens > look.num_tokens
    engine.run()
    assert engine.tokens("a") == answer_alone(another("a", **ENDLESS), 0, engine.limits)
    engine.add(another("b", **ENDLESS))  # finds what the whole step computed
    engine.run()
    assert engine.cached("b") > look.start
    assert engine.tokens("b") == answer_alone(another("b", **ENDLESS), 0, engine.limits)


def test_a_relevance_pass_beside_others_or_of_many_tokens_does_not_exit_early() -> None:
    engine = briefly()
    for number, name in enumerate("abc"):  # 4 tokens each, more than 8 together
        engine.add(another(name, 4 + number, **ENDLESS))
    engine.run()
    engine.add(question("stream", [5, 5, 5], max_tokens=9, **ENDLESS))
    engine.step()
    engine.add(another("d", 7, **ENDLESS))
    engine.run()
    assert engine.device.early_exits == 0
    assert engine.device.probed == 5
    for number, name in enumerate("abcd"):
        assert engine.tokens(name) == answer_alone(another(name, 4 + number, **ENDLESS), 0, engine.limits)


def test_a_request_is_preempted_between_an_early_exit_and_its_output() -> None:
    engine = briefly(overlap=True, slots=8)
    engine.add(another("a", n=2, seed=3, **ENDLESS))
    assert engine.step() is not None
    assert engine.device.early_exits == 1
    (sequence, _) = engine.scheduler._requests["a"].sequences
    engine.scheduler._planner.preempt(sequence)
    engine.scheduler.check()
    engine.run()
    for index in range(2):
        assert engine.tokens("a", index) == answer_alone(
            another("a", n=2, seed=3, **ENDLESS), index, engine.limits
        )


def test_a_cancelled_request_leaves_nothing_though_its_early_exit_output_arrives() -> None:
    engine = briefly(overlap=True)
    engine.add(another("a"))
    engine.step()
    engine.cancel("a")
    engine.run()
    assert engine.device.early_exits == 1
    assert engine.finish("a") == "cancelled"
    assert engine.pool.used == 0


def test_without_zoomed_views_the_prompt_continues_after_an_early_exit() -> None:
    engine = briefly()
    choosing(engine)
    engine.add(another("a", max_tokens=3, **ENDLESS))
    engine.run()
    assert engine.device.early_exits == 1
    assert len(engine.tokens("a")) == 3
    (look,), (prompt,) = (plan.scheduled for plan in engine.plans[-4:-2])
    assert (prompt.start, prompt.num_tokens) == (look.start, look.num_tokens + 2), (
        "the question, and the turn's end"
    )


def test_the_cost_model_ignores_early_exit_steps() -> None:
    engine = briefly()
    cost, before = engine.scheduler._cost, engine.scheduler.stats().timed_steps
    engine.add(another("a", max_tokens=1, **ENDLESS))
    plan = engine.step()
    assert plan is not None
    assert plan.expected_ms == pytest.approx(0.5 * cost.predict(work_of(plan, 1)))
    engine.run()
    assert engine.scheduler.stats().timed_steps == before + 1


def test_look_time_excludes_encoding_when_relevance_is_applied_early() -> None:
    """What the step's views took is known with its result alone."""
    engine = Engine(overlap=True)
    engine.add(looking("a", **ENDLESS))
    engine.step()
    ((plan, result),) = engine.in_flight
    engine.take(engine.scheduler.apply_relevance(plan, result.relevance))
    heard = engine.now
    engine.run()
    times = engine.deltas["a"][0].times
    assert times is not None
    assert times.encode > 0
    assert times.look == pytest.approx(heard - times.started - times.encode)
