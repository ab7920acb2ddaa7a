"""What the engine tells of a request's time: queue, images, first token, giving way."""

from typing import Any

import pytest

from saccade.request import EngineTimes
from tests.scheduler.simulated_device import (
    COSTS,
    IMAGE_ID,
    STEP_SECONDS,
    Engine,
    image,
    question,
    small_limits,
    zooming,
)

TEXT = list(range(2, 9)) * 3
ENDLESS: dict[str, Any] = {"stop_token_ids": ()}


def told(engine: Engine, name: str) -> list[EngineTimes | None]:
    return [delta.times for delta in engine.deltas[name]]


@pytest.mark.parametrize("overlap", [False, True])
def test_times_come_with_the_first_token_and_the_end_alone(overlap: bool) -> None:
    engine = Engine(overlap=overlap)
    engine.now = 5.0
    engine.add(question("a", TEXT, max_tokens=4, **ENDLESS))
    engine.run()
    first, *between, last = told(engine, "a")
    assert first is not None
    assert last is not None
    assert between == [None, None]
    assert (first.queued, first.started, first.encode, first.preempted) == (5.0, 5.0, 0.0, 0)
    assert first.first == last.first == pytest.approx(5.0 + (1 + overlap) * STEP_SECONDS)


def test_waiting_for_a_slot_is_queueing() -> None:
    engine = Engine(limits=small_limits(max_num_seqs=1))
    engine.add(question("a", TEXT, max_tokens=3, **ENDLESS))
    engine.add(question("b", TEXT, max_tokens=1))
    engine.run()
    (times,) = told(engine, "b")
    assert times is not None
    assert times.queued == 0.0
    assert times.started == pytest.approx(3 * STEP_SECONDS)


def test_encoding_time_is_charged_to_the_requests_that_needed_the_view() -> None:
    engine = Engine()
    engine.add(question("seen", [IMAGE_ID, *TEXT], (image(1, 0),), max_tokens=1))
    engine.add(question("text", TEXT[:5], max_tokens=1))
    engine.run()
    engine.add(question("again", [IMAGE_ID, *TEXT[::-1]], (image(1, 0),), max_tokens=1))
    engine.run()
    charged = {name: times.encode for name in engine.deltas for times in told(engine, name) if times}
    expected = (COSTS.encoding + COSTS.patch * 16 + COSTS.patch_pair * 256) / 1e3
    assert charged["seen"] == pytest.approx(expected)  # the step took what was predicted
    assert charged["text"] == charged["again"] == 0.0


def test_a_view_in_a_step_without_a_token_is_charged_as_predicted() -> None:
    engine = Engine(limits=small_limits(max_step_tokens=8))
    engine.add(question("a", [IMAGE_ID, *TEXT], (image(1, 0),), max_tokens=1))
    engine.run()
    (times,) = told(engine, "a")
    expected = (COSTS.encoding + COSTS.patch * 16 + COSTS.patch_pair * 256) / 1e3
    assert times is not None
    assert times.encode == pytest.approx(expected)


def test_preemptions_are_counted() -> None:
    engine = Engine(blocks=12, prefix_caching=False)
    for name in "ab":
        engine.add(question(name, TEXT[:12], max_tokens=20, **ENDLESS))
    engine.run()
    ends = {name: times for name in "ab" if (times := told(engine, name)[-1])}
    assert ends["a"].preempted == 0
    assert ends["b"].preempted == engine.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_look_time_is_what_precedes_the_choice_of_views(overlap: bool) -> None:
    """Its own clock: the image's encoding is told apart, and what follows the choice is not looking."""
    engine = Engine(overlap=overlap)
    shown, asked = (image(1, 0, 2, 3),), [IMAGE_ID, 2, 4, 5]
    engine.add(question("a", [*asked, 8], shown, max_tokens=1, zooming=zooming(len(asked), (0,), 6, shown)))
    engine.add(question("b", TEXT, max_tokens=1))
    engine.run()
    (seen,), (text,) = told(engine, "a"), told(engine, "b")
    assert seen is not None
    assert text is not None
    spent = seen.first - seen.started
    assert 0 < seen.look < spent
    assert seen.look + seen.encode < spent
    assert text.look == 0.0


def test_what_a_step_took_is_learnt_when_there_is_time_or_with_the_next_step() -> None:
    """Who waits for a token does not wait for that."""
    engine = Engine()
    learnt = engine.scheduler._cost
    engine.add(question("a", TEXT, max_tokens=3, **ENDLESS))
    engine.step()
    assert learnt.observations == 0
    engine.scheduler.update_cost_model()
    assert learnt.observations == 1
    engine.scheduler.update_cost_model()
    assert learnt.observations == 1
    engine.step()
    engine.step()
    assert learnt.observations == 2
