"""The scale of each workload, and the figures of vLLM at that scale on an H200.

vLLM 0.26.0 with its defaults (FlashAttention 3, torch.compile, CUDA graphs, prefix caching, chunked prefill)
on one NVIDIA H200, torch 2.11.0+cu130, Qwen3-VL-8B shapes with random weights, bfloat16, greedy, every answer
at its full length. `bar` is what Saccade has to reach. The figures are shown only beside a run on the same
chip with the same shapes and dtype, and in brackets if the run had another scale."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from saccade.tools.bench.options import BenchOptions, Workload


@dataclass(frozen=True)
class Scale:
    """How much of a workload is run."""

    requests: int = 1
    input_tokens: int = 64  # text tokens of one prompt
    output_tokens: int = 1
    size: tuple[int, int] = (1024, 1024)  # of images: width, height
    repeat: int = 3


SCALES = {
    "start_to_ready": Scale(repeat=1),
    "text_bs": Scale(input_tokens=512, output_tokens=256),
    "text_throughput": Scale(requests=256, input_tokens=512, output_tokens=256),
    "ttft_unique": Scale(repeat=10),
    "ttft_repeat": Scale(repeat=10),
    "vlm_unique": Scale(requests=128, output_tokens=64),
    "vlm_repeat": Scale(requests=128, output_tokens=64),
    "vlm_16img_x8q": Scale(requests=128, output_tokens=64),
    "mixed_load": Scale(input_tokens=130, output_tokens=64, repeat=1),
    "peer_text": Scale(requests=16, input_tokens=128, output_tokens=64),
    "peer_image": Scale(requests=16, input_tokens=32, output_tokens=32, size=(448, 448)),
    "peer_single": Scale(input_tokens=32, output_tokens=32),
}
ONE_TOKEN = ("ttft_unique", "ttft_repeat")  # the answer is one token by definition
ONE_REQUEST = (*ONE_TOKEN, "start_to_ready", "mixed_load", "peer_single")  # mixed_load has rates instead
UNREPEATED = ("mixed_load",)  # each phase has many samples


def anchored_scale(workload: Workload) -> Scale:
    scale = SCALES[workload.kind]
    if workload.kind == "text_bs":
        return replace(scale, requests=workload.batch)
    return replace(scale, size=workload.size) if workload.size is not None else scale


def chosen_scale(workload: Workload, options: BenchOptions) -> Scale:
    """The workload's scale with the user's changes. Numbers that are part of the name are not changed."""
    scale = anchored_scale(workload)
    kind = workload.kind
    if options.requests is not None and kind != "text_bs" and kind not in ONE_REQUEST:
        scale = replace(scale, requests=options.requests)
    if options.input_tokens is not None:
        scale = replace(scale, input_tokens=options.input_tokens)
    if options.output_tokens is not None and kind not in ONE_TOKEN:
        scale = replace(scale, output_tokens=options.output_tokens)
    if options.image_size is not None and workload.size is None:
        scale = replace(scale, size=options.image_size)
    if options.repeat is not None and kind not in UNREPEATED:
        scale = replace(scale, repeat=options.repeat)
    return scale


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
