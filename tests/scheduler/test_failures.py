"""A view that cannot be made ends who needs it, and no one else; the rest of its step goes on."""

from typing import Any

import pytest

from saccade.errors import ENGINE_ERRORS, EncodingFailed
from saccade.request import Request
from saccade.step_plan import EncodeTask
from tests.scheduler.simulated_device import IMAGE_ID, Engine, answer_alone, image, question, small_limits
from tests.scheduler.test_encoder_scheduler import look, streaming
from tests.scheduler.test_properties import crowd, verify

ENDLESS: dict[str, Any] = {"stop_token_ids": ()}


def cursed(*names: int) -> Any:
    return lambda encode: int(encode.pixels.flat[0]) in names


def told(engine: Engine, name: str) -> tuple[str | None, str]:
    last = engine.deltas[name][-1]
    return last.code, last.error or ""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_view_ends_only_requests_that_need_it_and_the_error_names_it(overlap: bool) -> None:
    engine = Engine(overlap=overlap, limits=small_limits(max_num_seqs=8, max_step_tokens=64))
    engine.device.fails = cursed(2)
    text = question("text", [3, 4, 5], max_tokens=9, **ENDLESS)
    engine.add(text)
    engine.step()
    good = question("good", [IMAGE_ID, 3], (image(1, 0),), max_tokens=3, **ENDLESS)
    both = (image(1, 0), image(2, 2, 2, 3))
    bad = question("bad", [IMAGE_ID, 4, IMAGE_ID, 3], both, n=2, max_tokens=3, **ENDLESS)
    for request in (good, bad):
        engine.add(request)
    before = len(engine.tokens("text"))
    plan = engine.step()
    assert plan is not None
    assert len(plan.scheduled) == 2  # the step was not lost to the others
    code, error = told(engine, "bad")
    assert ENGINE_ERRORS[code] is EncodingFailed
    assert error == (
        "image 2 of this request (3x2 pixels) could not be encoded: bad luck; try again, or send it smaller"
    )
    assert [engine.finish("bad", index) for index in (0, 1)] == ["error", "error"]
    engine.run()
    assert len(engine.tokens("text")) > before
    for request in (text, good):
        assert engine.tokens(request.id) == answer_alone(request, 0, engine.limits)
    stats = engine.scheduler.stats()
    assert (stats.encodes, stats.encode_failures) == (1, 1)
    engine.device.fails = cursed()
    again = question("again", [IMAGE_ID, 4, IMAGE_ID, 3], both, max_tokens=3, **ENDLESS)
    engine.add(again)
    engine.run()
    assert engine.tokens("again") == answer_alone(again, 0, engine.limits)


def test_a_waiting_request_tries_the_failed_view_again() -> None:
    engine = Engine(limits=small_limits(max_num_seqs=1))
    tries: list[bytes] = []

    def once(encode: EncodeTask) -> bool:
        tries.append(encode.key)
        return len(tries) == 1

    engine.device.fails = once
    first, second = look("first", 1), look("second", 1)
    engine.add(first)
    engine.add(second)
    engine.run()
    assert engine.finish("first") == "error"
    assert engine.tokens("second") == answer_alone(second, 0, engine.limits)
    assert len(tries) == 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("prompt", [(), (5, 6)], ids=["waits in the queue", "waits on a row"])
def test_a_failed_slice_ends_the_request_that_needs_it(
    prompt: tuple[int, ...], overlap: bool, failing: int
) -> None:
    """Else it would ask for it for ever."""
    engine = streaming(overlap=overlap)
    slices = iter([False] * failing + [True])
    engine.device.fails = lambda encode: next(slices, False)
    engine.add(look("first", 1, prompt=prompt))
    engine.run(until=lambda: engine.finish("first") is not None)
    assert engine.finish("first") == "error"
    assert not engine.unfinished.keys
    assert not engine.unfinished.finishing
    before = len(engine.tokens("stream"))
    second = look("second", 1, prompt=(7,))
    engine.add(second)
    engine.run(until=lambda: engine.finish("second") is not None)
    assert engine.tokens("second") == answer_alone(second, 0, engine.limits)
    assert len(engine.tokens("stream")) > before


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_crowd_on_a_device_that_often_fails_gets_what_each_would_get_alone(
    overlap: bool, prefix_caching: bool
) -> None:
    failures = errors = answered = empty = 0
    for seed in range(24):
        accepted: dict[str, Request]
        engine, accepted = crowd(
            seed, overlap=overlap, prefix_caching=prefix_caching, pools=seed % 4 == 3, luck=0.7
        )
        verify(engine, accepted)
        failures += engine.scheduler.stats().encode_failures
        ends = [engine.finish(name) for name in accepted]
        errors += ends.count("error")
        answered += ends.count("stop") + ends.count("length")
        empty += sum(not plan.scheduled for plan in engine.plans)
    assert failures > 50
    assert errors > 50
    assert answered > 300
    assert empty > 10
