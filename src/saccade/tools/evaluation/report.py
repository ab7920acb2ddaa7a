"""Outcomes of questions, accuracy with intervals, and the report of `saccade eval`: a table, and JSON with
every answer."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from saccade.tools.environment import RunInfo
from saccade.tools.options import EvalOptions
from saccade.tools.report import json_with_questions, output_console, table

TABLE_WIDTH = 120  # when stdout is not a terminal
SCHEMA = 1
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


@dataclass(frozen=True)
class EvalReport:
    run: RunInfo
    weights: str  # a fingerprint of the weight files
    options: EvalOptions
    seconds: float
    questions: tuple[dict[str, Any], ...]
    outcomes: tuple[Outcome, ...]  # one per question and level

    @property
    def levels(self) -> list[int | None]:
        """In the options' order, without limits that the checkpoint cannot reach."""
        asked = {outcome.limit for outcome in self.outcomes}
        return [limit for limit in self.options.levels if limit in asked]

    def at(self, limit: int | None) -> list[Outcome]:
        return at_level(self.outcomes, limit)

    def overall(self, limit: int | None) -> Tally:
        return tally("overall", self.at(limit))


def level_name(limit: int | None) -> str:
    return "full" if limit is None else str(limit)


def print_report(report: EvalReport) -> None:
    console = output_console(report.options.json, TABLE_WIDTH)
    if report.options.curve:
        title = f"{report.run.title}: accuracy by visual tokens per image"
        console.print(table(title, *curve_rows(report)))
    else:
        console.print(_task_table(report))


def _task_table(report: EvalReport) -> Table:
    limit = report.levels[0]
    detail = "full detail" if limit is None else f"at most {limit} visual tokens"
    heads = ("task", "questions", "right", "accuracy", "95% interval", "visual tokens")
    tallies = [*by_task(report.at(limit)), report.overall(limit)]
    rows = [
        [one.name, str(one.questions), str(one.right), f"{one.accuracy:.1%}", _interval(one), _tokens(one)]
        for one in tallies
    ]
    return table(f"{report.run.title}, {detail}", heads, rows)


def _interval(one: Tally) -> str:
    return f"{100 * one.low:.1f} - {100 * one.high:.1f}"


def _tokens(one: Tally) -> str:
    return f"{one.mean_visual_tokens:,.0f}"


def curve_rows(report: EvalReport) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: one per task, then all tasks, then the tokens that were spent."""
    levels = report.levels
    heads = ["task", "questions", *(level_name(limit) for limit in levels)]
    tallies = [by_task(report.at(limit)) for limit in levels]
    rows = [
        [same[0].name, str(same[0].questions), *(f"{100 * one.accuracy:.1f}" for one in same)]
        for same in zip(*tallies, strict=True)
    ]
    totals = [report.overall(limit) for limit in levels]
    rows.append(["overall", str(totals[0].questions), *(f"{100 * one.accuracy:.1f}" for one in totals)])
    rows.append(["95% interval", "", *map(_interval, totals)])
    rows.append(["mean visual tokens", "", *map(_tokens, totals)])
    return heads, rows


def as_json(report: EvalReport, **more: object) -> str:
    """`more`: further entries of the head."""
    head = {
        "schema": SCHEMA,
        **asdict(report.run),
        "weights": report.weights,
        "options": asdict(report.options),
        "seconds": round(report.seconds, 3),
        "levels": [_level(report, limit) for limit in report.levels],
        **more,
    }
    return json_with_questions(head, _questions(report), indent=2)


def _level(report: EvalReport, limit: int | None) -> dict[str, Any]:
    outcomes = report.at(limit)
    return {
        "limit": limit,
        "overall": asdict(tally("overall", outcomes)),
        "tasks": [asdict(one) for one in by_task(outcomes)],
        "groups": [asdict(one) for one in by_group(outcomes)],
    }


def _questions(report: EvalReport) -> list[dict[str, Any]]:
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    for outcome in report.outcomes:
        answers.setdefault((outcome.task, outcome.index), {})[level_name(outcome.limit)] = {
            "text": outcome.text,
            "right": outcome.right,
            "visual_tokens": outcome.visual_tokens,
            "size": outcome.size,
            "output_tokens": len(outcome.token_ids),
            "finish": outcome.finish,
        }
    return [{**one, "answers": answers[one["task"], one["index"]]} for one in report.questions]
