"""The weights read from each format equal, bit for bit, what the format's own tool makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file
from torch import Tensor

from saccade.checkpoint import open_checkpoint
from saccade.kernels.dispatch import DEFAULT_MODE
from saccade.kernels.gemm.split_k import Epilogue
from saccade.models.linear import LinearMethod, UnquantizedLinear
from saccade.models.loader import load_model
from saccade.models.registry import find_family
from saccade.quantization.linear import QuantizedLinear
from saccade.quantization.weights import (
    Activation,
    DenseWeight,
    EightBitWeight,
    FourBitWeight,
    SeparateWeights,
    fuse,
)
from tests import checkpoints
from tests.quantization import formats

CPU = torch.device("cpu")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """By the checkpoint's name of a projection: what our model multiplies by."""
    checkpoint = open_checkpoint(str(folder))
    model = load_model(checkpoint, CPU, torch.float32)
    names = find_family(checkpoint.architecture).WEIGHTS
    weights: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, LinearMethod):
            assert isinstance(module, UnquantizedLinear | QuantizedLinear)
            weight = module.weight
            dense = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
            parts = torch.split(dense, list(module.spec.partitions))
            for spellings, part in zip(names.names(path), parts, strict=True):
                weights[f"{spellings[0]}.weight"] = part
    return weights


def transformers_weights(folder: Path) -> dict[str, Tensor]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))  # decompresses
    return {name: weight.detach() for name, weight in model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], quantized: int) -> None:
    decoder = [name for name in expected if name.endswith("_proj.weight") and "language_model" in name]
    assert len(decoder) == quantized
    for name in decoder:
        assert torch.equal(found[name], expected[name]), name
    for name in ("lm_head.weight", "model.visual.blocks.0.attn.qkv.weight"):
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("name", formats.COMPRESSED)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3)
    formats.compress(folder, formats.COMPRESSED[name])
    assert_equal(read_weights(folder), transformers_weights(folder), 21)


def test_compressed_tensors_in_blocks(tmp_path: Path) -> None:
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3, **formats.WIDE)
    formats.compress(folder, formats.BLOCKS)
    assert_equal(read_weights(folder), transformers_weights(folder), 21)


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32, torch.float8_e8m0fnu], ids=str)
def test_hf_fp8(tmp_path: Path, scale: torch.dtype) -> None:
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3, **formats.WIDE)
    formats.hf_fp8(folder, scale)
    assert_equal(read_weights(folder), transformers_weights(folder), 21)


def test_hf_fp8_whose_blocks_the_rows_do_not_fill(tmp_path: Path) -> None:
    """64 rows of q, 32 of k and v: fused, a block would belong to several projections."""
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3)
    dense: dict[str, Tensor] = {}

    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in formats.layers(tensors):
            scale = torch.rand(1, 1) / 100
            values = (tensors[f"{layer}.weight"] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            dense[f"{layer}.weight"] = values.float() * scale
            tensors.update({f"{layer}.weight": values, f"{layer}.weight_scale_inv": scale})

    formats.edit_tensors(folder, edit)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    formats.edit_config(folder, quantization_config=settings)
    found = read_weights(folder)
    assert all(torch.equal(found[name], weight) for name, weight in dense.items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"version": 2, "symmetric": False},
        {"symmetric": False, "size": 64},
        {"desc_act": True},
        {"desc_act": True, "symmetric": False, "version": 2},
        {"size": -1},
        {"bits": 8},
        {"bits": 8, "desc_act": True, "symmetric": False},
        {"method": "auto-round"},
    ],
    ids=str,
)
def test_gptq(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3)
    dense = formats.gptq(folder, **options)
    found = read_weights(folder)
    assert len(dense) == 21
    assert all(torch.equal(found[name], weight) for name, weight in dense.items())


def test_awq(tmp_path: Path) -> None:
    """Against the formula, and against the unpacking that compressed-tensors has for this format."""
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3)
    dense = formats.awq(folder)
    found = read_weights(folder)
    assert len(dense) == 21
    assert all(torch.equal(found[name], weight) for name, weight in dense.items())
    tensors = AutoAWQConverter(group_size=32, ignore=["re:.*visual.*"]).process(
        load_file(folder / "model.safetensors")
    )
    name = "model.language_model.layers.1.mlp.down_proj"
    args = {**formats.INT4, "strategy": "group", "group_size": 32, "symmetric": False}
    lasts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
    state = {last: tensors[f"{name}.{last}"] for last in lasts}
    state["weight_scale"] = state["weight_scale"].float()
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert torch.equal(found[f"{name}.weight"], weight)


def test_auto_round_in_the_layout_of_awq(tmp_path: Path) -> None:
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3)
    dense = formats.awq(folder)
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False,
                "packing_format": "auto_round:auto_awq"}  # fmt: skip
    formats.edit_config(folder, quantization_config=settings)
    found = read_weights(folder)
    assert all(torch.equal(found[name], weight) for name, weight in dense.items())


