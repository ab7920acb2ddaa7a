"""Loading: every tensor in its place, or an error that names it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.errors import CheckpointError
from saccade.models.decoder import Decoder
from saccade.models.families import FAMILIES
from saccade.models.interface import LanguageModel
from saccade.models.loader import find_slots, load_model
from saccade.models.registry import find_family
from tests import checkpoints, conftest

Q_PROJ = "model.language_model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.qwen3_vl(tmp_path / "vl")


def open_model(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LanguageModel:
    return load_model(open_checkpoint(str(folder)), "cpu", dtype, **options)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def configure(folder: Path, section: str | None, **values: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    (config[section] if section else config).update(values)
    file.write_text(json.dumps(config))


def same(one: LanguageModel, other: LanguageModel) -> bool:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_fused_projections_hold_their_parts_in_order(folder: Path) -> None:
    parameters = dict(open_model(folder).named_parameters())
    saved = load_file(folder / "model.safetensors")
    layer = "model.language_model.layers.2"
    qkv = torch.cat([saved[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([saved[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(parameters["layers.2.attention.qkv.weight"], qkv)
    assert torch.equal(parameters["layers.2.mlp.gate_up.weight"], gate_up)
    patches = saved["model.visual.patch_embed.proj.weight"]
    assert torch.equal(parameters["vision.patch_embedding.weight"], patches.flatten(1))


def test_parameters_require_no_gradients(folder: Path) -> None:
    model = open_model(folder)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_sharded_files_load_like_one(tmp_path: Path) -> None:
    single = checkpoints.qwen3_vl(tmp_path / "single")
    sharded = checkpoints.qwen3_vl(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert same(open_model(single), open_model(sharded))


def test_older_key_layout_loads_alike(folder: Path) -> None:
    expected = open_model(folder)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            older = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
            tensors[older] = tensors.pop(name)

    rewrite(folder, rename)
    assert same(open_model(folder), expected)


def test_checkpoint_becomes_bfloat16_while_loading(folder: Path) -> None:
    wide, narrow = open_model(folder), open_model(folder, torch.bfloat16)
    for (name, one), other in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other), name


def test_bfloat16_checkpoint_loads_as_float32(tmp_path: Path) -> None:
    model = open_model(checkpoints.qwen3(tmp_path, dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_tied_head_is_the_embedding_and_a_saved_one_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoints.qwen3(tmp_path, tied=True)
    expected = open_model(folder)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 64)}))
    model = open_model(folder)
    assert same(model, expected)
    assert not caplog.records
    tokens = torch.tensor([5, 7])
    assert model.logits(model.embed(tokens)).argmax(-1).tolist() == [5, 7]


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__(Q_PROJ))
    with pytest.raises(CheckpointError, match=Q_PROJ):
        open_model(folder)


def test_untied_checkpoint_without_a_head_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        open_model(folder)


def test_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(48, 64)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} is \[48, 64\].*\[64, 64\]"):
        open_model(folder)


def test_tensor_under_two_names_is_refused(folder: Path) -> None:
    older = Q_PROJ.replace("language_model.", "")
    rewrite(folder, lambda tensors: tensors.update({older: tensors[Q_PROJ].clone()}))
    with pytest.raises(CheckpointError, match="same weights"):
        open_model(folder)


def test_unexpected_tensors_are_reported_once_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.extra.a": torch.ones(1), "b": torch.ones(1)}))
    with caplog.at_level(logging.WARNING):
        open_model(folder)
    assert len(caplog.records) == 1
    assert "model.extra.a" in caplog.text
    assert "b" in caplog.text


def test_quantised_tensor_and_quantised_config_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} is F8_E4M3"):
        open_model(folder)
    configure(folder, None, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="bitsandbytes"):
        open_model(folder)


def test_damaged_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_model(folder)


def test_progress_goes_to_a_terminal_on_stderr_only(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_model(folder, progress=True)
    assert capfd.readouterr().err == ""  # a log file gets no bar
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as the bar can tell
    open_model(folder, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading weights" in err
    open_model(folder)
    assert capfd.readouterr().err == ""


def test_dummy_weights_need_no_files_and_repeat(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    one = open_model(folder, torch.bfloat16, load_format="dummy")
    parameters = dict(one.named_parameters())
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    assert (parameters["layers.0.attention.q_norm.weight"] == 1).all()
    assert (parameters["vision.layers.0.attention_norm.bias"] == 0).all()
    assert 0.015 < parameters["layers.0.mlp.down.weight"].float().std() < 0.025
    assert same(one, open_model(folder, torch.bfloat16, load_format="dummy"))


@pytest.mark.parametrize("make", list(conftest.FAMILIES.values()), ids=list(conftest.FAMILIES))
def test_every_saved_tensor_has_one_slot(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path)
    checkpoint = open_checkpoint(str(folder))
    model = open_model(folder)
    slots = find_slots(model, find_family(checkpoint.architecture).WEIGHTS)
    saved = set(load_file(folder / "model.safetensors"))
    named = [name for slot in slots for name in slot.names if name in saved]
    assert sorted(named) == sorted(saved)
    assert len(named) == len(slots)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="FancyForCausalLM") as caught:
        find_family("FancyForCausalLM")
    assert all(name in caught.value.message for name in FAMILIES)


def test_unknown_architecture_names_the_nearest_known_one() -> None:
    with pytest.raises(CheckpointError, match="the nearest is Qwen3ForCausalLM;"):
        find_family("Qwen33ForCausalLM")
    with pytest.raises(CheckpointError, match="not known; known are"):
        find_family("Zebra")


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("text_config", {"hidden_act": "relu2"}, "relu2"),
        ("text_config", {"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "linear_attention"),
        ("text_config", {"layer_types": ["full_attention"]}, "1 layers of 4"),
        ("text_config", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("text_config", {"rope_parameters": {"mrope_section": [4, 2, 1]}}, r"\[4, 2, 1\].*8 frequencies"),
        ("text_config", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor.*0.5"),
        (
            "text_config",
            {"rope_parameters": {"mrope_section": [4, 2, 2], "mrope_interleaved": False}},
            "mrope_interleaved",
        ),
        ("text_config", {"num_hidden_layers": 0}, "num_hidden_layers.*0"),
        ("text_config", {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ("vision_config", {"hidden_act": "swish"}, "swish"),
        ("vision_config", {"num_position_embeddings": 63}, "63.*square"),
        ("vision_config", {"deepstack_visual_indexes": [0, 9]}, r"\[0, 9\]"),
        ("vision_config", {"out_hidden_size": 32}, "32.*64"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        (None, {"vision_config": None}, "vision_config"),
    ],
)
def test_configuration_that_is_not_understood_is_refused_by_name(
    folder: Path, section: str | None, values: dict[str, Any], told: str
) -> None:
    checkpoint: Checkpoint = open_checkpoint(str(folder))
    config = checkpoint.config if section is None else checkpoint.config[section]
    config.update(values)
    with pytest.raises(CheckpointError, match=told):
        load_model(checkpoint, "cpu", torch.float32, "dummy")


def test_older_rotary_fields_mean_the_same(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    text = checkpoint.config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    older, newer = load_model(checkpoint, "cpu", torch.float32), open_model(folder)
    assert isinstance(older, Decoder)
    assert isinstance(newer, Decoder)
    positions = torch.arange(30).view(3, 10)
    assert torch.equal(older.rotary(positions, older.mode).cos, newer.rotary(positions, newer.mode).cos)
