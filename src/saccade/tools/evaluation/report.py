"""The report of `saccade eval`: a table, and JSON with every answer."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from saccade.tools.environment import RunInfo
from saccade.tools.evaluation.scoring import Outcome, Tally, at_level, by_group, by_task, tally
from saccade.tools.options import EvalOptions
from saccade.tools.report import json_with_questions, output_console, table

TABLE_WIDTH = 120  # when stdout is not a terminal
SCHEMA = 1


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
