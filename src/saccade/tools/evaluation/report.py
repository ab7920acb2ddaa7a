"""The report of `saccade eval`: a table, JSON with every answer, and the resizing curve as a Markdown
page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from saccade.tools.environment import RunInfo
from saccade.tools.evaluation.options import EvalOptions
from saccade.tools.evaluation.question_set import Example
from saccade.tools.evaluation.scoring import (
    Agreement,
    Outcome,
    Pair,
    Tally,
    at_level,
    by_group,
    by_task,
    tally,
    wilson,
)
from saccade.tools.report import (
    LinePlot,
    Plotter,
    Series,
    json_with_questions,
    markdown_table,
    output_console,
    table,
    write_json,
)

TABLE_WIDTH = 120  # when stdout is not a terminal
SCHEMA = 1
ABOUT_CURVE = (
    "Every image of the evaluation set is resized as a whole, never enlarged, until it costs at most the"
    " given number of visual tokens; then the question is asked. A level-of-detail method has to beat it at"
    " equal tokens; full detail bounds it. Images that cost less anyway are not resized, so the last row"
    " gives the tokens that were spent."
)


def question_entry(example: Example) -> dict[str, Any]:
    """A question as it stands in the JSON."""
    names = ("task", "index", "kind", "question", "answer", "accepted")
    return {name: getattr(example, name) for name in names}


@dataclass(frozen=True)
class EvalReport:
    run: RunInfo
    weights: str  # a fingerprint of the weight files
    options: EvalOptions
    seconds: float
    questions: tuple[dict[str, Any], ...]
    outcomes: tuple[Outcome, ...]  # one per question and level
    agreement: Agreement | None = None
    pairs: tuple[Pair, ...] = ()

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
        console.print(table(title, *_curve_rows(report)))
    else:
        console.print(_task_table(report))
    if report.agreement is not None:
        console.print(str(report.agreement))


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


def _curve_rows(report: EvalReport) -> tuple[list[str], list[list[str]]]:
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


def curve_plot(report: EvalReport) -> LinePlot:
    """All tasks with their interval, and a line per group of tasks."""
    levels = report.levels
    totals = [report.overall(limit) for limit in levels]
    groups = zip(*(by_group(report.at(limit)) for limit in levels), strict=True)
    series = [Series(same[0].name, _points(same)) for same in groups]
    band = tuple((one.low, one.high) for one in totals)
    count = f"{totals[0].questions:,} questions per point"
    return LinePlot(
        title="Accuracy against visual tokens, images resized as a whole",
        subtitle=f"{report.run.model}, {count}; band: 95% interval of overall",
        x_label="visual tokens per image, at most (log scale; full: no limit)",
        y_label="right answers",
        steps=tuple(level_name(limit) for limit in levels),
        series=(Series("overall", _points(totals), band, bold=True), *series),
    )


def _points(tallies: Sequence[Tally]) -> tuple[tuple[float, float], ...]:
    return tuple((float(step), one.accuracy) for step, one in enumerate(tallies))


def curve_markdown(report: EvalReport, plot: str, raw: str) -> str:
    heads, rows = _curve_rows(report)
    bold = [[f"**{cell}**" if row[0] == "overall" and cell else cell for cell in row] for row in rows]
    options = report.options
    per_task = options.count if options.limit is None else options.limit
    lines = [
        "# Uniform resizing: accuracy against visual tokens",
        "",
        ABOUT_CURVE,
        "",
        f"![Accuracy against visual tokens]({plot})",
        "",
        f"Accuracy in percent; columns are the limit. {_sample_size(per_task, options.count)}",
        "",
        *markdown_table(heads, bold),
        "",
        f"- Command: `{report.run.command}`",
        f"- Model: {report.run.title}; weights {report.weights}; commit {report.run.commit or 'unknown'}",
        f"- When: {report.run.date}, {report.seconds:,.0f} s",
        f"- Every question and answer: [{raw}]({raw})",
        "",
    ]
    return "\n".join(lines)


def _sample_size(per_task: int, count: int) -> str:
    if per_task == count:
        return f"All {count} questions of each task."
    low, high = wilson(per_task // 2, per_task)
    return (
        f"A sample: {per_task} questions per task, spread evenly over the set's {count}. So few leave a"
        f" single task uncertain by up to {50 * (high - low):.0f} points either way."
    )


def write_curve(report: EvalReport, folder: Path, plotter: Plotter) -> list[Path]:
    """Writes curve.md, curve.svg and curve.json."""
    folder.mkdir(parents=True, exist_ok=True)
    page, plot, raw = (folder / f"curve.{kind}" for kind in ("md", "svg", "json"))
    page.write_text(curve_markdown(report, plot.name, raw.name), encoding="utf-8")
    plotter.save_svg(curve_plot(report), plot)
    raw.write_text(as_json(report), encoding="utf-8")
    return [page, plot, raw]


def as_json(report: EvalReport) -> str:
    options = {**asdict(report.options), "out": str(report.options.out) if report.options.out else None}
    head = {
        "schema": SCHEMA,
        **asdict(report.run),
        "weights": report.weights,
        "options": options,
        "seconds": round(report.seconds, 3),
        "levels": [_level(report, limit) for limit in report.levels],
        "peer": None if report.agreement is None else asdict(report.agreement),
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
    pairs = {(pair.ours.task, pair.ours.index): pair for pair in report.pairs}
    found = []
    for question in report.questions:
        key = (question["task"], question["index"])
        entry: dict[str, Any] = {**question, "answers": answers[key]}
        if key in pairs:
            pair = pairs[key]
            entry["peer"] = {
                "text": pair.theirs.text,
                "right": pair.theirs.right,
                "equal": pair.equal,
                "same_prompt": pair.same_prompt,
                "token_ids": pair.theirs.token_ids,
                "our_token_ids": pair.ours.token_ids,
            }
        found.append(entry)
    return found


def write_report(report: EvalReport) -> None:
    if report.options.json is not None:
        write_json(report.options.json, as_json(report))
