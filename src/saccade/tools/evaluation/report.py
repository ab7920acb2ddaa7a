"""What an evaluation found: as a table for people, as JSON for programs, as Markdown for the docs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from saccade.tools.evaluation.comparison import Agreement, Pair
from saccade.tools.evaluation.options import EvalOptions
from saccade.tools.evaluation.question_set import Example
from saccade.tools.evaluation.score import Outcome, Tally, at_level, by_group, by_task, tally, wilson

TABLE_WIDTH = 120  # where stdout is no terminal
SCHEMA = 1
ABOUT_CURVE = (
    "Every picture of the evaluation set is made smaller as a whole, never larger, until it costs at most the"
    " given number of visual tokens; then the question is asked. This is what a level-of-detail method has to"
    " beat at equal tokens; full detail bounds it. Pictures that cost less anyway stay as they are, so the"
    " last row says what was really spent."
)


@dataclass(frozen=True)
class Asking:
    """A question as it stands in the set."""

    task: str
    index: int
    kind: str  # of scene
    question: str
    answer: str
    accepted: tuple[str, ...]


def asking(example: Example) -> Asking:
    return Asking(
        example.task, example.index, example.kind, example.question, example.answer, example.accepted
    )


@dataclass(frozen=True)
class Report:
    """Everything that is known about one evaluation."""

    model: str
    weights: str  # names the weight files' content, so that figures are never taken for other weights'
    date: str
    command: str
    commit: str | None
    machine: dict[str, str | int | float | None]
    versions: dict[str, str]
    engine: dict[str, Any]
    options: EvalOptions
    seconds: float
    askings: tuple[Asking, ...]
    outcomes: tuple[Outcome, ...]  # one per question and level
    agreement: Agreement | None = None
    pairs: tuple[Pair, ...] = ()

    @property
    def levels(self) -> list[int | None]:
        """In the options' order; limits the checkpoint cannot reach are not there."""
        asked = {outcome.limit for outcome in self.outcomes}
        return [limit for limit in self.options.levels if limit in asked]

    @property
    def title(self) -> str:
        dtype, device = self.engine["resolved_dtype"], self.machine["device"]
        return f"{self.model} ({dtype}) on {device}"


def level_name(limit: int | None) -> str:
    return "full" if limit is None else str(limit)


def overall(report: Report, limit: int | None) -> Tally:
    return tally("overall", at_level(report.outcomes, limit))


# --- for people ----------------------------------------------------------------------------------------


def print_report(report: Report) -> None:
    """To stdout; to stderr when stdout is taken by the JSON."""
    stream = sys.stderr if report.options.json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else TABLE_WIDTH, highlight=False)
    console.print(_curve_table(report) if report.options.curve else _table(report))
    if report.agreement is not None:
        console.print(told_agreement(report.agreement))


def _table(report: Report) -> Table:
    limit = report.levels[0]
    detail = "full detail" if limit is None else f"at most {limit} visual tokens"
    table = Table(title=f"{report.title}, {detail}", title_justify="left")
    table.add_column("task")
    for name in ("questions", "right", "accuracy", "95% interval", "visual tokens"):
        table.add_column(name, justify="right")
    outcomes = at_level(report.outcomes, limit)
    for one in by_task(outcomes):
        table.add_row(*_cells(one))
    table.add_section()
    table.add_row(*_cells(overall(report, limit)), style="bold")
    return table


def _cells(one: Tally) -> list[str]:
    interval = f"{100 * one.low:.1f} - {100 * one.high:.1f}"
    mean = f"{one.mean_visual_tokens:,.0f}"
    return [one.name, str(one.questions), str(one.right), f"{one.accuracy:.1%}", interval, mean]


def _curve_table(report: Report) -> Table:
    table = Table(title=f"{report.title}: accuracy by visual tokens per picture", title_justify="left")
    heads, rows = _curve_rows(report)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left")
    for row in rows:
        if row[0] == "overall":
            table.add_section()
        table.add_row(*row)
    return table


def told_agreement(found: Agreement) -> str:
    return (
        f"{found.peer}: {found.equal} of {found.questions} greedy answers equal token for token,"
        f" {found.shared_tokens} of {found.tokens} tokens before a first difference;"
        f" {found.same_prompts} of {found.questions} prompts equal;"
        f" {found.peer_right} of its answers right"
    )


