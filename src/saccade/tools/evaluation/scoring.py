"""Outcomes of questions, and accuracy with intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Z_95 = 1.959963984540054  # standard normal, two-sided 95%

# Tasks that fail for similar reasons; each group is one line of the plot.
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
    """One question answered at one level of detail."""

    task: str
    index: int
    limit: int | None  # visual tokens allowed; None: full detail
    size: tuple[int, int]  # width, height of the image in the request
    visual_tokens: int
    text: str
    token_ids: tuple[int, ...]  # without the end token
    finish: str | None
    right: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """Accuracy of one task, one group, or all tasks."""

    name: str
    questions: int
    right: int
    accuracy: float  # 0 to 1
    low: float  # 95% Wilson interval
    high: float
    mean_visual_tokens: float


def wilson(right: int, questions: int) -> tuple[float, float]:
    """95% interval of a share; unlike the normal approximation it stays within 0..1 and is never empty."""
    if not 0 <= right <= questions or questions < 1:
        raise ValueError(f"{right} of {questions} is no share")
    share, square = right / questions, Z_95 * Z_95
    centre = share + square / (2 * questions)
    half = Z_95 * math.sqrt(share * (1 - share) / questions + square / (4 * questions * questions))
    scale = 1 + square / questions
    low = 0.0 if right == 0 else (centre - half) / scale  # exact, without a rounding error
    high = 1.0 if right == questions else (centre + half) / scale
    return low, high


def tally(name: str, outcomes: Sequence[Outcome]) -> Tally:
    right = sum(outcome.right for outcome in outcomes)
    low, high = wilson(right, len(outcomes))
    mean = sum(outcome.visual_tokens for outcome in outcomes) / len(outcomes)
    return Tally(name, len(outcomes), right, right / len(outcomes), low, high, mean)


def by_task(outcomes: Iterable[Outcome]) -> list[Tally]:
    """One tally per task, in order of first appearance."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.task, []).append(outcome)
    return [tally(task, some) for task, some in found.items()]


def by_group(outcomes: Iterable[Outcome]) -> list[Tally]:
    """One tally per group, in the groups' order; a task of no group forms its own."""
    group_of = {task: group for group, tasks in GROUPS.items() for task in tasks}
    grouped = by_task(replace(one, task=group_of.get(one.task, one.task)) for one in outcomes)
    order = [*GROUPS, *(one.name for one in grouped)]
    return sorted(grouped, key=lambda one: order.index(one.name))


def at_level(outcomes: Iterable[Outcome], limit: int | None) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.limit == limit]
