"""Tiny quantised checkpoints: compressed-tensors and FP8 written by their own tools, AWQ and GPTQ by formula.

Each function takes the folder of a float32 checkpoint that it may change, and leaves a quantised one there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Quantize

IGNORED = ["lm_head", "re:.*visual.*"]  # as most recipes have it


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """The decoder's projections."""
    names = [name for name in tensors if "language_model" in name and name.endswith("_proj.weight")]
    return [name.removesuffix(".weight") for name in names]


def compress(
    folder: Path, groups: Mapping[str, Mapping[str, Any]], ignore: Sequence[str] = IGNORED, **options: Any
) -> None:
    """compressed-tensors: scales from the extremes, as a calibration without data has them."""
    kind = transformers.AutoModelForImageTextToText
    if "vision_config" not in json.loads((folder / "config.json").read_text()):
        kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    config = QuantizationConfig(config_groups=dict(groups), ignore=list(ignore), **options)
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and isinstance(module, nn.Linear):
            _calibrate(module, scheme.weights)
            if hasattr(module, "input_scale"):
                module.get_parameter("input_scale").data.fill_(0.05 if scheme.weights.type == "int" else 0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def _calibrate(module: nn.Linear, args: Any) -> None:
    weight = module.weight.detach()
    rows, columns = weight.shape
    if args.strategy == "tensor":
        low, high = weight.min().view(1), weight.max().view(1)
    elif args.strategy == "block":
        height, width = args.block_structure
        blocks = weight.view(rows // height, height, columns // width, width)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        size = args.group_size if args.strategy == "group" else columns
        low, high = (getattr(weight.view(rows, -1, size), name)(2) for name in ("amin", "amax"))
    scale, zero = calculate_qparams(low, high, args)
    module.get_parameter("weight_scale").data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.get_parameter("weight_zero_point").data.copy_(zero)


FLOAT8 = {"num_bits": 8, "type": "float"}
INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int"}
BY_TOKEN = {"strategy": "token", "dynamic": True}


def group(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, *targets: str
) -> dict[str, Any]:
    """An entry of `config_groups`; without targets for all linear layers."""
    return {"targets": list(targets or ["Linear"]), "weights": weights, "input_activations": inputs}


COMPRESSED: dict[str, dict[str, dict[str, Any]]] = {
    "fp8 by channel": {"a": group({**FLOAT8, "strategy": "channel"}, {**FLOAT8, **BY_TOKEN})},
    "fp8 by tensor, static": {"a": group({**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "tensor"})},
    "int8": {"a": group({**INT8, "strategy": "channel"}, {**INT8, **BY_TOKEN})},
    "int8, static": {"a": group({**INT8, "strategy": "channel"}, {**INT8, "strategy": "tensor"})},
    "int4": {"a": group({**INT4, "strategy": "group", "group_size": 32})},
    "int4, asymmetric": {"a": group({**INT4, "strategy": "group", "group_size": 64, "symmetric": False})},
    "int4 by channel": {"a": group({**INT4, "strategy": "channel"})},
    "int4 by channel, asymmetric": {"a": group({**INT4, "strategy": "channel", "symmetric": False})},
    "int8 packed": {"a": group({**INT8, "strategy": "group", "group_size": 32})},
    "mixed": {
        "a": group({**FLOAT8, "strategy": "channel"}, {**FLOAT8, **BY_TOKEN}, r"re:.*(q|o)_proj"),
        "b": group({**INT8, "strategy": "channel"}, {**INT8, **BY_TOKEN}, r"re:.*layers\.[02].*v_proj"),
        "c": group({**INT4, "strategy": "group", "group_size": 64}, None, r"re:.*(gate|up|down)_proj"),
    },
}
# Sizes that blocks of 128 divide: q has 256 rows, k and v 128.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
BLOCKS = {
    "a": group(
        {**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
        {**FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True},
    )
}


def hf_fp8(folder: Path, scale_dtype: torch.dtype = torch.bfloat16) -> None:
    """Written by transformers' own operation; scales in bfloat16, as Qwen ships them."""
    config = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    quantize = Fp8Quantize(type("Quantizer", (), {"quantization_config": config})())

    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in layers(tensors):
            made = quantize.convert({f"{layer}.weight": tensors.pop(f"{layer}.weight")})
            scale = made.pop(f"{layer}.weight_scale_inv")
            tensors.update(made, **{f"{layer}.weight_scale_inv": scale.to(scale_dtype)})

    edit_tensors(folder, edit)
    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.visual"],
    }
    edit_config(folder, quantization_config=settings)


def pack(values: Tensor, dim: int, bits: int = 4) -> Tensor:
    """int32 words of values along a dimension, low bits first."""
    last = values.to(torch.int64).movedim(dim, -1)
    words = (last.reshape(*last.shape[:-1], -1, 32 // bits) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


def round_groups(weight: Tensor, index: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, K], scale and zero [groups, N] of a weight [N, K] whose column k is in the group index[k]."""
    top, scales, zeros = (1 << bits) - 1, [], []
    for number in range(int(index.max()) + 1):
        part = weight[:, index == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = 2 * part.abs().amax(1) / top if symmetric else (high - low) / top
        scale = scale.half().float()
        scales.append(scale)
        middle = torch.full_like(scale, (top + 1) // 2)
        zeros.append(middle if symmetric else (-low / scale).round().clamp(1, top))
    scale, zero = torch.stack(scales), torch.stack(zeros)
    q = (weight / scale.t()[:, index] + zero.t()[:, index]).round().clamp(0, top)
    return q, scale, zero


def gptq(
    folder: Path,
    *,
    bits: int = 4,
    size: int = 32,
    desc_act: bool = False,
    symmetric: bool = True,
    version: int = 1,
    method: str = "gptq",
) -> dict[str, Tensor]:
    """By the formula W = (q - z) s; returns the dequantised weights by name."""
    dense: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(5)

    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in layers(tensors):
            weight = tensors.pop(f"{layer}.weight")
            columns = weight.shape[1]
            index = torch.arange(columns) // (size if size > 0 else columns)
            if desc_act:
                index = index[torch.randperm(columns, generator=generator)]
            q, scale, zero = round_groups(weight, index, bits, symmetric)
            dense[f"{layer}.weight"] = (q - zero.t()[:, index]) * scale.t()[:, index]
            tensors[f"{layer}.qweight"] = pack(q.t(), 0, bits)
            tensors[f"{layer}.qzeros"] = pack(zero - (1 if version == 1 else 0), 1, bits)
            tensors[f"{layer}.scales"] = scale.half()
            tensors[f"{layer}.g_idx"] = index.to(torch.int32)

    edit_tensors(folder, edit)
    settings = {
        "quant_method": method, "bits": bits, "group_size": size, "desc_act": desc_act, "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    edit_config(folder, quantization_config=settings)
    return dense


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word


def awq(folder: Path, size: int = 32) -> dict[str, Tensor]:
    dense: dict[str, Tensor] = {}

    def words(values: Tensor) -> Tensor:  # [., N]
        return pack(values.reshape(len(values), -1, 8)[:, :, list(AWQ_ORDER)].flatten(1), 1)

    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in layers(tensors):
            weight = tensors.pop(f"{layer}.weight")
            index = torch.arange(weight.shape[1]) // size
            q, scale, zero = round_groups(weight, index, 4, False)
            dense[f"{layer}.weight"] = (q - zero.t()[:, index]) * scale.t()[:, index]
            tensors[f"{layer}.qweight"] = words(q.t())
            tensors[f"{layer}.qzeros"] = words(zero)
            tensors[f"{layer}.scales"] = scale.half()

    edit_tensors(folder, edit)
    settings = {
        "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["visual"],
    }  # fmt: skip
    edit_config(folder, quantization_config=settings)
    return dense


def reorder(folder: Path) -> None:
    """compressed-tensors with `actorder`, which its tool no longer writes: the columns of every packed weight
    are permuted, each keeps its group."""
    generator = torch.Generator().manual_seed(6)

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            layer, packed = name.removesuffix(".weight_packed"), tensors[name]
            columns = int(tensors[f"{layer}.weight_shape"][1])
            order = torch.randperm(columns, generator=generator)
            q = ((packed.unsqueeze(2) >> torch.arange(0, 32, 4)) & 15).flatten(1)
            tensors[name] = pack(q[:, order], 1)
            size = columns // tensors[f"{layer}.weight_scale"].shape[1]
            tensors[f"{layer}.weight_g_idx"] = (order // size).to(torch.int32)

    edit_tensors(folder, edit)


def dequantized_copy(folder: Path, into: Path, dense: Mapping[str, Tensor]) -> Path:
    """The float32 checkpoint with the weights that the quantised one stands for."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    edit_config(into, quantization_config=None)
    config = json.loads((into / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if not name.endswith(("weight", "bias")):
                del tensors[name]
        tensors.update(dense)

    edit_tensors(into, edit)
    return into


def leave_activations_plain(folder: Path) -> None:
    """Activations are not rounded. A difference of 1e-7 between two programs moves a value near a rounding
    boundary by a whole step, and a token may change: what is equal in every situation is the rest."""
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))
