"""A request goes on with the views chosen before, ahead of its look: nobody gets another answer for it."""

from typing import Any

import pytest

from saccade.encoder.prompt_layout import crop_view
from saccade.lod.types import Choice, LodParams, Region, ViewRule
from saccade.request import Request
from saccade.scheduler.lod_choice import Looking
from saccade.scheduler.policy import Brief
from saccade.scheduler.recall import DIFFERENT, MEMORY, MOST, Recall
from saccade.scheduler.step_builder import guesses
from saccade.step_plan import StepPlan
from tests.encoder.cache.test_store import SlowDisk
from tests.scheduler.simulated_device import (
    IMAGE_ID,
    STEP_SECONDS,
    Engine,
    answer_alone,
    picture,
    question,
    small_limits,
    zooming,
)

ENDLESS: dict[str, Any] = {"stop_token_ids": (), "min_tokens": 0}
LEFT = Region((0, 0, 1, 1), (1, 2), 1.0)
RIGHT = Region((2, 0, 3, 1), (1, 2), 1.0)
LARGE = Region((0, 0, 3, 2), (2, 3), 1.0)
WAYS = pytest.mark.parametrize(("overlap", "hears"), [(False, False), (True, True), (True, False)])


class Chooser:
    """Chooses what it is told to, whatever is seen."""

    def __init__(self, *regions: Region) -> None:
        self.regions = regions
        self.sense = True

    def __call__(self, pictures: Any, budget: int, params: LodParams, rule: ViewRule) -> tuple[Choice, ...]:
        if not self.sense:
            raise ValueError("strength of a look is nan")
        return tuple(Choice(regions=self.regions, relevance=one.look.lost) for one in pictures)


def ask(name: str, text: list[int], tail: int = 2, tokens: int = 8, **options: Any) -> Request:
    pictures = (picture(1, 0, 2, 3),)
    prompt = [IMAGE_ID, 2, *text]
    zoom = zooming(len(prompt), (0,), tokens, pictures, only_look=options.pop("only_look", False))
    return question(name, [*prompt, *[8] * tail], pictures, zooming=zoom, **{**ENDLESS, **options})


def asked_before(*last: Region, luck: float | None = 1.0, **changes: Any) -> tuple[Engine, Chooser]:
    """An engine that was asked about the picture, and chose these views; by default it guesses."""
    chooser = Chooser(*last)
    limits = changes.pop("limits", small_limits(max_step_tokens=64))
    engine = Engine(chooser=chooser, luck=luck, limits=limits, **changes)
    engine.add(ask("before", [4, 5, 6], max_tokens=1))
    engine.run()
    return engine, chooser


def guess_of(engine: Engine) -> StepPlan:
    """The step with a guess that comes next."""
    plan = engine.step()
    assert plan is not None
    assert plan.guessed
    return plan


def answered(engine: Engine, request: Request) -> None:
    assert engine.tokens(request.id) == answer_alone(
        request, 0, engine.limits, engine.pool.roles, engine.chooser
    )
    assert engine.scheduler.idle
    assert engine.pool.used == 0
    assert not engine.store.pins


def counted(engine: Engine) -> tuple[int, int]:
    stats = engine.scheduler.stats()
    return stats.guesses, stats.right_guesses


@WAYS
def test_a_right_guess_takes_one_pass(overlap: bool, hears: bool) -> None:
    engine, _ = asked_before(LEFT, overlap=overlap, hears=hears)
    request = ask("a", [6, 6, 6, 6])
    engine.add(request)
    (row,) = guess_of(engine).rows
    assert guesses(row)
    # The question's last tokens, a mark, two tokens of the view, the turn's end
    assert row.count == row.asks + 1 + 2 + 2
    assert row.start + row.asks == 6 + 1 + 4
    engine.run()
    assert counted(engine) == (1, 1)
    assert sum(one.count for plan in engine.plans for one in plan.rows if one.sequence == row.sequence) == (
        row.count + 3
    )
    assert [delta.zoomed.regions for delta in engine.deltas["a"] if delta.zoomed] == [((LEFT,),)]
    answered(engine, request)


@pytest.mark.parametrize("hears", [True, False])
def test_a_right_guess_that_was_heard_loses_no_step(hears: bool) -> None:
    engine, _ = asked_before(LEFT, overlap=True, hears=hears)
    engine.add(ask("a", [6, 6, 6, 6]))
    guess_of(engine)
    plan = engine.step()
    assert (plan is not None) == hears, "its next token is computed at once, or waits for the look"


