"""Draws line plots as SVG with matplotlib, which comes with the extra `tools`."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from bench.plot import LinePlot, Series

SIZE = (8.6, 5.0)  # inches
INK, FAINT, GRID = "#1f2328", "#59636e", "#e4e7eb"
# Okabe and Ito's colours, distinct for colour-blind readers, without yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f5fb0", "#8a6d3b")
MARKERS = ("o", "s", "D", "^")


def save_svg(plot: LinePlot, path: Path) -> None:
    """Text stays text, and the same plot gives the same bytes."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title, "font.size": 10}):
        drawn = Figure(figsize=SIZE, layout="constrained")
        axes = drawn.add_subplot()
        styles = list(zip(COLOURS, MARKERS * 2, strict=True))
        plain = 0
        for one in plot.series:
            colour, marker = (INK, "o") if one.bold else styles[plain % len(styles)]
            colour, marker = (FAINT, "") if one.dashed else (colour, marker)
            plain += not (one.bold or one.dashed)
            _draw(axes, one, colour, marker, plot)
        axes.set_title(plot.title, loc="left", fontweight="bold", color=INK, pad=24)
        axes.text(0, 1.03, plot.subtitle, transform=axes.transAxes, color=FAINT, fontsize=9)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _scale(axes, plot)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        drawn.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Title": plot.title})


def _draw(axes: matplotlib.axes.Axes, one: Series, colour: str, marker: str, plot: LinePlot) -> None:
    x, y = zip(*one.points, strict=True)
    label = f"{one.name}  {y[-1]:.0%}" if plot.steps else one.name
    if one.band:
        low, high = zip(*one.band, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.10, linewidth=0)
    width = 2.4 if one.bold else 1.6
    style = "--" if one.dashed else "-"
    axes.plot(
        x,
        y,
        style,
        color=colour,
        marker=marker,
        linewidth=width,
        markersize=5,
        label=label,
        zorder=2 + one.bold,
    )


def _scale(axes: matplotlib.axes.Axes, plot: LinePlot) -> None:
    if plot.steps:
        axes.set_xticks(range(len(plot.steps)), plot.steps)
        axes.set_ylim(0, 1.01)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
