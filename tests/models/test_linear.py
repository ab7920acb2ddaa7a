"""Linear methods: loading into fused partitions, and a quantisation scheme that touches no other file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.checkpoint import open_checkpoint
from saccade.errors import CheckpointError
from saccade.kernels.dispatch import DEFAULT_MODE
from saccade.kernels.gemm.split_k import Norm
from saccade.models.linear import LinearMethod, LinearSpec, UnquantizedLinear, copy_partition, plain
from saccade.models.loader import load_model
from saccade.models.registry import SCHEMES
from tests import checkpoints
from tests.models.harness import Walker, relative_error, text_story
from tests.models.toy_scheme import ToyLinear

CPU = torch.device("cpu")


def quantise(folder: Path) -> None:
    """The decoder's projections in the toy format; the head and the vision tower stay as they are."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "language_model" in name and name.endswith("_proj.weight")]:
        weight, layer = tensors.pop(name), name.removesuffix(".weight")
        scale = weight.abs().amax(1)
        tensors[f"{layer}.q"] = (weight / scale[:, None]).half().t().contiguous()
        tensors[f"{layer}.scale"] = scale.view(-1, 2)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_registered_scheme_runs_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.qwen3_vl(tmp_path)
    tokens = torch.randint(0, 200, (9,), generator=torch.Generator().manual_seed(3))
    plain = load_model(open_checkpoint(str(folder)), CPU, torch.float32)
    expected = Walker(plain).run(text_story(plain, tokens), 4)
    quantise(folder)
    monkeypatch.setitem(SCHEMES, "toy", "tests.models.toy_scheme")
    model = load_model(open_checkpoint(str(folder)), CPU, torch.float32)
    methods = {type(module) for path, module in model.named_modules() if isinstance(module, LinearMethod)}
    assert methods == {ToyLinear, UnquantizedLinear}
    assert relative_error(Walker(model).run(text_story(model, tokens), 4), expected) < 1e-2


def test_an_unknown_scheme_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoints.qwen3_vl(tmp_path)
    quantise(folder)
    with pytest.raises(CheckpointError, match="toy"):
        load_model(open_checkpoint(str(folder)), CPU, torch.float32)


def test_a_missing_scale_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.qwen3_vl(tmp_path)
    quantise(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.language_model.layers.1.self_attn.k_proj.scale"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    monkeypatch.setitem(SCHEMES, "toy", "tests.models.toy_scheme")
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.1\.self_attn\.k_proj\.scale"):
        load_model(open_checkpoint(str(folder)), CPU, torch.float32)


def test_fused_forms_equal_the_plain_product_and_what_follows() -> None:
    generator = torch.Generator().manual_seed(0)
    for bias in (False, True):
        method = UnquantizedLinear(LinearSpec("mlp.gate_up", 16, (8, 8), bias, CPU, torch.float32))
        method.fill_randomly(generator)
        if method.bias is not None:
            method.bias.normal_(generator=generator)
        x, residual = (torch.randn(3, 16, generator=generator) for _ in range(2))
        norm = Norm(torch.rand(16, generator=generator), 1e-6)
        y = method.forward(x, DEFAULT_MODE)
        assert torch.equal(method.apply_partition(x, 1, DEFAULT_MODE), y[:, 8:])
        for fused, separate in (
            (method.apply_silu_mul(x, DEFAULT_MODE), LinearMethod.apply_silu_mul(method, x, DEFAULT_MODE)),
            *zip(
                method.apply_add_norm(x, residual, norm, DEFAULT_MODE),
                LinearMethod.apply_add_norm(method, x, residual, norm, DEFAULT_MODE),
                strict=True,
            ),
        ):
            assert torch.equal(plain(fused), plain(separate))


def test_a_partition_of_another_shape_is_refused() -> None:
    spec = LinearSpec("qkv", 16, (8, 4, 4), False, CPU, torch.float32)
    parameter = torch.zeros(2, 16)
    copy_partition(parameter, spec, 1, torch.ones(2, 4), dim=1)
    assert parameter[:, 8:12].all()
    assert not parameter[:, :8].any()
    with pytest.raises(ValueError, match=r"is \[2, 5\], but config.json makes it \[2, 4\]"):
        copy_partition(parameter, spec, 2, torch.ones(2, 5), dim=1)
