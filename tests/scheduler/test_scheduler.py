"""The scheduler's rules, one by one, on the simulated device (which checks every cell that is read)."""

from typing import Any

import pytest

from saccade.errors import ContextTooLong, InvalidValue, Overloaded
from saccade.scheduler.policy import prefill_budgets
from saccade.scheduler.sequence import derive_seed, text_position
from saccade.step_plan import StepOutput, StepPlan
from tests.scheduler.simulated_device import IMAGE_ID, Engine, answer_alone, image, question, small_limits

TEXT = [2, 3, 4, 5, 6, 7, 8, 2, 4, 6, 8, 3, 5, 7, 2, 5, 8, 3, 6, 2]  # 20 tokens: five blocks of four
ENDLESS: dict[str, Any] = {"stop_token_ids": ()}


def rows(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(sequence, start, count) of a plan's rows, by sequence."""
    assert plan is not None
    return sorted((row.seq_id, row.start, row.num_tokens) for row in plan.scheduled)


# Budget and chunks


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=7))
    engine.add(question("a", TEXT, max_tokens=1))
    engine.run()
    assert [rows(plan) for plan in engine.plans] == [[(0, 0, 7)], [(0, 7, 7)], [(0, 14, 6)]]
    assert [plan.scheduled[0].sample for plan in engine.plans] == [False, False, True]


def test_a_long_prompt_leaves_every_running_stream_its_next_token() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=7))
    engine.add(question("a", [2, 3], max_tokens=9, **ENDLESS))
    engine.add(question("b", [4, 3], max_tokens=9, **ENDLESS))
    engine.step()
    engine.add(question("long", TEXT, max_tokens=1))
    assert rows(engine.step()) == [(0, 2, 1), (1, 2, 1), (2, 0, 5)]
    assert rows(engine.step()) == [(0, 3, 1), (1, 3, 1), (2, 5, 5)]


def test_a_long_prompt_does_not_delay_decoding_of_later_requests() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=7, max_encode_patches=1))
    images = (image(1, 0), image(2, 1))
    engine.add(question("long", [IMAGE_ID, IMAGE_ID, *TEXT], images, max_tokens=1))
    engine.add(question("b", [4, 3], max_tokens=9, **ENDLESS))
    assert rows(engine.step()) == [(0, 0, 4), (1, 0, 2)]  # the second image has to wait for the next step
    assert rows(engine.step()) == [(0, 4, 6), (1, 2, 1)]


def test_the_oldest_moves_even_if_the_budget_is_one_token() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=1))
    engine.add(question("a", [2, 3, 4], max_tokens=3, **ENDLESS))
    engine.add(question("b", [3, 4, 4], max_tokens=3, **ENDLESS))
    engine.run()
    assert [plan.scheduled[0].seq_id for plan in engine.plans] == [0] * 5 + [1] * 5


def test_classes_share_tokens_and_time_only_while_both_want_some() -> None:
    limits = small_limits(max_step_tokens=20, encode_share=0.5)
    plain, encoding = prefill_budgets(limits, 10, 4.0, 20.0, both=True, turn=0)
    assert (plain.tokens, plain.until) == (5, 12.0)
    assert (encoding.tokens, encoding.until) == (10, 20.0)
    plain, encoding = prefill_budgets(limits, 10, 4.0, 20.0, both=False, turn=0)
    assert (plain.tokens, plain.until, encoding.tokens, encoding.until) == (10, 20.0, 10, 20.0)


def test_a_single_token_goes_to_the_classes_in_turn() -> None:
    limits = small_limits()
    assert [prefill_budgets(limits, 1, 0.0, None, both=True, turn=turn)[0].tokens for turn in range(4)] == [
        0,
        1,
        0,
        1,
    ]
    assert [prefill_budgets(limits, 1, 0.0, None, both=False, turn=turn)[0].tokens for turn in (0, 1)] == [
        1,
        1,
    ]


def test_single_token_slices_come_first_in_a_plan() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=8))
    engine.add(question("long", TEXT, max_tokens=1))
    engine.add(question("b", [2], max_tokens=5, **ENDLESS))
    engine.add(question("c", [2, 3, 4], max_tokens=5, **ENDLESS))
    engine.run()
    for plan in engine.plans:
        counts = [row.num_tokens for row in plan.scheduled]
        assert counts == sorted(counts, key=lambda count: count != 1)