def test_compressed_tensors_with_columns_in_another_order(tmp_path: Path) -> None:
    """Each column keeps its values and its group: unordered, the weights are those of before."""
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3)
    formats.compress(folder, formats.COMPRESSED["int4"])
    before = read_weights(folder)
    formats.reorder(folder)
    after = read_weights(folder)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 21
    for name in changed:
        assert torch.equal(before[name].sort(1).values, after[name].sort(1).values)


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("strategy", ["token", "group", "static"])
def test_activations_are_rounded_as_compressed_tensors_does(kind: str, strategy: Activation) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 256, generator=generator) * torch.tensor([0.01, 1.0, 7.0, 300.0, 0.0])[:, None]
    dtype = torch.int8 if kind == "int" else torch.float8_e4m3fn
    given = torch.tensor([0.02]) if strategy == "static" else None
    settings: dict[str, Any] = {"strategy": strategy, "dynamic": True}
    if strategy == "group":
        settings["group_size"] = 128
    if strategy == "static":
        settings = {"strategy": "tensor", "dynamic": False}
    args = QuantizationArgs(num_bits=8, type=kind, **settings)
    scale, zero = given, None
    if given is None:
        scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Linear(1, 1))
    expected = fake_quantize(x[None], scale, zero, args)[0]
    weight = EightBitWeight(torch.eye(256).to(dtype), torch.ones(256), strategy, x.dtype, given)
    found = DenseWeight.of(weight, x.dtype).product(x, Epilogue(), DEFAULT_MODE).out
    assert torch.equal(found, expected)


def eight_bits(rows: int, dtype: torch.dtype = torch.int8, blocked: bool = False) -> EightBitWeight:
    values = torch.randint(-100, 100, (rows, 256)).to(dtype)
    scale = torch.rand(-(-rows // 128), 2) if blocked else torch.rand(rows)
    return EightBitWeight(values, scale, "token", torch.float32)


def four_bits(rows: int, order: Tensor | None = None, zero: bool = False) -> FourBitWeight:
    zeros = torch.randint(0, 16, (8, rows), dtype=torch.uint8) if zero else None
    return FourBitWeight.pack(torch.randint(0, 16, (rows, 256)), torch.rand(8, rows), zeros, 32, order)


@pytest.mark.parametrize(
    ("weights", "separate"),
    [
        ([eight_bits(24), eight_bits(8)], False),
        ([eight_bits(24), eight_bits(8, torch.float8_e4m3fn)], True),
        ([eight_bits(256, blocked=True), eight_bits(96, blocked=True)], False),
        ([eight_bits(96, blocked=True), eight_bits(256, blocked=True)], True),
        ([four_bits(24), four_bits(8)], False),
        ([four_bits(24, torch.arange(256).flip(0)), four_bits(8, torch.arange(256).flip(0))], False),
        ([four_bits(24, torch.arange(256).flip(0)), four_bits(8)], True),
        ([four_bits(24, zero=True), four_bits(8)], True),
        ([four_bits(24), eight_bits(8), DenseWeight(torch.rand(4, 256))], True),
    ],
)
def test_projections_are_fused_where_one_weight_can_hold_them(weights: list[Any], separate: bool) -> None:
    fused = fuse(weights)
    assert isinstance(fused, SeparateWeights) is separate
    assert fused.shape == (sum(weight.shape[0] for weight in weights), 256)
    dense = torch.cat([weight.dequantize(torch.float32) for weight in weights])
    assert torch.equal(fused.dequantize(torch.float32), dense)
    x = torch.randn(3, 256)
    products = [weight.product(x, Epilogue(), DEFAULT_MODE).out for weight in weights]
    bias = torch.rand(dense.shape[0])
    expected = torch.cat(products, 1) + bias
    assert torch.allclose(fused.product(x, Epilogue(bias), DEFAULT_MODE).out, expected, atol=1e-4, rtol=1e-4)
    partials = fused.partials(x, bias, DEFAULT_MODE)
    assert isinstance(partials, Tensor)
    assert torch.allclose(partials, expected, atol=1e-4, rtol=1e-4)


def test_layers_without_scales_stay_unquantised(tmp_path: Path) -> None:
    """Whatever the ignore list says: here it names nothing."""
    folder = checkpoints.qwen3_vl(tmp_path / "c", num_hidden_layers=3)
    formats.compress(folder, formats.COMPRESSED["int8"])
    checkpoint = open_checkpoint(str(folder))
    settings = {**checkpoint.config["quantization_config"], "ignore": []}
    formats.edit_config(folder, quantization_config=settings)
    model = load_model(open_checkpoint(str(folder)), CPU, torch.float32)
    kinds: dict[str, set[type]] = {}
    for path, module in model.named_modules():
        if isinstance(module, LinearMethod):
            kinds.setdefault(path.split(".")[0], set()).add(type(module))
    assert kinds == {"layers": {QuantizedLinear}, "vision": {UnquantizedLinear}, "head": {UnquantizedLinear}}
