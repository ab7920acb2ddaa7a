"""Which figures of vLLM may stand beside ours."""

import io
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.anchors import ANCHORS, anchors_apply, show
from bench.shapes import config, write
from saccade.tools.bench.options import ON_GPU, BenchOptions


def test_anchors_stand_beside_the_same_chip_shapes_and_dtype_only() -> None:
    eight = config("qwen3-vl-8b")
    assert anchors_apply(eight, "NVIDIA H200", "bfloat16")
    assert not anchors_apply(eight, "NVIDIA H100 80GB HBM3", "bfloat16")
    assert not anchors_apply(eight, "NVIDIA H200", "float32")
    assert not anchors_apply(config("qwen3-vl-2b"), "NVIDIA H200", "bfloat16")
    assert not anchors_apply({"hidden_size": 64}, "NVIDIA H200", "bfloat16")


def test_every_anchor_belongs_to_a_workload_that_runs_on_a_gpu_by_default() -> None:
    assert {workload for workload, _ in ANCHORS} == set(ON_GPU)


def test_a_report_on_the_chip_is_shown_beside_vllm_and_in_brackets_at_another_scale(tmp_path: Path) -> None:
    write("qwen3-vl-8b", tmp_path)
    row = {"workload": "text_bs8", "metric": "step", "unit": "ms", "value": 4.5, "better": "lower"}
    for output_tokens, device, wanted in (
        (None, "NVIDIA H200", " <= 4.70 "),
        (64, "NVIDIA H200", "(<= 4.70)"),
        (None, "CPU", "no figures of vLLM"),
    ):
        document = {
            "title": "a title",
            "engine": {"model": str(tmp_path), "resolved_dtype": "bfloat16"},
            "machine": {"device": device},
            "options": json.loads(json.dumps(asdict(BenchOptions(output_tokens=output_tokens)))),
            "rows": [row],
        }
        out = io.StringIO()
        show(document, Console(file=out, width=120))
        assert wanted in out.getvalue()