def test_a_block_table_entry_is_sent_once() -> None:
    engine = Engine()
    engine.add(question("a", TEXT[:6], max_tokens=8, **ENDLESS))
    engine.run()
    assert [[index for _, index, _, _ in plan.block_table_updates] for plan in engine.plans] == [
        [0, 1],
        [],
        [],
        [2],
        [],
        [],
        [],
        [3],
    ]


def test_arrivals_are_served_first_come_first_served() -> None:
    engine = Engine(limits=small_limits(max_num_seqs=1))
    for name in "abc":
        engine.add(question(name, TEXT[:5], max_tokens=2, **ENDLESS))
    engine.run()
    assert [plan.scheduled[0].seq_id for plan in engine.plans] == [0, 0, 1, 1, 2, 2]


# What is refused


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    engine = Engine(limits=small_limits(max_model_len=20))
    with pytest.raises(ContextTooLong, match=r"20 tokens.* 20, output included"):
        engine.add(question("a", TEXT))


def test_a_request_that_can_never_fit_into_the_pool_is_refused() -> None:
    engine = Engine(blocks=6)
    with pytest.raises(ContextTooLong, match=r"need 7 KV blocks of 4 tokens; the cache has 6"):
        engine.add(question("a", TEXT, max_tokens=6))
    engine.add(question("b", TEXT, max_tokens=5, **ENDLESS))  # exactly six: the last token is never computed
    engine.run()
    assert len(engine.tokens("b")) == 5


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("n", 0)])
def test_nothing_is_not_something_to_ask_for(field: str, value: int) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(InvalidValue, match=field):
        Engine().add(question("a", TEXT, **options))


def test_an_empty_prompt_and_a_name_in_use_are_refused() -> None:
    engine = Engine()
    with pytest.raises(InvalidValue, match="empty"):
        engine.add(question("a", []))
    engine.add(question("a", TEXT))
    with pytest.raises(InvalidValue, match="already"):
        engine.add(question("a", TEXT))


def test_a_full_queue_refuses_and_a_started_request_makes_room() -> None:
    engine = Engine(limits=small_limits(max_queue=2, max_num_seqs=1))
    engine.add(question("a", TEXT, n=3))
    engine.add(question("b", TEXT))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        engine.add(question("c", TEXT))
    engine.step()
    engine.add(question("c", TEXT))
    assert (engine.scheduler.stats().running, engine.scheduler.stats().waiting) == (1, 2)


def test_pixels_of_unanswered_requests_have_a_budget() -> None:
    engine = Engine(limits=small_limits(max_queue_bytes=30))  # an image of the device has 12 bytes
    for name in ("a", "b"):
        engine.add(question(name, [IMAGE_ID, *TEXT], (image(ord(name), 0),)))
    with pytest.raises(Overloaded, match="24 bytes"):
        engine.add(question("c", [IMAGE_ID, *TEXT], (image(99, 0),)))
    engine.add(question("text", TEXT))
    engine.run()
    engine.add(question("c", [IMAGE_ID, *TEXT], (image(99, 0),)))
    engine.run()


# Ends


def test_a_stop_token_ends_and_is_part_of_the_answer() -> None:
    engine = Engine()
    request = question("a", TEXT, max_tokens=30)
    engine.add(request)
    engine.run()
    assert engine.finish("a") == "stop"
    assert engine.tokens("a")[-1] == 1
    assert 1 not in engine.tokens("a")[:-1]


def test_a_stop_token_before_min_tokens_does_not_end() -> None:
    engine = Engine()
    stops = tuple(range(9))  # any token would stop
    engine.add(question("a", TEXT, max_tokens=9, min_tokens=5, stop_token_ids=stops))
    engine.run()
    assert len(engine.tokens("a")) == 5
    assert engine.finish("a") == "stop"


@pytest.mark.parametrize("overlap", [False, True])
def test_the_context_and_max_tokens_end_and_nothing_is_computed_beyond(overlap: bool) -> None:
    engine = Engine(overlap=overlap, limits=small_limits(max_model_len=24))
    engine.add(question("a", TEXT, max_tokens=100, **ENDLESS))
    engine.add(question("b", TEXT, max_tokens=2, **ENDLESS))
    engine.run()
    assert (len(engine.tokens("a")), engine.finish("a")) == (4, "length")
    assert (len(engine.tokens("b")), engine.finish("b")) == (2, "length")
    last = max(row.start + row.num_tokens for plan in engine.plans for row in plan.scheduled)
    assert last == 23


