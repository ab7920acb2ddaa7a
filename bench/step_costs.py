"""What steps cost, out of a step log: how far off expectations were, and coefficients for `saccade plan`.

    saccade serve ... --step-log steps.jsonl          then some traffic
    python -m bench.step_costs steps.jsonl [--model FOLDER] [--warm 0.2] [--json costs.json]

The first `--warm` of the steps are left out of the error: the engine was learning. Coefficients are learnt
from all steps anew, as an engine does, from the prior of an H200.
"""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from saccade.checkpoint import open_checkpoint
from saccade.cli.options import option
from saccade.engine.cost_prior import H200, coefficients, read_model_size
from saccade.scheduler.cost_model import CostModel, Work
from saccade.tools.report import percentile
from saccade.worker.buckets import PREFILL_TOKENS

Line = dict[str, Any]


def kind_of(line: Line) -> str:
    if line["views"]:
        return "with views"
    return "with prompts" if line["prompts"] else "answers alone"


def timed(lines: list[Line]) -> list[tuple[list[Line], float, float]]:
    """Steps with what they were expected to take and took, ms; those without a time go with the next."""
    found, waiting = [], []
    for line in lines:
        waiting.append(line)
        if line["ms"] is not None:
            found.append((waiting, sum(one["expected_ms"] for one in waiting), line["ms"]))
            waiting = []
    return found


def work_of(line: Line, depth: int) -> Work:
    work = Work(rows=line["decodes"], context=line["context"], tokens=line["tokens"], pairs=line["pairs"])
    for patches, first, stop in line["views"]:
        work.add_view(patches, ((depth if stop is None else stop) - first) / depth)
    return work


def report_errors(steps: list[tuple[list[Line], float, float]]) -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    for lines, expected, took in steps:
        for kind in ("all", max(map(kind_of, lines))):
            errors[kind].append(abs(expected - took) / took)
    print(f"{'steps':>16} {'number':>7} {'mean error':>11} {'median':>8} {'p90':>8}")
    for kind, some in sorted(errors.items()):
        mean, p90 = sum(some) / len(some), percentile(some, 0.9)
        print(f"{kind:>16} {len(some):7} {mean:11.1%} {percentile(some, 0.5):8.1%} {p90:8.1%}")


@click.command(help=__doc__)
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@option("--model", default="embedded", help="whose steps they are")
@option("--warm", type=float, default=0.2, help="share of the steps that is left out of the error")
@option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="coefficients go there")
def main(log: Path, model: str, warm: float, out: Path | None) -> None:
    steps = timed([json.loads(line) for line in log.read_text().splitlines()])
    report_errors(steps[int(len(steps) * warm) :])
    network = read_model_size(open_checkpoint(model).config, 2)
    learnt = CostModel(coefficients(network, H200), sizes=PREFILL_TOKENS)
    for lines, _, took in steps:
        parts = [learnt.quantities(work_of(line, max(network.vision_depth, 1))) for line in lines]
        learnt.observe(tuple(map(sum, zip(*parts, strict=True))), took)
    print("learnt, ms: " + ", ".join(f"{k} {v:.3g}" for k, v in asdict(learnt.coefficients).items()))
    print(f"error while learning, at the end: {learnt.error:.1%}")
    if out is not None:
        out.write_text(json.dumps(asdict(learnt.coefficients)) + "\n")


if __name__ == "__main__":
    main()
