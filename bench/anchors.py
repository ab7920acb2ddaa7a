"""Shows figures of `saccade bench --json FILE` beside vLLM's on an H200: `python -m bench.anchors FILE...`.

vLLM 0.26.0 with its defaults (FlashAttention 3, torch.compile, CUDA graphs, prefix caching, chunked prefill)
on one NVIDIA H200, torch 2.11.0+cu130, Qwen3-VL-8B shapes with random weights, bfloat16, greedy, every answer
at its full length. `bar` is what Saccade has to reach. The figures are shown only beside a run on the same
chip with the same shapes and dtype, and in brackets if the run had another scale."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from saccade.checkpoint import open_checkpoint
from saccade.tools.bench.options import BenchOptions, chosen_scale, default_scale, parse_workload
from saccade.tools.report import figure, output_console, table


class Anchor(NamedTuple):
    vllm: float
    bar: float | None  # None: no bar of its own


_STORED = json.loads(Path(__file__).with_name("anchors.json").read_text(encoding="utf-8"))
SOURCE: str = _STORED["source"]
# (workload, metric) -> figures in the row's unit
ANCHORS = {
    (workload, metric): Anchor(*figures)
    for workload, metrics in _STORED["figures"].items()
    for metric, figures in metrics.items()
}


def anchors_apply(config: Mapping[str, Any], device_name: str, dtype: str) -> bool:
    """Whether the figures may be shown beside a run of this configuration on this device."""
    text, vision = config.get("text_config"), config.get("vision_config")
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        return False
    shaped = all(text.get(key) == value for key, value in _STORED["text_shape"].items())
    shaped = shaped and all(vision.get(key) == value for key, value in _STORED["vision_shape"].items())
    return shaped and "H200" in device_name and dtype == "bfloat16"


def cells(row: Mapping[str, Any], options: BenchOptions) -> list[str]:
    """vLLM's figure and the bar of one row of the JSON."""
    anchor = ANCHORS.get((row["workload"], row["metric"]))
    if anchor is None:
        return ["", ""]
    workload = parse_workload(row["workload"])
    same = chosen_scale(workload, options) == default_scale(workload)
    vllm = f"{figure(anchor.vllm)} {row['unit']}"
    if anchor.bar is None:
        return [vllm if same else f"({vllm})", ""]
    lower = row["better"] == "lower"
    reached = row["value"] <= anchor.bar if lower else row["value"] >= anchor.bar
    bar = f"{'<=' if lower else '>='} {figure(anchor.bar)}"
    if not same:
        return [f"({vllm})", f"({bar})"]
    return [vllm, f"[{'green' if reached else 'red'}]{bar}[/]"]


def show(document: Mapping[str, Any], console: Console) -> None:
    engine = document["engine"]
    config = open_checkpoint(engine["model"]).config
    if not anchors_apply(config, str(document["machine"]["device"]), engine["resolved_dtype"]):
        console.print(f"{document['title']}: no figures of vLLM for this model, dtype and device")
        return
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in document["options"].items()
    }
    options = BenchOptions(**given)
    rows = [
        [row["workload"], row["metric"], f"{figure(row['value'])} {row['unit']}", *cells(row, options)]
        for row in document["rows"]
    ]
    heads = ("workload", "metric", "saccade", "vLLM", "bar")
    console.print(table(document["title"], heads, rows, left=("workload", "metric")))
    console.print(f"vLLM: {SOURCE}; in brackets: measured at another scale than ours.")


def main() -> None:
    for name in sys.argv[1:]:
        show(json.loads(Path(name).read_text(encoding="utf-8")), output_console())


if __name__ == "__main__":
    main()
