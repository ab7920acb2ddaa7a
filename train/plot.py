"""Draws train/log/loss.png from the logs. Needs matplotlib.

python -m train.plot
"""

from __future__ import annotations

import json

import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]

from . import ROOT

LOG = ROOT / "train/log"
PANELS = (
    (("answer", "views_answer"), "answer loss"),
    (("characters", "things"), "dense losses"),
    (("right", "views_right", "read"), "share right"),
)


def main() -> None:
    lines = [json.loads(line) for path in sorted(LOG.glob("run*.jsonl")) for line in path.open()]
    lines = [line for line in lines if "step" in line]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4))
    for axis, (names, title) in zip(axes, PANELS, strict=True):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if name in line]
            axis.plot([p[0] for p in points], [p[1] for p in points], label=name)
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
