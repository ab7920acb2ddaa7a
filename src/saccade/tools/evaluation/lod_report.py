"""The report of `saccade eval-lod`: tables, a Markdown page with a plot, and JSON with every answer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saccade.lod.types import SCORERS, Region
from saccade.tools.environment import RunInfo
from saccade.tools.evaluation.lod_methods import BALANCED, FULL, MAPS, ORACLE, RANDOM, RESIZE, ChannelScore
from saccade.tools.evaluation.options import LodEvalOptions
from saccade.tools.evaluation.report import TABLE_WIDTH
from saccade.tools.evaluation.scoring import wilson
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

SCHEMA = 1
ABOUT_CHANNELS = "Area under the ROC curve: evidence against the rest, over a global view's tokens"
QUARTER = 0.25
# Goals of balanced at a quarter of full detail's tokens.
KEPT = 0.97  # of full detail's accuracy
AHEAD = ("needle", "small_print", "form")  # tasks where it has to beat resizing by AHEAD_BY
AHEAD_BY = 0.10
UNDER = 0.01  # most that it may be under resizing on any task
WITHOUT_TEXT = (RESIZE, RANDOM, *SCORERS)  # wrong answers of these are counted, not stored: too many


@dataclass(frozen=True)
class LodResult:
    """One answer."""

    task: str
    index: int
    question: str
    answer: str
    method: str
    share: float | None
    full_tokens: int
    visual_tokens: int
    text: str
    right: bool
    regions: tuple[Region, ...]
    covered: float  # share of the evidence's box in the best zoomed view
    gated: str | None


@dataclass(frozen=True)
class LodReport:
    run: RunInfo
    weights: str
    options: LodEvalOptions
    seconds: float
    results: tuple[LodResult, ...]
    channels: tuple[ChannelScore, ...] = ()

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(one.method for one in self.results if one.method != FULL))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(one.task for one in self.results))

    def of(self, method: str, share: float | None, task: str | None = None) -> list[LodResult]:
        return [
            one
            for one in self.results
            if one.method == method
            and (method == FULL or one.share == share)
            and (task is None or one.task == task)
        ]


def level_name(share: float | None) -> str:
    return "auto" if share is None else f"{100 * share:g}%"


def accuracy(some: Sequence[LodResult]) -> float:
    return sum(one.right for one in some) / len(some)


def tokens(some: Sequence[LodResult]) -> float:
    return sum(one.visual_tokens for one in some) / len(some)


def overall_rows(report: LodReport) -> tuple[list[str], list[list[str]]]:
    """One row per method: accuracy and mean tokens at every level."""
    levels = report.options.levels
    heads = ["method", *(level_name(share) for share in levels)]
    full = report.of(FULL, None)
    rows = [[FULL, *(_cell(full) for _ in levels)]]
    for method in report.methods:
        rows.append([method, *(_cell(report.of(method, share)) for share in levels)])
    return heads, rows


def _cell(some: Sequence[LodResult]) -> str:
    return f"{100 * accuracy(some):.1f} ({tokens(some):.0f})" if some else ""


def task_rows(report: LodReport, share: float | None) -> tuple[list[str], list[list[str]]]:
    """One row per task, at one level."""
    methods = report.methods
    heads = ["task", "questions", FULL, *methods]
    rows = []
    for task in report.tasks:
        full = report.of(FULL, None, task)
        each = [report.of(method, share, task) for method in methods]
        rows.append([task, str(len(full)), *(f"{100 * accuracy(some):.0f}" for some in (full, *each))])
    everything = [report.of(FULL, None), *(report.of(method, share) for method in methods)]
    rows.append(["overall", str(len(everything[0])), *(f"{100 * accuracy(some):.1f}" for some in everything)])
    rows.append(["visual tokens", "", *(f"{tokens(some):.0f}" for some in everything)])
    return heads, rows


def channel_rows(report: LodReport) -> tuple[list[str], list[list[str]]]:
    """One row per group of the texture's channels."""
    areas = {(one.group, one.map): one.area for one in report.channels}
    groups = dict.fromkeys(one.group for one in report.channels)
    return ["channels", *MAPS], [[group, *(f"{areas[group, name]:.3f}" for name in MAPS)] for group in groups]