@WAYS
@pytest.mark.parametrize(
    ("last", "real", "same"),
    [
        ((LEFT,), (RIGHT,), 1),  # the mark before a view
        ((LEFT,), (LEFT, RIGHT), 3),
        ((LEFT, RIGHT), (LEFT,), 3),
        ((LEFT,), (LARGE,), 1),
        ((LARGE,), (RIGHT,), 1),
        ((LEFT,), (), 0),
        ((), (LEFT,), 0),
        ((LEFT, RIGHT), (LEFT, LARGE), 4),
        ((LEFT, RIGHT), (RIGHT, LEFT), 1),
    ],
)
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_wrong_guess_is_taken_back(
    overlap: bool, hears: bool, last: Any, real: Any, same: int, tail: int, prefix_caching: bool
) -> None:
    """Up to the first view that is another one."""
    engine, chooser = asked_before(*last, overlap=overlap, hears=hears, prefix_caching=prefix_caching)
    chooser.regions = real
    request = ask("a", [6, 6, 6, 6], tail)
    engine.add(request)
    (row,) = guess_of(engine).rows
    engine.run()
    assert counted(engine) == (1, 0)
    assert engine.device.looked == 2, "it looked again"
    mine = [one for plan in engine.plans for one in plan.rows if one.sequence == row.sequence]
    end = row.start + row.asks
    again = not tail and real == last[: len(real)]  # its end is computed again, to sample
    assert mine[1].start == end + same - again
    assert [delta.zoomed.regions for delta in engine.deltas["a"] if delta.zoomed] == [(real,)]
    answered(engine, request)
    # Whoever asks the same again finds what was computed from the right views, and nothing else.
    for name in ("b", "c"):
        request = ask(name, [6, 6, 6, 6], tail, max_tokens=6)
        engine.add(request)
        engine.run()
        answered(engine, request)


@WAYS
def test_a_guess_of_no_views_goes_on_as_a_prompt(overlap: bool, hears: bool) -> None:
    for tail in (0, 2):
        engine, _ = asked_before(
            overlap=overlap, hears=hears, limits=small_limits(brief=Brief(8, 0.5), max_step_tokens=64)
        )
        request = ask("a", [6, 6, 6, 6], tail)
        engine.add(request)
        plan = guess_of(engine)
        assert not plan.brief
        assert plan.rows[0].count == plan.rows[0].asks + tail
        engine.run()
        assert counted(engine) == (1, 1)
        answered(engine, request)


