"""The report of `saccade bench`: a table, and JSON with every sample."""

import json
from dataclasses import asdict, dataclass

from rich.table import Table

from saccade.tools.bench.anchors import ANCHORS, SOURCE, anchored_scale, chosen_scale
from saccade.tools.bench.options import BenchOptions, parse_workload
from saccade.tools.bench.workloads import Row
from saccade.tools.environment import RunInfo
from saccade.tools.report import figure, output_console, write_json


@dataclass(frozen=True)
class BenchReport:
    run: RunInfo
    options: BenchOptions
    rows: tuple[Row, ...]
    unmeasured: tuple[str, ...]  # workloads that a failure or an interrupt cut off
    anchored: bool  # vLLM's figures may be shown beside ours


def print_report(report: BenchReport) -> None:
    console = output_console(report.options.json)
    console.print(_table(report))
    if report.unmeasured:
        console.print(f"Not measured: {', '.join(report.unmeasured)}.")
    if report.anchored:
        console.print(f"vLLM: {SOURCE}; in brackets: measured at another scale than ours.")


def _table(report: BenchReport) -> Table:
    table = Table(title=report.run.title, title_justify="left")
    table.add_column("workload")
    table.add_column("metric")
    table.add_column("saccade" if report.anchored else "value", justify="right")
    if report.anchored:
        table.add_column("vLLM", justify="right")
        table.add_column("bar", justify="right")
    table.add_column("spread", justify="right")
    table.add_column("scale")
    table.add_column("note")
    previous, shown = "", ("", "")
    for row in report.rows:
        if previous and row.workload != previous:
            table.add_section()
        name = row.workload if row.workload != previous else ""
        scale = _parameters(row)
        cells = [name, row.metric, f"{figure(row.value)} {row.unit}"]
        cells += _anchor_cells(row, report.options) if report.anchored else []
        table.add_row(*cells, _spread(row), scale if (row.workload, scale) != shown else "", row.note)
        previous, shown = row.workload, (row.workload, scale)
    return table


def _anchor_cells(row: Row, options: BenchOptions) -> list[str]:
    anchor = ANCHORS.get((row.workload, row.metric))
    if anchor is None:
        return ["", ""]
    workload = parse_workload(row.workload)
    same = chosen_scale(workload, options) == anchored_scale(workload)
    vllm = f"{figure(anchor.vllm)} {row.unit}"
    if anchor.bar is None:
        return [vllm if same else f"({vllm})", ""]
    reached = row.value <= anchor.bar if row.better == "lower" else row.value >= anchor.bar
    bar = f"{'<=' if row.better == 'lower' else '>='} {figure(anchor.bar)}"
    if not same:
        return [f"({vllm})", f"({bar})"]
    return [vllm, f"[{'green' if reached else 'red'}]{bar}[/]"]


def _spread(row: Row) -> str:
    if len(row.samples) < 2 or row.workload == "mixed_load":
        return ""
    return f"{figure(min(row.samples))} - {figure(max(row.samples))}"


def _parameters(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.parameters.items())


def write_report(report: BenchReport) -> None:
    fields = asdict(report)
    document = {"title": report.run.title, **fields.pop("run"), **fields}
    write_json(report.options.json, json.dumps(document, indent=2, allow_nan=False) + "\n")