# Overlap


def test_planned_ahead_a_slice_lacks_the_id_that_only_the_device_knows() -> None:
    engine = Engine(overlap=True)
    engine.add(question("a", TEXT, max_tokens=4, **ENDLESS))
    engine.step()
    plan = engine.step()
    assert plan is not None
    row = plan.scheduled[0]
    assert (row.start, row.num_tokens, row.tokens, row.output_position) == (20, 1, (), 1)


def test_a_stop_found_late_wastes_one_slice_and_its_token_is_not_reported() -> None:
    stops = tuple(range(9))
    engine = Engine(overlap=True)
    engine.add(question("a", TEXT, max_tokens=9, stop_token_ids=stops))
    engine.run()
    assert len(engine.plans) == 2
    assert len(engine.tokens("a")) == 1


def test_at_most_two_steps_are_in_flight_and_results_come_in_order() -> None:
    engine = Engine()
    engine.add(question("a", TEXT, max_tokens=9, **ENDLESS))
    first, second = engine.scheduler.plan(), engine.scheduler.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        engine.scheduler.plan()
    with pytest.raises(RuntimeError, match="step 0 is next"):
        engine.scheduler.apply(second, StepOutput(1, (2,), (None,)))
    with pytest.raises(RuntimeError, match="samples 1 sequences, but 0 tokens"):
        engine.scheduler.apply(first, StepOutput(0, (), ()))


def test_a_block_is_not_found_before_the_result_of_the_step_that_fills_it() -> None:
    engine = Engine(overlap=True, limits=small_limits(max_step_tokens=64))
    engine.add(question("a", TEXT, max_tokens=2, **ENDLESS))
    engine.step()
    engine.add(question("b", TEXT, max_tokens=2, **ENDLESS))
    engine.step()  # a's prompt is launched, but not known to have been computed
    engine.add(question("c", TEXT, max_tokens=2, **ENDLESS))
    engine.run()
    assert engine.cached("b") == 0
    assert engine.cached("c") == 19


# The prefix cache


def test_a_shared_beginning_is_computed_once_to_the_token() -> None:
    engine = Engine()
    engine.add(question("a", TEXT, max_tokens=1))
    engine.run()
    request = question("b", [*TEXT[:14], 8, 8, 8], max_tokens=1)
    engine.add(request)
    engine.run()
    assert engine.cached("b") == 14
    assert rows(engine.plans[-1]) == [(1, 14, 3)]
    assert len(engine.plans[-1].block_copies) == 1  # the fourth block, of which two tokens agree
    assert engine.tokens("b") == answer_alone(request, 0, engine.limits)
    stats = engine.scheduler.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (37, 14)
    assert stats.prefix_copied_tokens == 2


def test_without_room_for_a_copy_a_block_shared_in_part_is_computed() -> None:
    engine = Engine(blocks=5)
    engine.add(question("a", TEXT, max_tokens=1))
    engine.run()
    engine.add(question("b", [*TEXT[:18], 8, 8], max_tokens=1))
    assert rows(engine.step()) == [(1, 16, 4)]
    engine.run()


def test_another_question_about_an_image_needs_no_features_of_it() -> None:
    """The image's last tokens share a block with the question: copied, they need not be computed."""
    engine = Engine(feature_bytes=0)
    for name, words in (("a", [2, 3, 4, 5, 6, 7]), ("b", [3, 4, 5, 6, 7, 8])):
        request = question(name, [8, IMAGE_ID, *words], (image(1, 1, 2, 3),), max_tokens=3, **ENDLESS)
        engine.add(request)
        engine.run()
        assert engine.tokens(name) == answer_alone(request, 0, engine.limits)
    assert engine.cached("b") == 7
    assert len(engine.device.encoded) == 1


def test_when_everything_is_cached_the_last_token_is_computed_in_a_copy() -> None:
    engine = Engine()
    request = question("a", TEXT, max_tokens=3, **ENDLESS)
    engine.add(request)
    engine.run()
    engine.add(question("b", TEXT, max_tokens=3, seed=3, **ENDLESS))
    plan = engine.step()
    assert rows(plan) == [(1, 19, 1)]
    assert plan is not None
    assert len(plan.block_copies) == 1
    engine.run()
    assert engine.cached("b") == 19
    assert engine.tokens("b") == answer_alone(
        question("b", TEXT, max_tokens=3, seed=3, **ENDLESS), 0, engine.limits
    )