def test_blocks_for_more_views_than_guessed_stay_until_the_look() -> None:
    engine, chooser = asked_before(overlap=True, prefix_caching=False)
    most, real = -(-(6 + 1 + 4 + 8 + 2 + 2) // 4), -(-(6 + 1 + 4 + 2) // 4)
    engine.add(ask("a", [6, 6, 6, 6]))
    guess_of(engine)
    assert engine.pool.used == most
    engine.step()
    assert engine.pool.used == real, "what was claimed for more is given back"
    engine.run()
    chooser.regions = (LARGE,)
    engine.add(ask("b", [6, 6, 5, 5]))
    guess_of(engine)
    assert engine.pool.used == most
    engine.run()
    answered(engine, ask("b", [6, 6, 5, 5]))


@pytest.mark.parametrize("real", [(LEFT,), (RIGHT,), ()])
@pytest.mark.parametrize("slots", [0, 16])
def test_a_request_gives_way_between_its_guess_and_the_look(real: Any, slots: int) -> None:
    engine, chooser = asked_before(LEFT, overlap=True, hears=False, slots=slots)
    chooser.regions = real
    request = ask("a", [6, 6, 6, 6])
    engine.add(request)
    guess_of(engine)
    group = engine.scheduler._groups["a"]
    engine.scheduler._give_way(group.choices[0])
    engine.scheduler.check()
    assert group.undecided
    assert not group.choices[0].pending
    engine.run()
    assert counted(engine) == (1, 0), "a guess taken back is not made again"
    assert engine.scheduler.stats().looks == 2
    answered(engine, request)


@pytest.mark.parametrize("real", [LEFT, RIGHT])
def test_a_request_gives_way_once_its_guess_was_heard(real: Region) -> None:
    engine, chooser = asked_before(LEFT, overlap=True)
    chooser.regions = (real,)
    request = ask("a", [6, 6, 6, 6])
    engine.add(request)
    guess_of(engine)
    engine.hear()
    engine.hears = False
    engine.scheduler._give_way(engine.scheduler._groups["a"].choices[0])
    engine.scheduler.check()
    engine.run()
    answered(engine, request)


@WAYS
def test_a_guess_that_ends_early_leaves_nothing(overlap: bool, hears: bool) -> None:
    for real in (LEFT, RIGHT):
        engine, chooser = asked_before(LEFT, overlap=overlap, hears=hears)
        chooser.regions = (real,)
        engine.add(ask("a", [6, 6, 6, 6]))
        guess_of(engine)
        engine.cancel("a")
        engine.run()
        assert engine.finish("a") == "cancelled"
        assert engine.pool.used == 0
        assert not engine.store.pins


@pytest.mark.parametrize("heard", [True, False])
def test_a_step_with_a_guess_fails(heard: bool) -> None:
    for real in (LEFT, RIGHT):
        engine, chooser = asked_before(LEFT, overlap=True)
        chooser.regions = (real,)
        engine.add(ask("a", [6, 6, 6, 6]))
        guess_of(engine)
        if heard:
            engine.hear()
        engine.fail()
        engine.run()
        assert engine.finish("a") == "error"
        assert engine.pool.used == 0
        assert not engine.store.pins


@WAYS
def test_a_look_that_makes_no_sense_ends_a_guess(overlap: bool, hears: bool) -> None:
    engine, chooser = asked_before(LEFT, overlap=overlap, hears=hears)
    chooser.sense = False
    engine.add(ask("a", [6, 6, 6, 6]))
    guess_of(engine)
    engine.run()
    assert engine.finish("a") == "error"
    assert not engine.tokens("a")
    assert engine.pool.used == 0


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("real", [LEFT, RIGHT])
def test_numbers_that_are_none_behind_a_wrong_guess_harm_nobody(heard: bool, real: Region) -> None:
    engine, chooser = asked_before(LEFT, overlap=True, hears=heard)
    chooser.regions = (real,)
    request = ask("a", [6, 6, 6, 6])
    engine.add(request)
    plan = guess_of(engine)
    _, result = engine.in_flight[-1]
    spoiled = type(result)(plan.number, result.tokens, result.logprobs, unsound=(0,), looks=result.looks)
    engine.in_flight[-1] = plan, spoiled
    engine.run()
    if real is LEFT:
        assert engine.finish("a") == "error"
    else:
        answered(engine, request)


def test_a_view_of_another_fails_beside_a_guess() -> None:
    engine, _ = asked_before(LEFT, overlap=True)
    engine.device.fails = lambda encode: True
    engine.add(ask("a", [6, 6, 6, 6]))
    other = picture(2, 0)
    engine.add(question("b", [IMAGE_ID, 4], (other,)))
    engine.run()
    assert engine.finish("b") == "error"
    assert counted(engine) == (1, 1)
    answered(engine, ask("a", [6, 6, 6, 6]))


def test_only_one_choice_that_is_to_be_answered_is_guessed_for() -> None:
    engine, _ = asked_before(LEFT)
    engine.add(ask("many", [6, 6, 6, 6], n=2, seed=1))
    engine.run()
    engine.add(ask("look", [6, 6, 5, 5], only_look=True))
    engine.run()
    assert engine.finish("look") == "stop"
    assert counted(engine) == (0, 0)
    for index in range(2):
        alone = answer_alone(
            ask("many", [6, 6, 6, 6], n=2, seed=1), index, engine.limits, chooser=engine.chooser
        )
        assert engine.tokens("many", index) == alone


def test_another_wish_is_another_matter() -> None:
    engine, _ = asked_before(LEFT)
    engine.add(ask("a", [6, 6, 6, 6], tokens=7))
    engine.run()
    assert counted(engine) == (0, 0)
    engine.add(ask("b", [6, 6, 6, 5], tokens=7))
    engine.run()
    assert counted(engine) == (1, 1)


def test_nothing_is_guessed_whose_features_are_gone() -> None:
    engine, _ = asked_before(LEFT, feature_bytes=0)
    request = ask("a", [6, 6, 6, 6])
    engine.add(request)
    engine.run()
    assert counted(engine) == (0, 0)
    answered(engine, request)


def test_views_that_send_each_other_away_are_not_guessed() -> None:
    # On the device and in host memory there is room for one.
    engine, _ = asked_before(LEFT, RIGHT, feature_bytes=20, host_bytes=20)
    whole = picture(1, 0, 2, 3).view
    assert all(engine.store.is_ready(crop_view(whole, region).key) for region in (LEFT, RIGHT))
    request = ask("a", [6, 6, 6, 6])
    engine.add(request)
    engine.run()
    assert counted(engine) == (0, 0)
    answered(engine, request)


def test_a_guess_needs_all_of_its_step() -> None:
    engine, _ = asked_before(LEFT)
    engine.add(question("long", [5] * 58, max_tokens=1, **ENDLESS))
    request = ask("a", [6, 6, 6, 6], tokens=8)
    engine.add(request)
    engine.run()
    assert counted(engine) == (0, 0)
    answered(engine, request)


def test_a_deleted_picture_is_forgotten() -> None:
    engine, _ = asked_before(LEFT, overlap=True)
    content = picture(1, 0).view.content
    engine.add(ask("a", [6, 6, 6, 6]))
    guess_of(engine)
    engine.scheduler.forget(content)
    engine.run()
    answered(engine, ask("a", [6, 6, 6, 6]))
    recall = engine.scheduler._holdings.recall
    assert recall.likeliest(ask("a", [])) is None, "it was decided after the picture was deleted"
    engine.add(ask("b", [6, 6, 6, 5]))
    engine.run()
    assert counted(engine) == (1, 1)
    assert recall.likeliest(ask("b", [])) == ((LEFT,),)


def test_a_picture_deleted_before_its_turn_is_not_guessed_about() -> None:
    engine, _ = asked_before(LEFT)
    engine.add(ask("a", [6, 6, 6, 6]))
    engine.scheduler.forget(picture(1, 0).view.content)
    engine.run()
    assert counted(engine) == (0, 0)
    answered(engine, ask("a", [6, 6, 6, 6]))


def test_who_came_before_a_picture_was_deleted_is_not_guessed_for_by_what_came_after() -> None:
    engine, _ = asked_before(LEFT)
    view = picture(1, 0).view
    engine.add(ask("early", [6, 6, 6, 6]))
    engine.scheduler.forget(view.content)
    # Another one has sent the picture again.
    engine.scheduler._holdings.recall.learn(ask("late", []), ((LEFT,),), ())
    engine.store.put(crop_view(picture(1, 0, 2, 3).view, LEFT).key, 1, 20, view.content)
    engine.run()
    assert counted(engine) == (0, 0)
    answered(engine, ask("early", [6, 6, 6, 6]))


def test_a_picture_deleted_elsewhere_is_forgotten() -> None:
    disk = SlowDisk()
    engine, _ = asked_before(LEFT, disk=disk)
    recall = engine.scheduler._holdings.recall
    assert recall.likeliest(ask("a", []))
    disk.deleted = {picture(1, 0).view.content: engine.now + STEP_SECONDS}
    engine.scheduler.plan()
    assert recall.likeliest(ask("a", [])) is None


def test_guesses_that_do_not_pay_are_not_made() -> None:
    for luck, expected in ((0.0, 0), (0.05, 0), (0.9, 1), (1.0, 1)):
        engine, _ = asked_before(LEFT, RIGHT, luck=luck)
        engine.add(ask("a", [6, 6, 6, 6]))
        engine.run()
        assert counted(engine) == (expected, expected)


def test_luck_is_learnt_whether_guesses_are_made_or_not() -> None:
    engine, chooser = asked_before(LEFT, luck=None)
    recall = engine.scheduler._holdings.recall
    assert recall.luck == 0.5
    numbers = iter(range(1000))
    made: list[tuple[int, int]] = []

    def more(times: int) -> float:
        for number, _ in zip(numbers, range(times), strict=False):
            engine.add(ask(f"r{number}", [2 + number % 7, 2 + number // 7 % 7, 4], max_tokens=1))
            engine.run()
            chooser.regions = chooser.regions if steady else tuple({LEFT, RIGHT} - {*chooser.regions})
        made.append(counted(engine))
        return recall.luck

    steady = True
    assert more(20) > 0.85
    assert made[-1] == (20, 20)
    steady = False
    assert more(120) < 0.1
    stopped = made[-1][0]
    assert stopped < 70
    assert more(20) < 0.1
    assert made[-1][0] == stopped, "guesses were made though they do not pay"
    steady = True
    more(2 * MEMORY)
    assert recall.luck > 0.8
    assert made[-1][0] > stopped


def test_the_choice_made_most_often_is_expected_of_late_and_of_equals_the_last() -> None:
    recall, request = Recall(), ask("a", [])
    expected = []
    for chosen in (LEFT, RIGHT, RIGHT, LARGE, RIGHT, LARGE, LARGE, LARGE):
        recall.learn(request, ((chosen,),), ())
        expected.append(recall.likeliest(request))
    best = (LEFT, RIGHT, RIGHT, RIGHT, RIGHT, RIGHT, LARGE, LARGE)
    assert expected == [((one,),) for one in best]
    for _ in range(100):
        recall.learn(request, ((LARGE,),), ())
    for _ in range(8):
        recall.learn(request, ((LEFT,),), ())
    assert recall.likeliest(request) == ((LEFT,),), "what was chosen long ago counts less and less"


def test_of_many_different_choices_few_are_kept() -> None:
    recall, request = Recall(), ask("a", [])
    views = [Region((0, 0, 1, 1 + number), (1, 2), 1.0) for number in range(3 * DIFFERENT)]
    recall.learn(request, ((LEFT,),), ())
    recall.learn(request, ((LEFT,),), ())
    for view in views:
        recall.learn(request, ((view,),), ())
    (made,) = recall._made.values()
    assert len(made) == DIFFERENT
    assert recall.likeliest(request) == ((views[-1],),)


def test_only_the_last_choices_are_kept() -> None:
    recall = Recall()
    requests = [ask("a", [], tokens=number) for number in range(MOST + 1)]
    for request in requests:
        recall.learn(request, ((LEFT,),), ())
    assert recall.likeliest(requests[0]) is None
    assert recall.likeliest(requests[1]) == ((LEFT,),)
    assert recall.luck == 0.5


def test_how_much_a_view_matters_is_no_part_of_a_guess() -> None:
    engine, chooser = asked_before(LEFT)
    chooser.regions = (Region(LEFT.box, LEFT.grid, 0.25),)
    engine.add(ask("a", [6, 6, 6, 6]))
    engine.run()
    assert counted(engine) == (1, 1)
    assert [delta.zoomed.regions for delta in engine.deltas["a"] if delta.zoomed] == [(chooser.regions,)]


def test_a_guess_counts_as_what_it_became() -> None:
    totals = []
    for luck in (0.0, 1.0):
        for real in (LEFT, RIGHT):
            engine, chooser = asked_before(LEFT, luck=luck)
            chooser.regions = (real,)
            engine.add(ask("a", [6, 6, 6, 6]))
            engine.run()
            stats = engine.scheduler.stats()
            totals.append(
                (
                    stats.prompt_tokens,
                    stats.visual_tokens,
                    stats.full_visual_tokens,
                    stats.prefix_queried_tokens,
                    stats.prefix_hit_tokens,
                    stats.looks,
                    stats.zooms,
                    stats.generated_tokens,
                )
            )
    assert totals[:2] == totals[2:]


def test_looks_are_heard_once() -> None:
    engine, _ = asked_before(LEFT, overlap=True, hears=False)
    engine.add(ask("a", [6, 6, 6, 6]))
    plan = guess_of(engine)
    looks = engine.in_flight[-1][1].looks
    with pytest.raises(RuntimeError, match="0 looks"):
        engine.scheduler.hear(plan, ())
    engine.take(engine.scheduler.hear(plan, looks))
    with pytest.raises(RuntimeError, match="once"):
        engine.scheduler.hear(plan, looks)
    engine.run()
    answered(engine, ask("a", [6, 6, 6, 6]))


@pytest.mark.parametrize("brief", [Brief(), Brief(8, 0.5)])
def test_looks_without_a_guess_may_be_heard_too(brief: Brief) -> None:
    engine, chooser = asked_before(
        LEFT, luck=0.0, overlap=True, limits=small_limits(brief=brief, max_step_tokens=64)
    )
    engine.scheduler.looking = Looking(chooser=chooser)
    engine.add(ask("a", [6, 6, 6, 6]))
    engine.add(ask("look", [6, 6, 5, 5], only_look=True))
    plan = engine.step()
    assert plan is not None
    assert plan.brief == bool(brief.tokens)
    engine.take(engine.scheduler.hear(plan, engine.in_flight[-1][1].looks))
    assert engine.finish("look") is None, "what it computed is not sealed yet"
    assert engine.step() is not None, "the views are computed before the rest of the result is known"
    engine.run()
    assert engine.finish("look") == "stop"
    answered(engine, ask("a", [6, 6, 6, 6]))