def verdict(report: LodReport) -> list[str]:
    """The goals at a quarter of full detail's tokens, each with the measured value."""
    if QUARTER not in report.options.shares or RESIZE not in report.methods:
        return []
    full, ours = report.of(FULL, None), report.of(BALANCED, QUARTER)
    kept = accuracy(ours) / max(accuracy(full), 1e-9)
    lines = [f"balanced at 25% keeps {kept:.1%} of full detail's accuracy (aim {KEPT:.0%})"]
    gaps = {
        task: accuracy(report.of(BALANCED, QUARTER, task)) - accuracy(report.of(RESIZE, QUARTER, task))
        for task in report.tasks
    }
    for task in AHEAD:
        if task in gaps:
            lines.append(
                f"{task}: {100 * gaps[task]:+.0f} points against resizing (aim +{100 * AHEAD_BY:.0f})"
            )
    under = [f"{task} {100 * gap:+.0f}" for task, gap in gaps.items() if gap < -UNDER]
    lines.append("under resizing: " + (", ".join(under) or "no task"))
    return lines


def losses(report: LodReport, share: float | None) -> list[str]:
    """Which stage loses the questions that full detail answers and balanced does not."""
    full = {(one.task, one.index): one for one in report.of(FULL, None)}
    oracle = {(one.task, one.index): one for one in report.of(ORACLE, share)}
    ours = report.of(BALANCED, share)
    lost = [one for one in ours if full[one.task, one.index].right and not one.right]
    if not oracle or not lost:
        return []
    reading = [one for one in lost if not oracle[one.task, one.index].right]
    rest = [one for one in lost if oracle[one.task, one.index].right]
    gate = [one for one in rest if one.gated]
    missed = [one for one in rest if not one.gated and one.covered < 0.9]
    other = len(rest) - len(gate) - len(missed)
    return [
        f"{len(lost)} of {len(ours)} questions that full detail answers are lost at {level_name(share)}:"
        f" {len(reading)} also with the true region (budget or reading), {len(gate)} by the gate,"
        f" {len(missed)} by a window that misses part of the evidence, {other} although it is seen"
    ]


def _all_losses(report: LodReport) -> list[str]:
    return [line for share in report.options.levels for line in losses(report, share)]


def print_lod_report(report: LodReport) -> None:
    console = output_console(report.options.json, TABLE_WIDTH)
    title = f"{report.run.model} ({report.run.dtype}): accuracy in percent (visual tokens)"
    console.print(table(title, *overall_rows(report)))
    for line in (*verdict(report), *_all_losses(report)):
        console.print(line)
    if report.channels:
        console.print(table(ABOUT_CHANNELS, *channel_rows(report)))


def lod_plot(report: LodReport) -> LinePlot:
    levels = report.options.levels
    full = accuracy(report.of(FULL, None))
    series = [Series(FULL, tuple((step, full) for step in range(len(levels))))]
    for method in report.methods:
        found = [report.of(method, share) for share in levels]
        points = tuple((step, accuracy(some)) for step, some in enumerate(found))
        bold = method == BALANCED
        band = tuple(wilson(sum(one.right for one in some), len(some)) for some in found) if bold else ()
        series.append(Series(method, points, band, bold=bold))
    count = len(report.of(FULL, None))
    return LinePlot(
        title="Accuracy against visual tokens, spent in different ways",
        subtitle=f"{report.run.model}, {count:,} questions per point; band: 95% interval of {BALANCED}",
        x_label="share of full detail's visual tokens (auto: the engine decides)",
        y_label="right answers",
        steps=tuple(level_name(share) for share in levels),
        series=tuple(series),
    )


