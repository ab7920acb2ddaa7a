"""The resizing curve on disk: a page, a plot and the raw answers."""

from pathlib import Path

from saccade.tools.evaluation.plot import Plot, Series, svg
from saccade.tools.evaluation.report import Report, as_json, curve_markdown, level_name, overall
from saccade.tools.evaluation.score import Tally, at_level, by_group


def curve_plot(report: Report) -> Plot:
    """Overall with its interval, and a line per group of tasks."""
    levels = report.levels
    totals = [overall(report, limit) for limit in levels]
    groups = [by_group(at_level(report.outcomes, limit)) for limit in levels]
    series = [_series(list(of_all)) for of_all in zip(*groups, strict=True)]
    band = tuple((one.low, one.high) for one in totals)
    series.append(Series("overall", tuple(one.accuracy for one in totals), band, bold=True))
    return Plot(
        title="Accuracy against visual tokens, pictures resized as a whole",
        subtitle=f"{report.model}, {totals[0].questions:,} questions a point; band: 95% interval of overall",
        x_label="visual tokens per picture, at most (log scale; full: no limit)",
        y_label="right answers",
        steps=tuple(level_name(limit) for limit in levels),
        series=tuple(series),
    )


def _series(tallies: list[Tally]) -> Series:
    return Series(tallies[0].name, tuple(one.accuracy for one in tallies))


def write_curve(report: Report, folder: Path) -> list[Path]:
    """curve.md, curve.svg and curve.json in `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "curve.md": curve_markdown(report, "curve.svg", "curve.json"),
        "curve.svg": svg(curve_plot(report)),
        "curve.json": as_json(report),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
