"""Names and scales of workloads."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import write
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig, VisionCache
from saccade.errors import ConfigError
from saccade.inputs.tokenizer import Tokenizer
from saccade.tools.bench.options import (
    ON_CPU,
    ON_GPU,
    BenchOptions,
    chosen_scale,
    default_scale,
    default_workloads,
    parse_workload,
)
from saccade.tools.bench.server import engine_flags


def test_numbers_are_read_from_the_names() -> None:
    assert parse_workload("text_bs32").batch == 32
    assert parse_workload("ttft_unique_1920x1080").size == (1920, 1080)
    assert parse_workload("vlm_16img_x8q").kind == "vlm_16img_x8q"


@pytest.mark.parametrize(
    "name", ["", "text_bs", "text_bs0", "text_bs{N}", "ttft_unique_10", "vlm", "TEXT_BS1"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="vlm_unique"):
        BenchOptions(workloads=(name,))


def test_the_scales_of_the_anchors_are_the_default() -> None:
    step = chosen_scale(parse_workload("text_bs8"), BenchOptions())
    assert (step.requests, step.input_tokens, step.output_tokens) == (8, 512, 256)
    vlm = chosen_scale(parse_workload("vlm_unique"), BenchOptions())
    assert (vlm.requests, vlm.size, vlm.output_tokens) == (128, (1024, 1024), 64)
    for name in (*ON_CPU, *ON_GPU):
        workload = parse_workload(name)
        assert chosen_scale(workload, BenchOptions()) == default_scale(workload)


def test_what_a_name_says_is_not_changed_by_an_option() -> None:
    options = BenchOptions(requests=2, output_tokens=5, image_size=(64, 64), repeat=1)
    assert chosen_scale(parse_workload("text_bs8"), options).requests == 8
    assert chosen_scale(parse_workload("ttft_unique_448x448"), options).size == (448, 448)
    assert chosen_scale(parse_workload("ttft_repeat"), options).output_tokens == 1
    assert chosen_scale(parse_workload("vlm_unique"), options).requests == 2


@pytest.mark.parametrize(
    "field", ["requests", "input_tokens", "output_tokens", "repeat", "warmup", "phase_seconds", "text_rate"]
)
def test_nonsense_scales_are_refused_by_name(field: str) -> None:
    nonsense: dict[str, Any] = {field: -1}
    with pytest.raises(ConfigError, match=field):
        BenchOptions(**nonsense)


def test_a_text_model_gets_text_workloads_only() -> None:
    names = default_workloads(on_gpu=True, vision=False)
    assert "text_throughput" in names
    assert not [name for name in names if parse_workload(name).needs_vision]


def test_a_server_gets_every_option_of_the_engine() -> None:
    cache = VisionCache(gpu=5)
    config = EngineConfig(model="m", prefix_caching=False, overlap=True, num_blocks=7, vision_cache=cache)
    flags = engine_flags(config)
    assert "--no-prefix-caching" in flags
    assert "--overlap" in flags
    assert flags[flags.index("--num-blocks") + 1] == "7"
    assert flags[flags.index("--vision-cache") + 1] == "gpu=5,host=0,disk=0"
    assert "--model" not in flags
    assert "--kv-cache-bytes" not in flags


def test_the_shapes_folder_is_a_checkpoint_whose_every_plain_token_is_visible(tmp_path: Path) -> None:
    write("qwen3-vl-8b", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.vocab_size == 151_936
    assert checkpoint.image is not None
    tokens = Tokenizer.load(checkpoint)
    assert tokens.id_of("<|image_pad|>") == checkpoint.image_token_id == 151_655
    assert tokens.encode("<|im_end|>") == [151_645] == [checkpoint.eos_ids[0]]
    assert all(tokens.decode([index]) for index in (300, 75_000, 151_642))
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["num_hidden_layers"] == 36
