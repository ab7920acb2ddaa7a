"""Adding up: shares, intervals, groups."""

import math

import pytest

from saccade.tools.evaluation import question_set
from saccade.tools.evaluation.report import (
    GROUPS,
    Outcome,
    at_level,
    by_group,
    by_task,
    tally,
    wilson,
)


def outcome(
    task: str, right: bool, *, tokens: int = 10, limit: int | None = None, ids: tuple[int, ...] = (1, 2)
) -> Outcome:
    return Outcome(task, 0, limit, (32, 32), tokens, "text", ids, "stop", right)


@pytest.mark.parametrize(
    ("right", "questions", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (190, 200, 0.9104, 0.9726)],
)
def test_wilson_gives_the_published_intervals(right: int, questions: int, low: float, high: float) -> None:
    found = wilson(right, questions)
    assert found == pytest.approx((low, high), abs=5e-5)


def test_wilson_holds_the_share_stays_in_range_and_narrows_with_more_questions() -> None:
    for questions in (1, 3, 17, 200):
        for right in range(questions + 1):
            low, high = wilson(right, questions)
            assert 0 <= low <= right / questions <= high <= 1
            assert low < high
    assert math.dist(wilson(90, 100), (0.9, 0.9)) < math.dist(wilson(9, 10), (0.9, 0.9))


@pytest.mark.parametrize(("right", "questions"), [(1, 0), (-1, 5), (6, 5), (0, 0)])
def test_wilson_refuses_what_is_no_share(right: int, questions: int) -> None:
    with pytest.raises(ValueError, match="no share"):
        wilson(right, questions)


def test_tallies_count_each_task_alone_and_keep_the_order_asked() -> None:
    outcomes = [
        outcome("word", True, tokens=100),
        outcome("word", False, tokens=300),
        outcome("colour", True, tokens=50),
    ]
    word, colour = by_task(outcomes)
    assert (word.name, word.questions, word.right, word.accuracy) == ("word", 2, 1, 0.5)
    assert word.mean_visual_tokens == 200
    assert (colour.name, colour.accuracy) == ("colour", 1.0)
    every = tally("overall", outcomes)
    assert (every.questions, every.right, every.mean_visual_tokens) == (3, 2, 150)


def test_overall_weighs_questions_and_not_tasks() -> None:
    outcomes = [outcome("word", True)] * 3 + [outcome("colour", False)]
    assert tally("overall", outcomes).accuracy == 0.75


def test_outcomes_are_selected_by_level() -> None:
    outcomes = [outcome("word", True), outcome("word", False, limit=64)]
    assert [one.right for one in at_level(outcomes, None)] == [True]
    assert [one.right for one in at_level(outcomes, 64)] == [False]


def test_every_task_of_the_set_stands_in_exactly_one_group() -> None:
    grouped = [task for tasks in GROUPS.values() for task in tasks]
    assert sorted(grouped) == sorted(question_set.TASKS)


def test_groups_add_up_their_tasks_and_unknown_tasks_are_not_lost() -> None:
    outcomes = [outcome("word", True), outcome("code", False), outcome("juggling", True)]
    assert [(one.name, one.right, one.questions) for one in by_group(outcomes)] == [
        ("reading", 1, 2),
        ("juggling", 1, 1),
    ]
