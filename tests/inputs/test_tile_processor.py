"""The processors of LLaVA-1.5 and Idefics3 equal transformers' in prompt, token count and pixel values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from saccade.checkpoint import open_checkpoint
from saccade.encoder.preprocess import Preprocessor, fixed_point_weights
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import CheckpointError, InvalidValue, MediaRefused
from saccade.inputs.image_processor import ImageProcessor
from saccade.inputs.processor import InputProcessor
from saccade.inputs.tile_processor import CLIPImageProcessor, Idefics3ImageProcessor
from saccade.lod.detail import DetailRequest
from saccade.lod.types import LodParams
from saccade.models.loader import load_model
from saccade.sampling_params import SamplingParams

ASK = SamplingParams(max_tokens=1)
VISION = {"vision_config": {"image_size": 56, "patch_size": 14}, "scale_factor": 2}
CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
IDEFICS3 = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
ORACLES: dict[str, tuple[type[ImageProcessor], dict[str, Any], Any]] = {
    "clip": (CLIPImageProcessor, CLIP, CLIPImageProcessorPil),
    "idefics3": (Idefics3ImageProcessor, IDEFICS3, Idefics3ImageProcessorPil),
}


def sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """Widths and heights from 1 to 4,096, small ones more often, within the limit of ratios."""
    rng = np.random.default_rng(seed)
    found = [(1, 1), (1, 200), (200, 1), (4096, 21), (20, 4000), (4096, 4096)]
    while len(found) < count:
        width, height = (int(one) for one in np.exp(rng.uniform(0, np.log(2048), 2)))
        if max(width, height) <= 200 * min(width, height):
            found.append((width, height))
    return found


def noise(width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("family", ORACLES)
def test_pixel_values_equal_the_reference_over_random_sizes(family: str) -> None:
    kind, config, oracle = ORACLES[family]
    processor = kind.from_config(config, VISION)
    preprocess = Preprocessor(processor, torch.device("cpu"))
    for size in sizes(200, 3):
        pixels = noise(*size)
        expected = oracle(**config)(images=[Image.fromarray(pixels)], return_tensors="pt")["pixel_values"]
        expected = expected.view(-1, 3, 56, 56)
        views = processor.views(bytes(16), size)
        assert len(views) == len(expected), size
        for one, image in zip(views, expected, strict=True):
            merge = processor.merge_size
            shape = (4 // merge, 4 // merge, merge, merge, 3, 14, 14)
            made = preprocess.patches(torch.from_numpy(pixels)[None], one.view).view(shape)
            assert torch.equal(made.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 56, 56), image), size


@pytest.mark.parametrize("resample", [1, 2, 3], ids=["lanczos", "bilinear", "bicubic"])
@pytest.mark.parametrize(("source", "target"), [(100, 37), (37, 100), (1, 56), (4096, 56), (57, 56)])
def test_fixed_point_weights_are_those_of_pillow(resample: int, source: int, target: int) -> None:
    row = noise(source, 1)
    first, weights = fixed_point_weights(source, target, resample)
    expected = np.asarray(Image.fromarray(row).resize((target, 1), Image.Resampling(resample)))
    taps = np.minimum(first[:, None] + np.arange(weights.shape[1]), source - 1)
    total = (row[0][taps].astype(np.int64) * weights[..., None].astype(np.int64)).sum(1) + (1 << 21)
    assert np.array_equal(np.clip(total >> 22, 0, 255), expected[0])


def oracle_processor(folder: Path, family: str) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.image_token = "<|image_pad|>"
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    if family == "llava":
        return transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            image_token="<|image_pad|>",
            num_additional_image_tokens=1,
        )
    made = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
    made.image_token, made.image_token_id = "<|image_pad|>", tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return made


@pytest.mark.parametrize("family", ["llava", "idefics3"])
def test_prompts_equal_those_of_the_reference_processor(
    family_folder: Callable[[str], Path], family: str
) -> None:
    folder = family_folder(family)
    oracle, front = oracle_processor(folder, family), InputProcessor(open_checkpoint(str(folder)), 4096)
    for size in [(1, 1), (100, 80), (333, 61), (17, 190), (64, 64), (900, 899)]:
        images = [Image.fromarray(noise(*size)), Image.fromarray(noise(80, 30))]
        text = "First <|image_pad|>\nthen <|image_pad|> and?"
        expected = oracle(text=text, images=images)["input_ids"][0]
        request = front.prepare_prompt(text, ASK, "r", images=images, trusted=True)
        layout = lay_out_prompt(request)
        assert list(layout.tokens) == list(expected), size
        assert np.array_equal(layout.positions[1], np.arange(len(expected)))
        assert layout.delta == 0


def test_low_detail_shows_the_whole_image_alone(family_folder: Callable[[str], Path]) -> None:
    image = open_checkpoint(str(family_folder("idefics3"))).image
    assert image is not None
    assert [image.num_tokens((100, 80), detail) for detail in ("high", "low")] == [20, 4]
    (low,) = image.views(bytes(16), (100, 80), "low")
    assert low.view.key not in {one.view.key for one in image.views(bytes(16), (100, 80))[:-1]}


@pytest.mark.parametrize("family", ["llava", "idefics3"])
def test_visual_token_budgets_and_videos_are_refused(
    family_folder: Callable[[str], Path], family: str
) -> None:
    front = InputProcessor(open_checkpoint(str(family_folder(family))), 4096)
    images = [Image.fromarray(noise(60, 60))]
    with pytest.raises(InvalidValue, match="level of detail"):
        front.prepare_prompt(
            "<|image_pad|>",
            ASK,
            "r",
            images=images,
            trusted=True,
            detail_req=DetailRequest(params=LodParams(budget=8)),
        )
    message = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4,"}}]}]
    with pytest.raises(MediaRefused, match=r"takes no videos: .*[Vv]ideos"):
        front.prepare_chat(message, ASK, "r")


def broken(folder: Path, target: Path, name: str, **changes: Any) -> str:
    """A copy whose file `name` has other values; without any it is missing."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    (target / name).unlink()
    if changes:
        (target / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))
    return str(target)


