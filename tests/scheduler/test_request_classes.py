"""Two classes of requests, priorities that age, steps bounded in time: one by one, then all at once."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.request import Request
from saccade.scheduler.cost_model import Work
from saccade.step_plan import StepPlan
from tests.scheduler.simulated_device import (
    IMAGE_ID,
    STEP_SECONDS,
    Engine,
    answer_alone,
    image,
    question,
    small_limits,
    work_of,
)
from tests.scheduler.simulated_device import (
    image as picture,
)

TEXT = [2, 3, 4, 5, 6, 7, 8, 2, 4, 6, 8, 3, 5, 7, 2, 5, 8, 3, 6, 2]
ENDLESS: dict[str, Any] = {"stop_token_ids": ()}


def seen(name: str, picture_name: int, **options: Any) -> Request:
    """A question about an image of 4 x 4 tokens, 64 patches."""
    return question(name, [IMAGE_ID, 3], (image(picture_name, 0, 4, 4),), **{**ENDLESS, **options})


# Priorities


def entering(engine: Engine) -> list[tuple[int, ...]]:
    return [enter.prompt for plan in engine.plans for enter in plan.new_slots]


def test_a_lower_priority_number_goes_first() -> None:
    engine = Engine(limits=small_limits(max_num_seqs=1))
    for name, prompt, priority in (("a", [2], 0), ("b", [3], 1), ("c", [4], -1), ("d", [5], 0)):
        engine.add(question(name, prompt, max_tokens=3, priority=priority, **ENDLESS))
    engine.run()
    assert entering(engine) == [(4,), (2,), (5,), (3,)]


def test_a_level_of_priority_is_worth_its_patience_and_no_more() -> None:
    engine = Engine(limits=small_limits(max_num_seqs=1, patience=1.0))
    engine.add(question("running", [2], max_tokens=50, **ENDLESS))
    engine.step()
    engine.add(question("patient", [3], max_tokens=1, priority=1))
    engine.now += 0.9
    engine.add(question("sooner", [4], max_tokens=1))  # within the second the level is worth
    engine.now += 0.2
    engine.add(question("later", [5], max_tokens=1))
    engine.run()
    assert entering(engine)[1:] == [(4,), (3,), (5,)]


def test_the_last_by_rank_is_preempted() -> None:
    engine = Engine(blocks=9, prefix_caching=False)
    engine.add(question("a", TEXT[:10], max_tokens=14, priority=1, **ENDLESS))
    engine.add(question("b", TEXT[5:15], max_tokens=14, **ENDLESS))
    engine.run()
    again = [enter for plan in engine.plans for enter in plan.new_slots if enter.output]
    assert again
    assert all(enter.prompt == tuple(TEXT[:10]) for enter in again)


# Classes


def test_text_does_not_wait_for_the_encoder() -> None:
    engine = Engine(blocks=200, limits=small_limits(max_num_seqs=8, max_step_tokens=64))
    for number in range(4):  # one view fits into a step
        engine.add(seen(f"p{number}", number, max_tokens=2))
    engine.add(question("text", TEXT, max_tokens=2, **ENDLESS))
    plan = engine.step()
    assert plan is not None
    assert [len(row.tokens) for row in plan.scheduled] == [20, 17]  # the text, and the first image


def test_views_seen_before_are_no_work_for_the_encoder() -> None:
    engine = Engine(blocks=200, feature_bytes=10_000, limits=small_limits(max_num_seqs=8, max_step_tokens=64))
    engine.add(seen("first", 1, max_tokens=1))
    engine.run()
    engine.add(seen("new", 2, max_tokens=2))
    engine.add(seen("new too", 3, max_tokens=2))
    other = question("known", [4, IMAGE_ID, 3], (image(1, 1, 4, 4),), max_tokens=2)
    engine.add(other)
    stats = engine.scheduler.stats()
    assert (stats.waiting_encode, stats.waiting_other) == (2, 1)
    plan = engine.step()
    assert plan is not None
    assert len(plan.encodes) == 1
    assert {len(row.tokens) for row in plan.scheduled} == {17, 18}  # a new one, and the known one


def test_a_view_evicted_while_its_request_waits_is_encoded_again() -> None:
    engine = Engine(
        feature_bytes=170, prefix_caching=False, limits=small_limits(max_num_seqs=1, max_model_len=80)
    )
    engine.add(seen("first", 1, max_tokens=1))
    engine.run()
    engine.add(question("running", TEXT, max_tokens=9, **ENDLESS))
    engine.step()
    engine.add(seen("again", 1, max_tokens=1))
    assert engine.scheduler.stats().waiting_other == 1
    key = engine.device.encoded[0]
    for number in range(3):  # the first is worth less: it was never asked for again
        engine.store.put(b"something else %d" % number, 0, 170)
    assert not engine.store.on_device(key)
    engine.run()
    assert engine.finish("again") == "length"
    assert engine.scheduler.stats().encodes == 2


def test_one_class_leaves_slots_to_the_other_that_waits() -> None:
    engine = Engine(blocks=200, limits=small_limits(max_num_seqs=4, max_step_tokens=64, class_slots=0.5))
    for number in range(4):
        engine.add(question(f"t{number}", [2, 3 + number], max_tokens=20, **ENDLESS))
    engine.add(seen("image", 1, max_tokens=20))
    engine.step()
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting_other, stats.waiting_encode) == (4, 1, 0)


def test_alone_a_class_may_take_all_slots() -> None:
    engine = Engine(blocks=200, limits=small_limits(max_num_seqs=4, max_step_tokens=64, class_slots=0.5))
    for number in range(4):
        engine.add(question(f"t{number}", [2, 3 + number], max_tokens=20, **ENDLESS))
    engine.step()
    assert engine.scheduler.stats().running == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_two_images_that_do_not_fit_together_come_one_after_the_other(overlap: bool) -> None:
    engine = Engine(blocks=6, prefix_caching=False, overlap=overlap)
    requests = [seen(f"p{number}", number, max_tokens=5) for number in range(4)]
    for request in requests:
        engine.add(request)
    engine.run(400)
    for request in requests:
        assert engine.tokens(request.id) == answer_alone(request, 0, engine.limits)
    assert engine.pool.used == 0


def test_a_large_image_is_not_kept_out_by_small_texts_for_ever() -> None:
    """Texts pass it while it lacks memory, until its patience ends; then the pool empties for it."""
    limits = small_limits(max_num_seqs=8, max_step_tokens=64, patience=1.0)
    engine = Engine(blocks=8, prefix_caching=False, limits=limits)
    for number in range(3):
        engine.add(question(f"t{number}", TEXT[:5], max_tokens=8, **ENDLESS))
    engine.step()
    engine.add(question("large", [IMAGE_ID], (image(1, 0, 4, 6),), max_tokens=5, **ENDLESS))
    passed = 0
    for number in range(3, 400):
        if engine.finish("large"):
            break
        engine.add(question(f"t{number}", TEXT[:5], max_tokens=8, **ENDLESS))
        engine.step()
        passed += sum(enter.prompt == tuple(TEXT[:5]) for enter in engine.plans[-1].new_slots)
    assert engine.finish("large")
    assert passed > 3
    assert engine.now < 1.0 + 60 * STEP_SECONDS


# Steps bounded in time


def beside_a_stream(engine: Engine) -> StepPlan:
    """The step in which a prompt of 20 tokens joins one that went whole, alone, the step before."""
    engine.add(question("alone", TEXT, max_tokens=30, **ENDLESS))
    plan = engine.step()
    assert plan is not None
    assert plan.scheduled[0].num_tokens == 20
    engine.add(question("beside", TEXT, max_tokens=1))
    plan = engine.step()
    assert plan is not None
    return plan


def test_a_prompt_beside_streams_is_cut_to_the_target_and_alone_it_is_not() -> None:
    limits = small_limits(max_step_tokens=64, itl_target=4.0, min_chunk=1)
    engine = Engine(limits=limits, prefix_caching=False)
    plan = beside_a_stream(engine)
    assert 1 < plan.scheduled[1].num_tokens < 20
    assert 3.0 < engine.truth.predict(work_of(plan, 1)) <= 4.0


@pytest.mark.parametrize(("target", "most"), [(1000.0, 8), (None, 20)])
def test_beside_streams_a_step_has_no_more_prompt_tokens_than_a_captured_one_holds(
    target: float | None, most: int
) -> None:
    limits = small_limits(max_step_tokens=64, itl_target=target, stream_tokens=8)
    engine = Engine(limits=limits, prefix_caching=False)
    plan = beside_a_stream(engine)
    assert plan.scheduled[1].num_tokens == most
    engine.run()


def test_an_image_that_lacked_a_slot_has_its_share_of_steps_once_one_is_free() -> None:
    """However patient it is: it does not wait for text to leave it tokens before it is asked again."""
    limits = small_limits(max_step_tokens=64, itl_target=1e4, stream_tokens=8, patience=1e9)
    engine = Engine(limits=limits, blocks=400, prefix_caching=False)
    engine.add(question("stream", [2, 3], max_tokens=60, **ENDLESS))
    for name in "abc":
        engine.add(question(name, TEXT, max_tokens=30, **ENDLESS))
    engine.run(until=lambda: all(map(engine.tokens, "abc")))
    engine.add(seen("image", 1, max_tokens=1))
    for number in range(30):
        if number == 10:
            for name in "abc":
                engine.cancel(name)
        if len(engine.scheduler._queues.waiting[False]) < 2:
            engine.add(question(f"text {number}", TEXT, max_tokens=1))
        engine.step()
        if number == 9:
            assert engine.scheduler.bottleneck == "rows"
    assert engine.finish("image")


@pytest.mark.parametrize(("texts", "whole"), [(0, True), (1, True), (20, False)])
def test_without_streams_image_prefill_is_chunked_while_text_traffic_is_frequent(
    texts: int, whole: bool
) -> None:
    limits = small_limits(max_step_tokens=64, itl_target=4.0, encode_layers=8, min_chunk=1)
    engine = Engine(blocks=200, limits=limits, prefix_caching=False)
    for number in range(texts):
        engine.add(question(f"text {number}", [2, 3], max_tokens=1))
    engine.run()
    assert engine.now < 0.9
    engine.add(seen("image", 1, max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert plan.encodes[0].stop_layer is None  # its view goes at once in any case
    assert (plan.scheduled[0].num_tokens == 17) == whole
    engine.run()
    assert engine.finish("image")
    engine.now += 1.0  # they come no more
    engine.add(seen("later", 2, max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert plan.scheduled[0].num_tokens == 17


def test_an_image_progresses_beside_text_steps_of_one_token() -> None:
    """Nobody streams, and every step is beyond the target with the texts alone."""
    limits = small_limits(max_step_tokens=64, itl_target=4.0, encode_layers=8, max_num_seqs=8, patience=1e9)
    engine = Engine(blocks=400, limits=limits, prefix_caching=False)
    for number in range(20):
        engine.add(question(f"before {number}", [2, 3], max_tokens=1))
    engine.run()
    engine.add(seen("image", 1, max_tokens=1))
    steps = 0
    while not engine.deltas["image"] and steps < 40:
        for _ in range(2):
            engine.add(question(f"text {steps} {len(engine.deltas)}", TEXT, max_tokens=1))
        engine.step()
        steps += 1
    assert steps < 8


def layers_beside_a_text(front: list[int], *, often: bool = False, waited: float = 0.0) -> int:
    """Of an image that has begun, with so much text before it, in the step of another's prompt; an answer
    streams."""
    limits = small_limits(
        max_step_tokens=64, itl_target=10.0, encode_layers=40, stretch=2.0, stretch_after=(0.5, 1.0)
    )
    engine = Engine(blocks=400, limits=limits, prefix_caching=False)
    engine.add(question("stream", [2, 3], max_tokens=90, **ENDLESS))
    for number in range(60 if often else 1):
        engine.add(question(f"text {number}", [2, 3], max_tokens=1))
        engine.step()
    pixels = (image(1, len(front), 6, 6),)
    engine.add(question("image", [*front, IMAGE_ID, 3], pixels, max_tokens=1, **ENDLESS))
    engine.step()
    engine.now += waited
    engine.add(question("text", TEXT, max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert len(TEXT) in [row.num_tokens for row in plan.scheduled]
    engine.run(until=lambda: bool(engine.finish("image")))
    return sum((encode.stop_layer or 40) - encode.first_layer for encode in plan.encodes)


@pytest.mark.parametrize("front", [[], [2, 4]])
def test_image_prefill_avoids_steps_with_text_prefill_while_text_is_rare(front: list[int]) -> None:
    assert layers_beside_a_text(front) == (1 if front else 0)  # it has a row already, or waits for one
    assert layers_beside_a_text(front, often=True) > 1
    assert layers_beside_a_text(front, waited=0.6) > 4


def test_without_streams_text_prefill_is_not_chunked() -> None:
    limits = small_limits(max_step_tokens=64, itl_target=4.0, min_chunk=1, max_num_seqs=20)
    engine = Engine(blocks=200, limits=limits, prefix_caching=False)
    for number in range(9):
        engine.add(question(f"text {number}", [2, 3, 4, 5, 6], max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert len(plan.scheduled) == 9
    assert engine.truth.predict(work_of(plan, 1)) > 4.0


def test_steps_grow_while_a_prompt_waits_long_and_no_longer() -> None:
    limits = small_limits(
        max_step_tokens=64, itl_target=4.0, min_chunk=1, stretch=2.5, stretch_after=(1.0, 3.0)
    )
    assert [limits.step_target_after(waited) for waited in (0.0, 1.0, 2.0, 3.0, 99.0)] == [4, 4, 7, 10, 10]
    engine = Engine(limits=limits, prefix_caching=False)
    engine.add(question("stream", [2, 3], max_tokens=60, **ENDLESS))
    engine.step()
    engine.add(question("prompt", TEXT[:19], max_tokens=1))
    engine.now += 3.0  # it has waited while the engine did something else
    plan = engine.step()
    assert plan is not None
    longest = plan.scheduled[1].num_tokens
    engine.run(until=lambda: "prompt" in engine.deltas)
    engine.add(question("fresh", TEXT[:19], max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert 1 < plan.scheduled[1].num_tokens < longest


def test_a_preempted_sequence_does_not_make_steps_longer() -> None:
    limits = small_limits(
        max_step_tokens=64, itl_target=4.0, min_chunk=1, stretch=2.5, stretch_after=(0.0, 0.01)
    )
    engine = Engine(blocks=12, limits=limits, prefix_caching=False)
    for name in "ab":
        engine.add(question(name, TEXT[:12], max_tokens=20, **ENDLESS))
    engine.run(until=lambda: engine.scheduler.stats().preemptions > 0)
    engine.now += 5.0
    plan = engine.step()
    assert plan is not None
    assert engine.truth.predict(work_of(plan, 1)) <= 4.5


def test_a_step_keeps_a_margin_below_the_target() -> None:
    """What predictions miss must not show between two tokens."""
    limits = small_limits(max_step_tokens=64, itl_target=4.0, itl_margin=0.15, min_chunk=1)
    engine = Engine(limits=limits, prefix_caching=False)
    engine.add(question("alone", TEXT, max_tokens=30, **ENDLESS))
    engine.step()
    engine.add(question("beside", TEXT, max_tokens=1))
    plan = engine.step()
    assert plan is not None
    assert 2.5 < engine.truth.predict(work_of(plan, 1)) <= 3.4


def test_a_second_view_waits_when_the_first_has_used_up_the_time() -> None:
    limits = small_limits(max_step_tokens=64, max_encode_patches=1000, itl_target=9.0)
    engine = Engine(blocks=200, limits=limits)
    engine.add(question("stream", [2], max_tokens=40, **ENDLESS))
    engine.step()
    for number in range(3):
        engine.add(seen(f"p{number}", number, max_tokens=2))
    assert [len(plan.encodes) for plan in (engine.step(), engine.step(), engine.step()) if plan] == [1, 1, 1]
    alone = Engine(blocks=200, limits=limits)
    for number in range(3):
        alone.add(seen(f"p{number}", number, max_tokens=2))
    plan = alone.step()
    assert plan is not None
    assert len(plan.encodes) == 3  # no one is kept waiting by a long step


def test_the_batch_does_not_grow_beyond_the_target_until_a_request_has_waited_long() -> None:
    limits = small_limits(max_num_seqs=40, max_step_tokens=64, itl_target=2.0, patience=1.0)
    engine = Engine(blocks=300, limits=limits)
    for number in range(30):
        engine.add(question(f"t{number}", [2, 3], max_tokens=60, **ENDLESS))
    engine.step()  # nothing streams yet: all may enter that fit into a step
    engine.cancel("t0")
    engine.add(question("late", [4], max_tokens=2, **ENDLESS))
    before = engine.scheduler.stats().running
    engine.step()
    assert engine.scheduler.stats().running == before
    engine.now += 1.0
    engine.step()
    assert engine.scheduler.stats().running == before + 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    target=st.sampled_from([1.5, 3.0, 6.0, 12.0]),
    least=st.sampled_from([1, 4]),
    layers=st.sampled_from([1, 9]),
    sizes=st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=14),
    overlap=st.booleans(),
)
def test_a_step_with_streams_outlasts_the_target_by_no_more_than_the_least_it_must_do(
    target: float, least: int, layers: int, sizes: list[tuple[int, bool]], overlap: bool
) -> None:
    limits = small_limits(
        max_num_seqs=6,
        max_step_tokens=50,
        itl_target=target,
        min_chunk=least,
        min_encode_time=0.0,
        encode_layers=layers,
    )
    engine = Engine(blocks=120, limits=limits, overlap=overlap, prefix_caching=False)
    for number, (length, with_picture) in enumerate(sizes):
        prompt = [IMAGE_ID] * with_picture + TEXT[:length]
        images = (image(number, 0, 3, 3),) if with_picture else ()
        engine.add(question(f"r{number}", prompt or [2], images, max_tokens=6, **ENDLESS))
        engine.step()
    engine.run()
    bounded = 0
    for plan in engine.plans:
        work = work_of(plan, layers)
        streams = [row for row in plan.scheduled if row.num_tokens == 1 and row.output_position]
        if not streams:
            continue
        bounded += 1
        alone = Work(rows=len(streams), context=sum(row.start + 1 for row in streams))
        short_prompts = work.rows - alone.rows  # a single token of a prompt is a row like any other
        rest = replace(work, tokens=max(work.tokens - 2 * least, 0), pairs=0, context=alone.context)
        rest.rows -= min(short_prompts, 2)
        if len(plan.encodes) == 1:  # one layer of it goes in any case
            share = max(plan.encodes[0].share(layers) - 1 / layers, 0.0)
            rest = replace(rest, encoding=0.0, patches=0.0, patch_pairs=0.0)
            rest.add_view(plan.encodes[0].patches, share)
        assert engine.truth.predict(rest) <= max(target, engine.truth.predict(alone)) + 1e-6
    assert bounded


# Nobody starves


def flood(kind: int, number: int) -> Request:
    """Requests that keep coming: small texts, urgent ones, images (always new), several sequences."""
    makers: tuple[Callable[[str], Request], ...] = (
        lambda name: question(name, TEXT[number % 7 :][:4], max_tokens=3, **ENDLESS),
        lambda name: question(name, TEXT[number % 5 :][:3], max_tokens=4, priority=-1, **ENDLESS),
        lambda name: question(name, [IMAGE_ID], (image(number % 190, 0, 2, 2),), max_tokens=3, **ENDLESS),
        lambda name: question(name, [3, 4 + number % 3], max_tokens=3, n=2, **ENDLESS),
    )
    return makers[kind % len(makers)](f"f{number}")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 5),
    step_tokens=st.sampled_from([1, 2, 5, 30]),
    blocks=st.integers(7, 20),
    target=st.sampled_from([None, 0.01, 4.0]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    class_slots=st.sampled_from([0.3, 0.75]),
    kinds=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    victim=st.sampled_from(["text", "image", "two pictures"]),
    priority=st.integers(0, 2),
    overlap=st.booleans(),
)
def test_no_request_starves_however_many_others_arrive(
    rows: int,
    step_tokens: int,
    blocks: int,
    target: float | None,
    share: float,
    class_slots: float,
    kinds: list[int],
    victim: str,
    priority: int,
    overlap: bool,
) -> None:
    """The flood never ends and fills the queue; a request in its middle ends all the same, within a bound
    that follows from the rules: those before it by rank, those who may pass it, one after the other."""
    limits = small_limits(
        max_num_seqs=rows,
        max_step_tokens=step_tokens,
        max_model_len=24,
        max_encode_patches=16,
        max_queue=12,
        itl_target=target,
        encode_share=share,
        class_slots=class_slots,
        patience=0.5,
        min_chunk=2,
    )
    engine = Engine(blocks=blocks, limits=limits, overlap=overlap)
    images = {"text": 0, "image": 1, "two pictures": 2}[victim]
    prompt = [IMAGE_ID] * images + TEXT[:5]
    media = tuple(image(200 + slot, slot, 2, 3) for slot in range(images))
    asked = question("victim", prompt, media, max_tokens=4, priority=priority, **ENDLESS)
    steps_of_patience = limits.patience / STEP_SECONDS
    ahead = rows + limits.max_queue + (1 + priority + 1) * steps_of_patience  # one comes in each step
    bound = int(ahead * 4 * 8)  # 8 steps: the longest of them, a token at a time; 4: computed again
    number = 0
    while len(engine.deltas) < 10:
        engine.add(flood(kinds[number % len(kinds)], number))
        number += 1
    engine.step()
    engine.add(asked)
    for _ in range(bound):
        if engine.finish("victim"):
            break
        with contextlib.suppress(RequestError):
            engine.add(flood(kinds[number % len(kinds)], number))
        number += 1
        engine.step()
    assert engine.finish("victim") == "length"
    assert engine.tokens("victim") == answer_alone(asked, 0, limits)


# What is told


def test_stats_tell_waits_and_step_times() -> None:
    engine = Engine(limits=small_limits(max_num_seqs=1))
    engine.add(question("a", TEXT, max_tokens=4, **ENDLESS))
    engine.step()
    engine.add(question("b", TEXT, max_tokens=1))
    engine.now += 2.0
    stats = engine.scheduler.stats()
    assert stats.oldest_wait == pytest.approx(2.0)
    assert stats.started == 1
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.oldest_wait == 0.0
    assert stats.started == 2
    assert stats.wait_seconds > 2.0
    assert stats.timed_steps == stats.steps
    assert stats.step_seconds == pytest.approx(stats.step_seconds_predicted)


# Pictures have a pool of their own


@pytest.mark.parametrize("known", [False, True], ids=["new", "seen before"])
def test_a_full_pool_of_views_holds_no_text_back(known: bool) -> None:
    """Two images do not fit together: the second waits, however long, and text behind it does not, be it in
    the same line (the image is known) or in the other."""
    limits = small_limits(max_num_seqs=4, block_size=2, patience=0.0)
    engine = Engine(limits=limits, blocks=40, vision=3, prefix_caching=False)
    looks = {name: (image(place, 0, 2, 3),) for place, name in enumerate(("first", "second", "third"))}
    for name in looks if known else ():  # three blocks, all of the pool
        engine.add(question(f"{name} before", [IMAGE_ID, 2, 3], looks[name], max_tokens=1))
        engine.run()
    for name, look in looks.items():
        engine.add(question(name, [IMAGE_ID, 2, 3], look, max_tokens=30, **ENDLESS))
    engine.run(until=lambda: len(engine.tokens("first")) > 3)
    stats = engine.scheduler.stats()
    assert (stats.waiting, stats.waiting_other) == (2, 2 if known else 0)
    engine.add(question("text", [2, 3, 4], max_tokens=4, **ENDLESS))
    engine.run(until=lambda: engine.finish("text") is not None)
    assert engine.finish("first") is None
    assert not engine.tokens("second")
    engine.run(until=lambda: engine.finish("second") is not None)
    assert not engine.tokens("third")  # nor does an image pass another
    engine.run()
    assert engine.finish("third") == "length"


@pytest.mark.parametrize("known", [False, True], ids=["new", "seen before"])
def test_text_leaves_a_waiting_image_its_slot_and_text_blocks(known: bool) -> None:
    """However many come: as soon as its pool has room, the image enters."""
    limits = small_limits(max_num_seqs=4, block_size=2, patience=0.0, max_queue=1000)
    engine = Engine(limits=limits, blocks=23, vision=3, prefix_caching=False)
    looks = (image(1, 0, 2, 3),), (image(2, 0, 2, 3),)
    if known:
        for name, look in zip("ab", looks, strict=True):
            engine.add(question(f"{name} before", [IMAGE_ID, 2], look, max_tokens=1))
            engine.run()
    engine.add(question("first", [IMAGE_ID, 2], looks[0], max_tokens=12, **ENDLESS))
    engine.step()
    engine.add(question("second", [IMAGE_ID, *TEXT[:9]], looks[1], max_tokens=3, **ENDLESS))
    passed = number = 0
    while not engine.finish("second"):
        number += 1
        engine.add(question(f"t{number}", TEXT[:5], max_tokens=4, **ENDLESS))
        over = engine.finish("first") is not None
        engine.step()
        passed += sum(enter.prompt == tuple(TEXT[:5]) for enter in engine.plans[-1].new_slots)
        assert number < 30
        if over:
            assert any(enter.prompt[0] == IMAGE_ID for enter in engine.plans[-1].new_slots)
            break
    assert passed > 3
    engine.run()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 5),
    step_tokens=st.sampled_from([1, 2, 5, 30]),
    text=st.integers(7, 14),
    vision=st.integers(2, 5),
    target=st.sampled_from([None, 0.01, 4.0]),
    patience=st.sampled_from([0.0, 0.5]),
    kinds=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    known=st.booleans(),
    overlap=st.booleans(),
)
@example(  # each text fits beside the image, but not with what running texts grow by
    rows=4, step_tokens=5, text=7, vision=2, target=None, patience=0.0, kinds=[1], known=False, overlap=False
)
def test_a_picture_does_not_starve_for_its_pool_however_many_texts_pass_it(
    rows: int,
    step_tokens: int,
    text: int,
    vision: int,
    target: float | None,
    patience: float,
    kinds: list[int],
    known: bool,
    overlap: bool,
) -> None:
    limits = small_limits(
        max_num_seqs=rows,
        max_step_tokens=step_tokens,
        max_model_len=24,
        max_encode_patches=32,
        max_queue=12,
        itl_target=target,
        patience=patience,
        min_chunk=2,
    )
    engine = Engine(
        blocks=text + vision, vision=vision, limits=limits, overlap=overlap, feature_bytes=1 << 20
    )
    media = (picture(200, 0, 2, 4),)  # two blocks
    if known:
        engine.add(question("before", [IMAGE_ID, 2], media, max_tokens=1, salt=b"other"))
        engine.run()
    asked = question("victim", [IMAGE_ID, *TEXT[:5]], media, max_tokens=4, **ENDLESS)
    ahead = rows + limits.max_queue + 2 * patience / STEP_SECONDS
    number = 0
    while len(engine.deltas) < 11:
        engine.add(flood(kinds[number % len(kinds)], number))
        number += 1
    engine.step()
    engine.add(asked)
    for _ in range(int(ahead * 4 * 8)):
        if engine.finish("victim"):
            break
        with contextlib.suppress(RequestError):
            engine.add(flood(kinds[number % len(kinds)], number))
        number += 1
        engine.step()
    assert engine.finish("victim") == "length"
    assert engine.tokens("victim") == answer_alone(asked, 0, limits, engine.pool.roles)
