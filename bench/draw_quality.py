"""Draws the plots of docs/quality again from the stored answers: `python -m bench.draw_quality [FOLDER]`."""

import json
import sys
from pathlib import Path
from typing import Any

from saccade.tools.environment import RunInfo
from saccade.tools.evaluation.lod_methods import FULL
from saccade.tools.evaluation.lod_report import LodReport, LodResult, lod_plot
from saccade.tools.evaluation.options import EvalOptions, LodEvalOptions
from saccade.tools.evaluation.report import EvalReport, curve_plot, level_name
from saccade.tools.evaluation.scoring import Outcome
from saccade.tools.report import LinePlot, load_plotter


def stored_run(document: dict[str, Any]) -> RunInfo:
    return RunInfo(document["model"], document["date"], "", document["commit"], document["machine"], {}, {})


def stored_curve(document: dict[str, Any]) -> LinePlot:
    """Of curve.json, with the points that the plot needs."""
    limits = [level["limit"] for level in document["levels"]]
    outcomes = [
        Outcome(
            one["task"],
            one["index"],
            limit,
            (0, 0),
            0,
            "",
            (),
            None,
            one["answers"][level_name(limit)]["right"],
        )
        for one in document["questions"]
        for limit in limits
    ]
    report = EvalReport(
        run=stored_run(document),
        weights=document["weights"],
        options=EvalOptions(curve=True),
        seconds=0.0,
        questions=(),
        outcomes=tuple(outcomes),
    )
    return curve_plot(report)


def stored_lod(document: dict[str, Any]) -> LinePlot:
    """Of lod.json or lod_ablation.json."""
    options = LodEvalOptions(shares=tuple(document["options"]["shares"]))
    shares = {f"{100 * share:g}%": share for share in options.shares} | {"auto": None, FULL: None}
    results = [
        LodResult(
            one["task"],
            one["index"],
            "",
            "",
            method,
            shares[level],
            one["full"],
            answer[1],
            "",
            bool(answer[0]),
            (),
            0,
            None,
        )
        for one in document["questions"]
        for level, methods in one["answers"].items()
        for method, answer in methods.items()
    ]
    report = LodReport(
        run=stored_run(document),
        weights=document["weights"],
        options=options,
        seconds=0.0,
        results=tuple(results),
    )
    return lod_plot(report)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/quality")
    plotter = load_plotter()
    for name, read in (("curve", stored_curve), ("lod", stored_lod), ("lod_ablation", stored_lod)):
        document = json.loads((folder / f"{name}.json").read_text())
        plotter.save_svg(read(document), folder / f"{name}.svg")


if __name__ == "__main__":
    main()