@pytest.mark.parametrize(
    ("family", "name", "changes", "message"),
    [
        ("llava", "preprocessor_config.json", {"crop_size": 28}, "crops 28 pixels"),
        ("llava", "preprocessor_config.json", {"resample": 4}, "filter 4"),
        ("llava", "preprocessor_config.json", {"size": 70, "crop_size": 70}, "takes 56"),
        ("llava", "preprocessor_config.json", {"do_rescale": False}, "turns do_rescale off"),
        ("llava", "config.json", {"vision_feature_layer": -9}, "has 5 layers"),
        ("llava", "config.json", {"vision_feature_layer": [-2, -1]}, "one layer"),
        ("llava", "config.json", {"vision_feature_select_strategy": "full"}, "'full' is not supported"),
        ("llava", "config.json", {"projector_hidden_act": "sinus"}, "'sinus'"),
        ("idefics3", "config.json", {"scale_factor": 3}, "divide by 3"),
        ("idefics3", "config.json", {"scale_factor": 4}, "connector"),
        ("idefics3", "preprocessor_config.json", {"size": {"longest_edge": 9000}}, "at most 4096"),
    ],
)
def test_contradicting_configurations_are_refused(
    family_folder: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    name: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    folder = broken(family_folder(family), tmp_path / "broken", name, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(open_checkpoint(folder), "cpu", torch.float32)


def test_an_image_without_a_processor_configuration_names_the_missing_file(
    family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = broken(family_folder("llava"), tmp_path / "broken", "preprocessor_config.json")
    front = InputProcessor(open_checkpoint(folder), 4096)
    with pytest.raises(MediaRefused, match=r"lacks preprocessor_config\.json"):
        front.prepare_prompt("<|image_pad|>", ASK, "r", images=[Image.fromarray(noise(9, 9))], trusted=True)
