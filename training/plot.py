"""Draws training/log/loss.png from the logs. Needs matplotlib.

python -m training.plot
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]

from . import ROOT

LOG = ROOT / "training/log"
PANELS = (
    (("answer", "views_answer"), "answer loss"),
    (("characters", "views_characters", "things"), "dense losses"),
    (("right", "views_right", "read", "views_read"), "share right"),
)


def joined() -> tuple[list[dict[str, Any]], list[int]]:
    """Lines of all runs with steps counted on through them, and the steps at which runs ended. A run that
    begins from weights counts from zero; one that resumes a state goes on by itself."""
    lines: list[dict[str, Any]] = []
    ends: list[int] = []
    last = 0
    for path in sorted(LOG.glob("run*.jsonl")):
        run = [line for line in map(json.loads, path.open()) if "step" in line]
        before = last if run[0]["step"] < last else 0
        lines += [{**line, "step": line["step"] + before} for line in run]
        last = lines[-1]["step"]
        ends.append(last)
    return lines, ends


def main() -> None:
    lines, ends = joined()
    figure, axes = plt.subplots(1, 3, figsize=(15, 4))
    for axis, (names, title) in zip(axes, PANELS, strict=True):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if name in line]
            axis.plot([p[0] for p in points], [p[1] for p in points], label=name)
        for end in ends[:-1]:
            axis.axvline(end, color="grey", linestyle=":", linewidth=1)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
        if "loss" in title:
            axis.set_yscale("log")
    figure.tight_layout()
    figure.savefig(LOG / "loss.png", dpi=80)


if __name__ == "__main__":
    main()