def test_the_copy_is_released_once_it_equals_the_original() -> None:
    engine = Engine()
    engine.add(question("a", TEXT, max_tokens=1))
    engine.run()
    engine.add(question("b", TEXT, max_tokens=2, **ENDLESS))
    engine.step()
    assert (engine.pool.used, engine.pool.cached) == (5, 0)
    engine.run()
    assert engine.pool.cached == 5


def test_without_room_for_a_copy_the_last_block_is_computed_again() -> None:
    engine = Engine(blocks=5)
    engine.add(question("a", TEXT, max_tokens=1))
    engine.run()
    engine.add(question("b", TEXT, max_tokens=1, seed=3))
    plan = engine.step()
    assert rows(plan) == [(1, 16, 4)]
    assert plan is not None
    assert not plan.block_copies


def test_two_sequences_that_compute_the_same_block_end_up_sharing_it() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=64))
    engine.add(question("a", TEXT, max_tokens=8, **ENDLESS))
    engine.add(question("b", TEXT, max_tokens=8, **ENDLESS))
    engine.step()
    assert engine.pool.used == 5
    engine.run()
    assert engine.tokens("b") == answer_alone(question("b", TEXT, max_tokens=8, **ENDLESS), 0, engine.limits)


def test_sequences_of_a_request_move_together_to_a_block_cached_before() -> None:
    """Later sequences share the first one's blocks before their content is known to be somebody else's."""
    engine = Engine(overlap=True, limits=small_limits(max_step_tokens=64))
    engine.add(question("b", TEXT[:9], max_tokens=8, **ENDLESS))
    request = question("a", TEXT, max_tokens=8, n=3, **ENDLESS)
    engine.add(request)
    engine.run()  # the prefix cache is checked after every call
    for index in range(3):
        assert engine.tokens("a", index) == answer_alone(request, index, engine.limits)


def test_tenants_share_nothing() -> None:
    engine = Engine()
    for name in ("mine", "yours", "mine again"):
        engine.add(question(name, TEXT, max_tokens=1, salt=name[:4].encode()))
        engine.run()
    assert [engine.cached(name) for name in ("mine", "yours", "mine again")] == [0, 0, 19]


def test_the_answer_too_is_found_by_the_next_turn() -> None:
    engine = Engine()
    engine.add(question("a", TEXT, max_tokens=9, **ENDLESS))
    engine.run()
    turn = [*TEXT, *engine.tokens("a"), 5, 5]
    engine.add(question("b", turn, max_tokens=1))
    engine.run()
    assert engine.cached("b") == 28  # 20 + 9 tokens, of which the last was never computed


# Pictures


def test_a_chunk_may_end_in_the_middle_of_an_image_which_is_encoded_once() -> None:
    engine = Engine(feature_bytes=0, limits=small_limits(max_step_tokens=4))
    engine.add(question("a", [2, 3, IMAGE_ID, 4], (image(1, 2, 2, 3),), max_tokens=1))
    engine.run()
    assert [rows(plan)[0][1:] for plan in engine.plans] == [(0, 4), (4, 4), (8, 1)]
    assert [len(plan.encodes) for plan in engine.plans] == [1, 0, 0]
    assert not engine.store.stats.gpu.entries  # nothing is kept beyond its use in a budget of 0


def test_equal_prefixes_with_different_images_share_exactly_what_is_before_the_image() -> None:
    engine = Engine()
    prompt = [*TEXT[:6], IMAGE_ID, *TEXT]
    for name, content in (("cat", 1), ("dog", 2), ("cat again", 1)):
        engine.add(question(name, prompt, (image(content, 6, 2, 3),), max_tokens=1))
        engine.run()
    assert [engine.cached(name) for name in ("cat", "dog", "cat again")] == [0, 6, 31]
    assert len(engine.device.encoded) == 2


def test_an_image_inside_the_cached_prefix_is_not_encoded_again() -> None:
    engine = Engine(feature_bytes=0)
    for name in "ab":
        engine.add(question(name, [IMAGE_ID, *TEXT], (image(1, 0),), max_tokens=1))
        engine.run()
    assert engine.cached("b") == 23
    assert len(engine.device.encoded) == 1


