"""The plot of `saccade eval-quant`, with matplotlib, which comes with the extra `tools`."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from saccade.tools.evaluation.quantization_report import IMAGES, TEXT, QuantReport

COLOURS = {TEXT: "#0072b2", IMAGES: "#d55e00"}  # Okabe and Ito's, distinct for colour-blind readers
GREYS = {"decode speed": "#009e73", "bytes of weights": "#8c959f"}
HEIGHT = 0.38  # of a bar; two of them share a scheme's row
FLOOR = 1e-7  # a divergence of 0 has no place on a logarithmic axis


def save(report: QuantReport, path: Path) -> None:
    """In the format of the path's ending."""
    schemes, base = report.schemes[1:], report.base
    settings = {"svg.fonttype": "none", "svg.hashsalt": report.run.model, "font.size": 10}
    with matplotlib.rc_context(settings):
        drawn = Figure(figsize=(9.6, 1.5 + 0.75 * len(schemes)), layout="constrained")
        quality, cost = drawn.subplots(1, 2, sharey=True)
        for kind, colour in COLOURS.items():
            rows = [(row, one.by_kind[kind]) for row, one in enumerate(schemes) if kind in one.by_kind]
            if not rows:
                continue
            at = [row + (HEIGHT / 2 if kind == IMAGES else -HEIGHT / 2) for row, _ in rows]
            means = [max(one.kld_mean, FLOOR) for _, one in rows]
            quality.barh(at, means, HEIGHT, color=colour, label=f"{kind}: mean")
            tails = [max(one.kld_99, FLOOR) for _, one in rows]
            quality.plot(tails, at, "|", color=colour, markersize=13, label=f"{kind}: 99%")
        ratios = {
            "decode speed": [one.tokens_per_second / base.tokens_per_second for one in schemes],
            "bytes of weights": [one.weight_bytes / base.weight_bytes for one in schemes],
        }
        for number, (name, values) in enumerate(ratios.items()):
            at = [row + (number - 0.5) * HEIGHT for row in range(len(schemes))]
            bars = cost.barh(at, values, HEIGHT, color=GREYS[name], label=name)
            cost.bar_label(bars, fmt="%.2fx", padding=3, fontsize=9)
        cost.margins(x=0.15)
        cost.axvline(1, color="#1f2328", linewidth=0.8)
        quality.set_xscale("log")
        quality.set_yticks(range(len(schemes)), [one.name for one in schemes])
        quality.invert_yaxis()
        quality.set_xlabel(f"KL divergence from {report.run.dtype}, nats per token")
        cost.set_xlabel(f"times {report.run.dtype}")
        drawn.suptitle(report.run.title, x=0.01, ha="left", fontweight="bold")
        for axes in (quality, cost):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False, fontsize=9)
        drawn.savefig(path, dpi=120)
