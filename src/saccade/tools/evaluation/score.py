"""Outcomes and what they add up to. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # standard normal, two-sided 95%

# Tasks that fail for alike reasons, as one line of the plot.
GROUPS: dict[str, tuple[str, ...]] = {
    "objects": ("colour", "shape", "size", "position", "count", "relation"),
    "reading": ("word", "code", "number"),
    "documents": ("form", "receipt", "table"),
    "charts": ("bar_chart", "line_chart", "pie_chart"),
    "needle": ("needle",),
    "small print": ("small_print",),
    "statements": ("yes_no", "describe", "absent"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one question at one level of detail."""

    task: str
    index: int
    limit: int | None  # visual tokens allowed; None: full detail
    size: tuple[int, int]  # width, height of the picture as it was asked about
    visual_tokens: int
    text: str
    token_ids: tuple[int, ...]  # the end token not among them
    finish: str | None
    right: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """Accuracy of one task, group, or of everything."""

    name: str
    questions: int
    right: int
    accuracy: float  # 0 to 1
    low: float  # 95% Wilson interval
    high: float
    mean_visual_tokens: float


def wilson(right: int, questions: int) -> tuple[float, float]:
    """95% interval of a share. Unlike the normal one it stays inside 0..1 and is not empty at 0 and 1."""
    if not 0 <= right <= questions or questions < 1:
        raise ValueError(f"{right} of {questions} is no share")
    share, square = right / questions, Z_95 * Z_95
    middle = share + square / (2 * questions)
    reach = Z_95 * math.sqrt(share * (1 - share) / questions + square / (4 * questions * questions))
    scale = 1 + square / questions
    low = 0.0 if right == 0 else (middle - reach) / scale  # exactly, not a rounding error below or above
    high = 1.0 if right == questions else (middle + reach) / scale
    return low, high


def tally(name: str, outcomes: Sequence[Outcome]) -> Tally:
    right = sum(outcome.right for outcome in outcomes)
    low, high = wilson(right, len(outcomes))
    mean = sum(outcome.visual_tokens for outcome in outcomes) / len(outcomes)
    return Tally(name, len(outcomes), right, right / len(outcomes), low, high, mean)


def by_task(outcomes: Iterable[Outcome]) -> list[Tally]:
    """One tally per task, in the order the tasks were asked."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.task, []).append(outcome)
    return [tally(task, some) for task, some in found.items()]


def by_group(outcomes: Sequence[Outcome]) -> list[Tally]:
    """One tally per group that was asked about; a task of no group is one of its own."""
    group_of = {task: group for group, tasks in GROUPS.items() for task in tasks}
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(group_of.get(outcome.task, outcome.task), []).append(outcome)
    ordered = [*(name for name in GROUPS if name in found), *(name for name in found if name not in GROUPS)]
    return [tally(name, found[name]) for name in ordered]


def at_level(outcomes: Iterable[Outcome], limit: int | None) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.limit == limit]
