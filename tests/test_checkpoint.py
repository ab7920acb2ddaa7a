"""A model folder, read and checked; what is wrong with it is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.errors import CheckpointError
from saccade.inputs.qwen_vl_processor import Qwen3VLVideoProcessor
from tests.inputs.tiny_tokenizer import IMAGE, TEMPLATE, VIDEO, config, token_id, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-vl")


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    content.update(values)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def reopen(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder))


def test_a_folder_is_read_completely(folder: Path) -> None:
    found = reopen(folder)
    assert found.name == "tiny-vl"
    assert found.architecture == "Qwen3VLForConditionalGeneration"
    assert found.config == config()
    assert found.text_config["max_position_embeddings"] == found.max_position_embeddings == 4096
    assert found.image is not None
    assert (found.image.min_pixels, found.image.max_pixels) == (4096, 262144)
    assert (found.image.patch_size, found.image.merge_size, found.image.temporal_patch_size) == (16, 2, 2)
    assert found.image.mean == found.image.std == (0.5, 0.5, 0.5)
    assert isinstance(found.video, Qwen3VLVideoProcessor)
    assert (found.video.fps, found.video.min_frames, found.video.frame_tokens) == (2.0, 4, None)
    assert found.eos_ids == (token_id("<|im_end|>"), token_id("<|endoftext|>"))
    assert found.bos_id == token_id("<|endoftext|>")
    assert found.image_token_id == token_id("<|image_pad|>")
    assert found.vision_end_id == token_id("<|vision_end|>")
    assert found.chat_template == TEMPLATE
    assert found.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert found.generation == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}


def test_a_text_model_has_no_image_processor_and_needs_no_tokenizer_to_open(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 9,
                "max_position_embeddings": 8,
                "eos_token_id": 0,
            }
        )
    )
    found = reopen(tmp_path)
    assert (found.image, found.video, found.tokenizer_file, found.chat_template) == (None, None, None, None)
    assert found.eos_ids == (0,)
    assert found.bos_id is None
    assert found.generation == {}


def test_older_area_limits_are_read(folder: Path) -> None:
    change(folder / "preprocessor_config.json", size=..., min_pixels=1024, max_pixels=2048)
    found = reopen(folder).image
    assert found is not None
    assert (found.min_pixels, found.max_pixels) == (1024, 2048)


def test_one_processor_file_is_read_too(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    (folder / "video_preprocessor_config.json").unlink()
    change(
        folder / "processor_config.json",
        image_processor={**IMAGE, "patch_size": 8},
        video_processor={**VIDEO, "patch_size": 8},
    )
    found = reopen(folder)
    assert found.image is not None
    assert found.video is not None
    assert found.image.patch_size == found.video.patch_size == 8


def test_the_frame_cap_is_read(folder: Path) -> None:
    change(folder / "video_preprocessor_config.json", cap_pixels_per_frame=True, max_video_tokens=99)
    found = reopen(folder).video
    assert isinstance(found, Qwen3VLVideoProcessor)
    assert found.frame_tokens == 99


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("preprocessor_config.json", {"resample": 2}, "bicubic"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize"),
        ("preprocessor_config.json", {"do_rescale": False}, "do_rescale"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize"),
        ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop"),
        ("preprocessor_config.json", {"do_pad": True}, "do_pad"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "image_mean"),
        ("preprocessor_config.json", {"patch_size": 0}, "patch_size"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 9, "longest_edge": 4}}, "at least 9"),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ("video_preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.5]}, "differ"),
        ("video_preprocessor_config.json", {"num_frames": 8}, "num_frames"),
        ("video_preprocessor_config.json", {"video_processor_type": "X"}, "is a X"),
        ("config.json", {"architectures": []}, "architecture"),
        ("config.json", {"text_config": {"vocab_size": 5}}, "max_position_embeddings"),
        ("config.json", {"image_token_id": "x"}, "image_token_id"),
        ("generation_config.json", {"temperature": "hot"}, "temperature"),
    ],
)
def test_what_is_not_implemented_or_wrong_is_refused_by_name(
    folder: Path, file: str, values: dict[str, Any], named: str
) -> None:
    change(folder / file, **values)
    with pytest.raises(CheckpointError, match=named):
        reopen(folder)


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        reopen(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        reopen(folder)


@pytest.mark.parametrize("where", ["chat_template.json", "tokenizer_config.json", "named"])
def test_the_chat_template_is_found_in_its_older_places(folder: Path, where: str) -> None:
    (folder / "chat_template.jinja").unlink()
    value: Any = "T"
    if where == "named":
        value = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]
    file = "chat_template.json" if where == "chat_template.json" else "tokenizer_config.json"
    change(folder / file, chat_template=value)
    assert reopen(folder).chat_template == "T"


def test_weights_in_one_file_or_by_an_index(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        reopen(folder).weight_files()
    (folder / "model.safetensors").write_bytes(b"")
    assert [file.name for file in reopen(folder).weight_files()] == ["model.safetensors"]
    for name in ("b.safetensors", "a.safetensors"):
        (folder / name).write_bytes(b"")
    change(
        folder / "model.safetensors.index.json",
        weight_map={"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"},
    )
    assert [file.name for file in reopen(folder).weight_files()] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    "file",
    [
        "../a.safetensors",
        "/etc/a.safetensors",
        "x/a.safetensors",
        "..",
        "..\\a.safetensors",
        "a.bin",
        "gone.safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder_or_to_other_formats(folder: Path, file: str) -> None:
    change(folder / "model.safetensors.index.json", weight_map={"x": file})
    with pytest.raises(CheckpointError, match="names"):
        reopen(folder).weight_files()


def test_pickled_weights_are_refused_with_the_remedy(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="convert the checkpoint to safetensors"):
        reopen(folder).weight_files()


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_a_missing_folder_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        open_checkpoint(model)


def test_a_hub_id_offline_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="give its folder"):
        open_checkpoint("nobody/nothing-at-all")


def test_an_invalid_hub_id_is_named() -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        open_checkpoint("not a hub id!")


def test_reading_a_checkpoint_needs_no_torch() -> None:
    program = "import sys, saccade.inputs.processor, saccade.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_checkpoint_with_do_sample_off_is_greedy(folder: Path) -> None:
    change(folder / "generation_config.json", do_sample=False)
    assert reopen(folder).generation["temperature"] == 0
    change(folder / "generation_config.json", do_sample=True)
    assert reopen(folder).generation["temperature"] == 0.7
    change(folder / "generation_config.json", do_sample=..., temperature=...)
    assert "temperature" not in reopen(folder).generation