def test_the_same_image_behind_different_text_is_encoded_once() -> None:
    engine = Engine()
    engine.add(question("a", [2, 3, IMAGE_ID, 4], (image(1, 2),), max_tokens=1))
    engine.add(question("b", [5, IMAGE_ID, 4], (image(1, 1),), max_tokens=1))
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.encodes, stats.features.misses, stats.features.hits) == (1, 1, 1)
    assert stats.visual_tokens == 8


def test_a_step_encodes_no_more_patches_than_it_may_but_always_one_view() -> None:
    engine = Engine(limits=small_limits(max_encode_patches=40))
    images = tuple(image(name, name, 2, 3) for name in range(3))  # 24 patches each
    engine.add(question("a", [IMAGE_ID] * 3, images, max_tokens=1))
    engine.add(question("huge", [IMAGE_ID], (image(7, 0, 4, 4),), max_tokens=1))  # 64 patches
    engine.run()
    assert [len(plan.encodes) for plan in engine.plans] == [1, 1, 1, 1]
    assert engine.finish("huge")


# Several sequences


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [18, 20])
def test_sequences_share_the_prompt_and_copy_before_write(
    prefix_caching: bool, overlap: bool, length: int
) -> None:
    engine = Engine(prefix_caching=prefix_caching, overlap=overlap)
    request = question("a", TEXT[:length], max_tokens=5, n=3, **ENDLESS)
    engine.add(request)
    engine.run()
    computed = sum(row.num_tokens for plan in engine.plans for row in plan.scheduled)
    assert computed == length + 2 + 3 * 4  # the prompt once, its last token again for each other choice
    assert sum(len(plan.block_copies) for plan in engine.plans) == 2
    for index in range(3):
        assert engine.tokens("a", index) == answer_alone(request, index, engine.limits)
    assert len({tuple(engine.tokens("a", index)) for index in range(3)}) == 3


def test_sequences_without_slots_wait_and_start_later() -> None:
    engine = Engine(prefix_caching=False, limits=small_limits(max_num_seqs=1))
    request = question("a", TEXT, max_tokens=3, n=3, **ENDLESS)
    engine.add(request)
    engine.add(question("b", TEXT, max_tokens=3))
    engine.run()
    for index in range(3):
        assert engine.tokens("a", index) == answer_alone(request, index, engine.limits)


def test_cached_tokens_are_reported_once_per_request() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(question(name, TEXT, max_tokens=2, n=2, **ENDLESS))
        engine.run()
    assert [delta.cached_tokens for delta in engine.deltas["b"]] == [19, 0, 0, 0]


def test_seeds_come_from_the_request_or_else_from_root_and_id() -> None:
    named, other = question("a", TEXT, seed=7).sampling, question("a", TEXT).sampling
    assert derive_seed(named, 0, "a", 0) == derive_seed(named, 1, "b", 0)
    assert (
        len({derive_seed(other, root, name, index) for root in (0, 1) for name in "ab" for index in (0, 1)})
        == 8
    )
    assert derive_seed(named, 0, "a", 0) != derive_seed(named, 0, "a", 1)
    assert 0 <= derive_seed(other, 0, "a", 0) < 2**63


# Giving way


def tight(overlap: bool, prefix_caching: bool = False) -> Engine:
    """Two streams whose prompts fit together, and whose answers do not."""
    engine = Engine(overlap=overlap, prefix_caching=prefix_caching, blocks=9)
    engine.add(question("a", TEXT[:10], max_tokens=14, **ENDLESS))
    engine.add(question("b", TEXT[5:15], max_tokens=14, **ENDLESS))
    return engine


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_latest_is_preempted_and_resumes_where_it_was(overlap: bool, prefix_caching: bool) -> None:
    engine = tight(overlap, prefix_caching)
    engine.run()
    assert engine.scheduler.stats().preemptions >= 1
    entered = [enter for plan in engine.plans for enter in plan.new_slots]
    assert [len(enter.output) for enter in entered[:2]] == [0, 0]
    assert len(entered) >= 3
    again = entered[2]
    assert again.prompt == tuple(TEXT[5:15])  # b, the latest
    assert list(again.output) == engine.tokens("b")[: len(again.output)] != []
    for name, part in (("a", TEXT[:10]), ("b", TEXT[5:15])):
        request = question(name, part, max_tokens=14, **ENDLESS)
        assert engine.tokens(name) == answer_alone(request, 0, engine.limits)


