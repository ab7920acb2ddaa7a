"""What the tools' reports share: tables, JSON, percentiles, progress bars."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from saccade.errors import ConfigError

TABLE_WIDTH = 140  # when stdout is not a terminal
STDOUT = "-"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated linearly as numpy does."""
    if not values:
        raise ValueError("a percentile of no values")
    if not 0 <= share <= 1:
        raise ValueError(f"a percentile is a share of 0 to 1, not {share}")
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def figure(value: float) -> str:
    """About three digits, never an exponent."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def output_console(json_target: str | None = None, width: int = TABLE_WIDTH) -> Console:
    """For tables: stdout, or stderr if the JSON goes to stdout."""
    stream = sys.stderr if json_target == STDOUT else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else width, highlight=False)


def progress_bar(show: bool, *, remaining: bool = False) -> Progress:
    """A bar on stderr, if that is a terminal."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    console = Console(stderr=True)
    shown = [*columns, *([TimeRemainingColumn()] if remaining else [])]
    return Progress(*shown, console=console, disable=not (show and console.is_terminal))


def table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] | None = None
) -> Table:
    """Columns named in `left` (default: the first) are aligned left. A row "overall" starts a section."""
    left = heads[:1] if left is None else left
    made = Table(title=title, title_justify="left")
    for head in heads:
        made.add_column(head, justify="left" if head in left else "right")
    for row in rows:
        if row[0] == "overall":
            made.add_section()
        made.add_row(*row)
    return made


def check_json_target(target: str | None) -> None:
    if target not in (None, STDOUT) and not Path(str(target)).resolve().parent.is_dir():
        raise ConfigError(f"the folder of {target} does not exist; make it first")


def write_json(target: str | None, text: str) -> None:
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    elif target is not None:
        Path(target).write_text(text, encoding="utf-8")


def json_with_questions(head: Mapping[str, Any], questions: Iterable[Any], *, indent: int) -> str:
    """A JSON document with one line per question, so that two runs can be compared with `diff`."""
    text = json.dumps(head, indent=indent, allow_nan=False)
    pad, separators = (" " * 4, None) if indent > 1 else ("", (",", ":"))
    lines = [pad + json.dumps(one, ensure_ascii=False, separators=separators) for one in questions]
    space = " " * indent
    return (
        f'{text[: text.rindex("}")].rstrip()},\n{space}"questions": [\n'
        + ",\n".join(lines)
        + f"\n{space}]\n}}\n"
    )