def _curve_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: a task each, then everything, then what the pictures really cost."""
    levels = report.levels
    each = {limit: at_level(report.outcomes, limit) for limit in levels}
    heads = ["task", "questions", *(level_name(limit) for limit in levels)]
    tallies = {limit: by_task(outcomes) for limit, outcomes in each.items()}
    rows = []
    for place, first in enumerate(tallies[levels[0]]):
        shares = [f"{100 * tallies[limit][place].accuracy:.1f}" for limit in levels]
        rows.append([first.name, str(first.questions), *shares])
    totals = [overall(report, limit) for limit in levels]
    count = str(totals[0].questions)
    rows.append(["overall", count, *(f"{100 * one.accuracy:.1f}" for one in totals)])
    rows.append(["95% interval", "", *(f"{100 * one.low:.1f} - {100 * one.high:.1f}" for one in totals)])
    rows.append(["mean visual tokens", "", *(f"{one.mean_visual_tokens:,.0f}" for one in totals)])
    return heads, rows


def curve_markdown(report: Report, plot: str, raw: str) -> str:
    """The curve as a page: what was run, the table, the plot."""
    heads, rows = _curve_rows(report)
    options = report.options
    per_task = options.count if options.limit is None else options.limit
    lines = [
        "# Uniform resizing: accuracy against visual tokens",
        "",
        ABOUT_CURVE,
        "",
        f"![Accuracy against visual tokens]({plot})",
        "",
        f"Accuracy in percent; columns are the limit. {_extent(per_task, options.count)}",
        "",
        "| " + " | ".join(heads) + " |",
        "|:--|" + "--:|" * (len(heads) - 1),
        *("| " + " | ".join(_marked(row)) + " |" for row in rows),
        "",
        f"- Command: `{report.command}`",
        f"- Model: {report.title}; weights {report.weights}; commit {report.commit or 'unknown'}",
        f"- When: {report.date}, {report.seconds:,.0f} s",
        f"- Every question and answer: [{raw}]({raw})",
        "",
    ]
    return "\n".join(lines)


def _extent(per_task: int, count: int) -> str:
    if per_task == count:
        return f"All {count} questions of each task."
    low, high = wilson(per_task // 2, per_task)
    return (
        f"A sample: {per_task} questions per task, spread evenly over the set's {count}. So few leave a"
        f" single task uncertain by up to {50 * (high - low):.0f} points either way."
    )


def _marked(row: Sequence[str]) -> list[str]:
    return [f"**{cell}**" if row[0] == "overall" and cell else cell for cell in row]


# --- for programs --------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """One line per question, so that two runs can be compared by `diff`."""
    head = {
        "schema": SCHEMA,
        "model": report.model,
        "weights": report.weights,
        "date": report.date,
        "command": report.command,
        "commit": report.commit,
        "machine": report.machine,
        "versions": report.versions,
        "engine": report.engine,
        "options": {**asdict(report.options), "out": str(report.options.out) if report.options.out else None},
        "seconds": round(report.seconds, 3),
        "levels": [_level(report, limit) for limit in report.levels],
        "peer": None if report.agreement is None else asdict(report.agreement),
    }
    text = json.dumps(head, indent=2, allow_nan=False)
    lines = ",\n".join("    " + json.dumps(one, ensure_ascii=False) for one in _questions(report))
    return f'{text[: text.rindex("}")].rstrip()},\n  "questions": [\n{lines}\n  ]\n}}\n'


def _level(report: Report, limit: int | None) -> dict[str, Any]:
    outcomes = at_level(report.outcomes, limit)
    return {
        "limit": limit,
        "overall": asdict(tally("overall", outcomes)),
        "tasks": [asdict(one) for one in by_task(outcomes)],
        "groups": [asdict(one) for one in by_group(outcomes)],
    }


def _questions(report: Report) -> list[dict[str, Any]]:
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
    for one in report.askings:
        place = (one.task, one.index)
        entry: dict[str, Any] = {**asdict(one), "answers": answers[place]}
        if place in pairs:
            pair = pairs[place]
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


def write_json(report: Report) -> None:
    target = report.options.json
    if target == "-":
        sys.stdout.write(as_json(report))
        sys.stdout.flush()
    elif target is not None:
        Path(target).write_text(as_json(report), encoding="utf-8")
