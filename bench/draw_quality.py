"""Makes the pages and plots of docs/quality from the stored answers: `python -m bench.draw_quality [FOLDER]`.

saccade eval --curve --limit 10 --json docs/quality/curve.json
saccade eval-lod --limit 16 --json docs/quality/lod.json
python -m bench.lod_ablation --limit 3 --share 0.25 --json docs/quality/lod_ablation.json"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.lod_ablation import ABOUT_CHANNELS, channel_rows
from bench.plot import LinePlot, Series, load_plotter
from saccade.lod.types import Region
from saccade.tools.environment import RunInfo
from saccade.tools.evaluation.lod import LodReport, LodResult, accuracy, level_name, overall_rows, tokens
from saccade.tools.evaluation.lod_methods import BALANCED, FULL, ORACLE, RESIZE
from saccade.tools.evaluation.report import EvalReport, Outcome, Tally, by_group, curve_rows, wilson
from saccade.tools.evaluation.report import level_name as limit_name
from saccade.tools.options import EvalOptions, LodEvalOptions

ABOUT_CURVE = (
    "Every image of the evaluation set is resized as a whole, never enlarged, until it costs at most the"
    " given number of visual tokens; then the question is asked. A level-of-detail method has to beat it at"
    " equal tokens; full detail bounds it. Images that cost less anyway are not resized, so the last row"
    " gives the tokens that were spent."
)
QUARTER = 0.25
# Goals of balanced at a quarter of full detail's tokens.
KEPT = 0.97  # of full detail's accuracy
AHEAD = ("needle", "small_print", "form")  # tasks where it has to beat resizing by AHEAD_BY
AHEAD_BY = 0.10
UNDER = 0.01  # most that it may be under resizing on any task


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|:--|" + "--:|" * (len(heads) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


# The curve of uniform resizing


def stored_curve(document: dict[str, Any]) -> EvalReport:
    """Of curve.json."""
    options = {name: document["options"][name] for name in ("tasks", "count", "limit")}
    outcomes = []
    for level in document["levels"]:
        for one in document["questions"]:
            answer = one["answers"][limit_name(level["limit"])]
            known = (
                one["task"],
                one["index"],
                level["limit"],
                tuple(answer["size"]),
                answer["visual_tokens"],
            )
            outcomes.append(Outcome(*known, answer["text"], (), answer["finish"], answer["right"]))
    return EvalReport(
        run=RunInfo(**{name: document[name] for name in RunInfo.__dataclass_fields__}),
        weights=document["weights"],
        options=EvalOptions(curve=True, **options),
        seconds=document["seconds"],
        questions=(),
        outcomes=tuple(outcomes),
    )


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
        steps=tuple(limit_name(limit) for limit in levels),
        series=(Series("overall", _points(totals), band, bold=True), *series),
    )


def _points(tallies: Sequence[Tally]) -> tuple[tuple[float, float], ...]:
    return tuple((float(step), one.accuracy) for step, one in enumerate(tallies))


def curve_markdown(report: EvalReport) -> str:
    heads, rows = curve_rows(report)
    bold = [[f"**{cell}**" if row[0] == "overall" and cell else cell for cell in row] for row in rows]
    options = report.options
    per_task = options.count if options.limit is None else options.limit
    lines = [
        "# Uniform resizing: accuracy against visual tokens",
        "",
        ABOUT_CURVE,
        "",
        "![Accuracy against visual tokens](curve.svg)",
        "",
        f"Accuracy in percent; columns are the limit. {_sample_size(per_task, options.count)}",
        "",
        *markdown_table(heads, bold),
        "",
        f"- Command: `{report.run.command}`",
        f"- Model: {report.run.title}; weights {report.weights}; commit {report.run.commit or 'unknown'}",
        f"- When: {report.run.date}, {report.seconds:,.0f} s",
        "- Every question and answer: [curve.json](curve.json)",
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


# Level of detail


def stored_lod(document: dict[str, Any]) -> LodReport:
    """Of lod.json or lod_ablation.json. Texts and regions of right answers are not stored."""
    names = ("tasks", "count", "limit", "scenes", "shares")
    options = LodEvalOptions(**{name: document["options"][name] for name in names})
    shares = {level_name(share): share for share in options.levels} | {FULL: None}
    results = []
    for one in document["questions"]:
        for level, methods in one["answers"].items():
            for method, (right, spent, *text) in methods.items():
                zooms = one["zooms"].get(level, {}) if method == BALANCED else {}
                regions = tuple(
                    Region((view[0], view[1], view[2], view[3]), (view[4], view[5]), 0.0)
                    for view in zooms.get("views", ())
                )
                known = (one["task"], one["index"], "", "", method, shares[level], one["full"], spent)
                found = (*text, "")[0], bool(right), regions, zooms.get("covered", 0.0), zooms.get("gated")
                results.append(LodResult(*known, *found))
    run = RunInfo(
        document["model"],
        document["date"],
        "",
        document["commit"],
        document["machine"],
        {},
        {"resolved_dtype": document["dtype"]},
    )
    return LodReport(run, document["weights"], options, document["seconds"], tuple(results))


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


def lod_markdown(report: LodReport, channels: Sequence[dict[str, Any]], stem: str) -> str:
    options = report.options
    asked = len(report.of(FULL, None, report.tasks[0]))
    where = "the fixed set" if options.scenes is None else f"fresh scenes (seed {options.scenes})"
    lines = [
        "# Level of detail: " + ("what each stage is worth" if channels else "accuracy against tokens"),
        "",
        f"{asked} questions per task of {where}, {len(report.tasks)} tasks. Accuracy in percent, mean visual"
        " tokens in brackets. A budget is a share of full detail's tokens, at least what the checkpoint gives"
        " any image; `auto` is what `detail: auto` spends, and resizing there has the same tokens,"
        " question by question.",
        "",
        f"![Accuracy against visual tokens]({stem}.svg)",
        "",
        *markdown_table(*overall_rows(report)),
        "",
        *(f"- {line}" for line in (*verdict(report), *_all_losses(report))),
        "",
    ]
    for share in options.levels:
        lines += [f"## {level_name(share)}", "", *markdown_table(*task_rows(report, share)), ""]
    if channels:
        lines += ["## Texture", "", f"{ABOUT_CHANNELS}; {channels[0]['examples']} questions.", ""]
        lines += [*markdown_table(*channel_rows(channels)), ""]
    lines += [
        f"Model {report.run.model} ({report.run.dtype}), weights {report.weights}, commit"
        f" {report.run.commit or 'unknown'}, {report.run.date}, {report.seconds:,.0f} s on"
        f" {report.run.machine.get('device')}. Every question: [{stem}.json]({stem}.json).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/quality")
    plotter = load_plotter()
    for stem in ("curve", "lod", "lod_ablation"):
        document = json.loads((folder / f"{stem}.json").read_text())
        if stem == "curve":
            curve = stored_curve(document)
            page, plot = curve_markdown(curve), curve_plot(curve)
        else:
            report = stored_lod(document)
            page, plot = lod_markdown(report, document.get("channels", ()), stem), lod_plot(report)
        (folder / f"{stem}.md").write_text(page, encoding="utf-8")
        plotter.save_svg(plot, folder / f"{stem}.svg")


if __name__ == "__main__":
    main()
