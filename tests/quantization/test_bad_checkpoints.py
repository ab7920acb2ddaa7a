"""Quantised checkpoints that cannot be used are refused before traffic: tensor and remedy are named."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.checkpoint import open_checkpoint
from saccade.errors import CheckpointError
from saccade.models.loader import load_model
from saccade.quantization.linear import check_capability
from saccade.quantization.weights import EightBitWeight, FourBitWeight, QuantizedWeight
from tests import checkpoints
from tests.quantization import formats

LAYER = "model.language_model.layers.1.self_attn.k_proj"

MAKERS: dict[str, Callable[[Path], Any]] = {
    "fp8": formats.hf_fp8,
    "int8": lambda folder: formats.compress(folder, formats.COMPRESSED["int8"]),
    "static": lambda folder: formats.compress(folder, formats.COMPRESSED["fp8 by tensor, static"]),
    "int4": lambda folder: formats.compress(folder, formats.COMPRESSED["int4, asymmetric"]),
    "awq": formats.awq,
    "gptq": lambda folder: formats.gptq(folder, desc_act=True),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in known:
            folder = tmp_path_factory.mktemp("bad") / "c"
            sizes = formats.WIDE if name == "fp8" else {}
            MAKERS[name](checkpoints.qwen3_vl(folder, num_hidden_layers=3, **sizes))
            known[name] = folder
        return known[name]

    return make


def load(folder: Path) -> None:
    load_model(open_checkpoint(str(folder)), torch.device("cpu"), torch.float32)


def put(last: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    """Another tensor in the place of one, or none."""

    def edit(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(f"{LAYER}.{last}"))
        if changed is not None:
            tensors[f"{LAYER}.{last}"] = changed

    return edit


def not_a_number(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = torch.nan
    return changed


@pytest.mark.parametrize(
    ("name", "last", "change", "message"),
    [
        ("fp8", "weight_scale_inv", lambda t: None, "weight is float8_e4m3fn, but .* has no scale"),
        ("fp8", "weight", lambda t: None, "lacks .*k_proj.weight; complete the folder"),
        ("fp8", "weight_scale_inv", lambda t: t[:, :1], r"weight_scale_inv is \[1, 1\], .* it \[1, 2\]"),
        ("fp8", "weight_scale_inv", not_a_number, "weight_scale_inv has scales that are not"),
        ("fp8", "weight", lambda t: t[:, :-1], r"weight is \[128, 255\], but .* makes it \[128, 256\]"),
        ("fp8", "weight", lambda t: t.float(), "weight is float32, but .* has float8_e4m3fn"),
        ("int8", "weight_scale", lambda t: None, "weight is int8, but the checkpoint has no scale for it"),
        ("int8", "weight_scale", lambda t: t[:-1], r"weight_scale is \[31, 1\], .*'channel' .* it \[32, 1\]"),
        ("int8", "weight_scale", not_a_number, "weight_scale has scales that are not finite"),
        ("int8", "weight_scale", lambda t: t.to(torch.int32), "weight_scale is int32, but scales are floats"),
        ("static", "input_scale", lambda t: None, "lacks .*k_proj.input_scale"),
        ("static", "input_scale", lambda t: torch.ones(2), "input_scale has 2 values, but one scales"),
        ("int4", "weight_zero_point", lambda t: None, "lacks .*k_proj.weight_zero_point"),
        ("int4", "weight_packed", lambda t: None, "lacks .*k_proj.weight_packed"),
        ("int4", "weight_packed", lambda t: t[:, 1:], r"weight_packed is \[32, 7\], .*'num_bits' 4 "),
        ("int4", "weight_shape", lambda t: t + 1, r"weight_shape says \[33, 65\]"),
        ("awq", "scales", lambda t: None, "lacks .*k_proj.scales"),
        ("awq", "qzeros", lambda t: t[:1], r"qzeros is \[1, 4\], but 'group_size' 32 .* makes it \[2, 4\]"),
        ("awq", "scales", not_a_number, "scales has scales that are not finite"),
        ("awq", "qweight", lambda t: t.to(torch.int64), "qweight is int64, but the format has int32"),
        ("gptq", "g_idx", lambda t: None, "lacks .*k_proj.g_idx"),
        ("gptq", "g_idx", lambda t: t[1:], r"g_idx is \[63\], not the groups of 64 columns"),
        ("gptq", "g_idx", lambda t: t + 1, "g_idx has the groups 1 to 2, but there are 2"),
        ("gptq", "g_idx", torch.zeros_like, "g_idx has groups of other than 32 columns"),
    ],
)  # fmt: skip
def test_a_bad_tensor_is_named(
    made: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    last: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
) -> None:
    folder = shutil.copytree(made(name), tmp_path / "c")
    formats.edit_tensors(folder, put(last, change))
    with pytest.raises(CheckpointError, match=message) as raised:
        load(folder)
    assert LAYER in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", {"quant_method": "bitsandbytes"}, "'bitsandbytes' .* not supported; use its unquantised"),
        ("fp8", {"fmt": "e5m2"}, "e4m3, not 'e5m2'"),
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_scale_inv is .* a block of 64 x 64 .* makes it"),
        ("fp8", {"weight_block_size": 128}, "'weight_block_size' is 128, not the rows and columns"),
        ("awq", {"group_size": 64}, r"scales is \[4, 64\], but 'group_size' 64 .* makes it \[2, 64\]"),
        ("awq", {"group_size": 0}, "'group_size' is 0"),
        ("awq", {"version": "gemv"}, "'gemv' is not supported"),
        ("awq", {"bits": 3}, "3 bits"),
        ("gptq", {"group_size": 16}, "'group_size' 16 of config.json makes it"),
        ("gptq", {"bits": 8}, "qweight is .*'bits' 8 of config.json makes it"),
        ("gptq", {"bits": 2}, "2 bits .* is not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin' is not supported"),
        ("int4", {"config_groups": {}}, "no config group .* targets it; correct 'config_groups'"),
        ("int4", {"config_groups": {"a": 4}}, "not groups by name"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse or rotated"),
        ("int4", {"transform_config": {"config_groups": {"R1": {}}}}, "sparse or rotated"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(
    made: Callable[[str], Path], tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(made(name), tmp_path / "c")
    settings = open_checkpoint(str(folder)).config["quantization_config"]
    formats.edit_config(folder, quantization_config={**settings, **change})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weights", {"num_bits": 3}, "weights of 3 bits"),
        ("weights", {"type": "float"}, "weights of 4 bits of the type 'float'"),
        ("weights", {"group_size": 32}, "weight_scale is .*'group_size' 32 of config.json makes it"),
        ("weights", {"strategy": "tensor_group"}, "'tensor_group'"),
        ("input_activations", {**formats.INT8, **formats.BY_TOKEN}, "input activations"),
        ("output_activations", {"num_bits": 8}, "quantised outputs"),
    ],
)  # fmt: skip
def test_bad_config_groups_are_named(
    made: Callable[[str], Path], tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(made("int4"), tmp_path / "c")
    settings = open_checkpoint(str(folder)).config["quantization_config"]
    group = settings["config_groups"]["group_0"]
    group = {**group, part: {**(group[part] or {}), **change}}
    formats.edit_config(folder, quantization_config={**settings, "config_groups": {"group_0": group}})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_an_8_bit_kv_cache_is_not_ignored_silently(
    made: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(made("int8"), tmp_path / "c")
    settings = open_checkpoint(str(folder)).config["quantization_config"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    formats.edit_config(folder, quantization_config={**settings, "kv_cache_scheme": scheme})
    load(folder)
    assert "kv_cache_scheme" in caplog.text
    assert "--kv-cache-dtype fp8" in caplog.text


def test_a_gpu_without_the_instructions_is_refused() -> None:
    fp8, int8 = (
        EightBitWeight(torch.zeros(8, 128).to(dtype), torch.ones(8), "token", torch.bfloat16)
        for dtype in (torch.float8_e4m3fn, torch.int8)
    )
    int4 = FourBitWeight.pack(torch.zeros(8, 128), torch.ones(1, 8), None, 128)
    weights: list[QuantizedWeight] = [fp8, int8, int4]
    for weight in weights:
        check_capability(weight, (8, 9))
        check_capability(weight, (9, 0))
        with pytest.raises(CheckpointError, match=r"capability 8\.\d, this one has 7\.5; use the 16-bit"):
            check_capability(weight, (7, 5))
    with pytest.raises(CheckpointError, match=r"FP8 weights need .* 8\.9, this one has 8\.6"):
        check_capability(fp8, (8, 6))