def lod_markdown(report: LodReport, names: dict[str, str]) -> str:
    options = report.options
    asked = len(report.of(FULL, None, report.tasks[0]))
    where = "the fixed set" if options.scenes is None else f"fresh scenes (seed {options.scenes})"
    lines = [
        "# Level of detail: " + ("what each stage is worth" if options.ablate else "accuracy against tokens"),
        "",
        f"{asked} questions per task of {where}, {len(report.tasks)} tasks. Accuracy in percent, mean visual"
        " tokens in brackets. A budget is a share of full detail's tokens, at least what the checkpoint gives"
        " any image; `auto` is what `detail: auto` spends, and resizing there has the same tokens,"
        " question by question.",
        "",
        f"![Accuracy against visual tokens]({names['svg']})",
        "",
        *markdown_table(*overall_rows(report)),
        "",
        *(f"- {line}" for line in (*verdict(report), *_all_losses(report))),
        "",
    ]
    for share in options.levels:
        lines += [f"## {level_name(share)}", "", *markdown_table(*task_rows(report, share)), ""]
    if report.channels:
        lines += ["## Texture", "", f"{ABOUT_CHANNELS}; {report.channels[0].examples} questions.", ""]
        lines += [*markdown_table(*channel_rows(report)), ""]
    lines += [
        f"Model {report.run.model} ({report.run.dtype}), weights {report.weights}, commit"
        f" {report.run.commit or 'unknown'}, {report.run.date}, {report.seconds:,.0f} s on"
        f" {report.run.machine.get('device')}. Every question: [{names['json']}]({names['json']}).",
        "",
    ]
    return "\n".join(lines)


def as_json(report: LodReport) -> str:
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "model": report.run.model,
        "weights": report.weights,
        "commit": report.run.commit,
        "date": report.run.date,
        "machine": report.run.machine,
        "dtype": report.run.dtype,
        "options": {**asdict(report.options), "out": None if report.options.out is None else "given"},
        "seconds": round(report.seconds, 3),
        "verdict": verdict(report),
        "losses": _all_losses(report),
        "channels": [asdict(one) for one in report.channels],
    }
    return json_with_questions(head, _questions(report), indent=1)


def _questions(report: LodReport) -> list[dict[str, Any]]:
    """One per question: by level and method [1 if right, tokens], and the text of a wrong answer."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for one in report.results:
        known = {"task": one.task, "index": one.index, "full": one.full_tokens}
        entry = found.setdefault((one.task, one.index), {**known, "answers": {}, "zooms": {}})
        level = FULL if one.method == FULL else level_name(one.share)
        has_content = [] if one.right or one.method in WITHOUT_TEXT else [one.text]
        entry["answers"].setdefault(level, {})[one.method] = [int(one.right), one.visual_tokens, *has_content]
        if one.method == BALANCED:
            boxes = [[*region.box, *region.grid] for region in one.regions]
            gated = {} if one.gated is None else {"gated": one.gated.partition(",")[0]}
            entry["zooms"][level] = {"views": boxes, "covered": round(one.covered, 2), **gated}
    return list(found.values())


def write_lod_report(report: LodReport, plotter: Plotter | None) -> None:
    """The JSON, and into the `out` folder the page, the plot and the answers."""
    options = report.options
    if options.json is not None:
        write_json(options.json, as_json(report))
    if options.out is None or plotter is None:
        return
    stem = "lod_ablation" if options.ablate else "lod"
    names = {kind: f"{stem}.{kind}" for kind in ("md", "svg", "json")}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / names["md"]).write_text(lod_markdown(report, names), encoding="utf-8")
    (options.out / names["json"]).write_text(as_json(report), encoding="utf-8")
    plotter.save_svg(lod_plot(report), options.out / names["svg"])