def test_a_preempted_sequence_is_before_all_new_arrivals() -> None:
    engine = tight(overlap=False)
    engine.add(question("c", TEXT, max_tokens=2, **ENDLESS))
    engine.run()
    entered = [enter.prompt for plan in engine.plans for enter in plan.new_slots]
    assert entered.index(tuple(TEXT)) > 2


def test_a_pending_token_of_a_preempted_sequence_is_neither_lost_nor_doubled() -> None:
    engine = tight(overlap=True)
    engine.run(until=lambda: engine.scheduler.stats().preemptions > 0)
    before = len(engine.tokens("b"))
    engine.step()
    assert len(engine.tokens("b")) == before  # the step applied last already brought it
    engine.run()
    request = question("b", TEXT[5:15], max_tokens=14, **ENDLESS)
    assert engine.tokens("b") == answer_alone(request, 0, engine.limits)


def test_features_of_a_preempted_sequence_are_unpinned() -> None:
    engine = Engine(feature_bytes=0, blocks=8, prefix_caching=False, limits=small_limits(max_step_tokens=5))
    engine.add(question("a", TEXT[:7], max_tokens=20, **ENDLESS))
    engine.add(question("b", [2, IMAGE_ID], (image(1, 1, 3, 4),), max_tokens=12, **ENDLESS))
    engine.run()
    assert engine.scheduler.stats().preemptions >= 1
    assert not engine.store.pins


# Cancelling and failing


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_cancelling_at_any_step_frees_everything_at_once(overlap: bool, steps: int) -> None:
    engine = Engine(overlap=overlap, limits=small_limits(max_step_tokens=7))
    engine.add(question("a", [*TEXT, IMAGE_ID], (image(1, 20),), max_tokens=9, n=2, **ENDLESS))
    for _ in range(steps):
        engine.step()
    engine.cancel("a")
    assert engine.pool.used == 0
    assert not engine.store.pins
    assert {delta.index: delta.finish for delta in engine.deltas["a"]} == {0: "cancelled", 1: "cancelled"}
    told = len(engine.deltas["a"])
    engine.run()
    assert len(engine.deltas["a"]) == told  # a result that comes later is no one's news
    assert engine.scheduler.cancel("a") == []


def test_a_cancelled_name_can_be_used_again_while_its_last_step_is_in_flight() -> None:
    engine = Engine(overlap=True)
    engine.add(question("a", TEXT, max_tokens=9, **ENDLESS))
    engine.step()
    engine.step()
    engine.cancel("a")
    request = question("a", TEXT[3:], max_tokens=3, **ENDLESS)
    engine.add(request)
    engine.run()
    assert engine.tokens("a") == answer_alone(request, 0, engine.limits)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_ends_its_requests_with_an_error_and_no_others(overlap: bool) -> None:
    engine = Engine(overlap=overlap, limits=small_limits(max_num_seqs=1))
    engine.add(question("a", TEXT, max_tokens=9, **ENDLESS))
    request = question("b", TEXT, max_tokens=9, **ENDLESS)
    engine.add(request)
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.take(engine.scheduler.fail(plan, "no memory"))
    assert [(delta.finish, delta.error) for delta in engine.deltas["a"]] == [("error", "no memory")]
    assert engine.pool.used == 0
    engine.run()
    assert engine.tokens("b") == answer_alone(request, 0, engine.limits)


def test_a_sequence_with_a_pending_token_does_not_start() -> None:
    engine = Engine()
    engine.add(question("a", TEXT))
    (sequence,) = engine.scheduler._requests["a"].sequences
    can_start = engine.scheduler._planner._can_start
    assert can_start(sequence)
    sequence.pending = 1
    assert not can_start(sequence)


# Totals


def test_stats_tell_where_blocks_and_tokens_are() -> None:
    engine = Engine(blocks=10)
    engine.add(question("a", TEXT[:9], max_tokens=3, **ENDLESS))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_free) == (3, 0, 7)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_free) == (0, 2, 8)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (9, 3, 3)


def test_check_notices_a_block_that_was_lost() -> None:
    engine = Engine()
    engine.add(question("a", TEXT))
    engine.step()
    engine.pool.allocate()
    with pytest.raises(RuntimeError, match="held by sequences"):
        engine.scheduler.check()


def test_a_position_is_itself_however_far() -> None:
    for position in (0, 1, (1 << 16) - 1, 1 << 16, 1 << 20):
        assert text_position(position).tolist() == [[position]] * 3
