"""Our models against transformers, float32 on the CPU, on tiny random checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from saccade.checkpoint import open_checkpoint
from saccade.models.interface import LanguageModel
from saccade.models.loader import load_model
from tests import checkpoints
from tests.models.harness import Story, Walker, relative_error, text_story

CLOSE = 1e-4

TEXT_MODELS = {
    "qwen3": lambda path: checkpoints.qwen3(path),
    "qwen3-tied": lambda path: checkpoints.qwen3(path, tied=True),
    "qwen3-sliding": lambda path: checkpoints.qwen3(
        path, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen3-bias": lambda path: checkpoints.qwen3(path, attention_bias=True),
    "llama": lambda path: checkpoints.llama(path),
    "llama-scaled": lambda path: checkpoints.llama(path, scaled=True),
    "llama-linear": lambda path: checkpoints.llama(
        path, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama-bias": lambda path: checkpoints.llama(path, attention_bias=True, mlp_bias=True, tied=True),
}


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_model(open_checkpoint(str(folder)), "cpu", dtype)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_logits_equal_transformers_whole_chunked_and_decoding(name: str, tmp_path: Path) -> None:
    folder = TEXT_MODELS[name](tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = open_model(folder)
    tokens = torch.randint(0, 480, (45,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    for chunk in (None, 7, 1):
        logits = Walker(ours).run(text_story(ours, tokens), chunk)
        assert relative_error(logits, expected) < CLOSE
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_mixed_step_gives_each_sequence_what_it_gets_alone(tmp_path: Path) -> None:
    ours = open_model(checkpoints.qwen3(tmp_path))
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 480, (length,), generator=generator) for length in (9, 30, 17, 23)]
    alone = [Walker(ours).run(text_story(ours, tokens)) for tokens in sequences]
    walker = Walker(ours)
    stories = [text_story(ours, tokens) for tokens in sequences]
    walker.step([(stories[0], 8), (stories[1], 29)])
    # Two decodes of different lengths, a fresh prompt and a piece of another, all at once.
    mixed = walker.step([(stories[0], 1), (stories[1], 1), (stories[2], 17), (stories[3], 5)])
    rest = walker.step([(stories[3], 18)])
    for logits, expected in zip(mixed, (alone[0][8:], alone[1][29:], alone[2], alone[3][:5]), strict=True):
        assert relative_error(logits, expected) < CLOSE
    assert relative_error(rest[0], alone[3][5:]) < CLOSE


# ---------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module", params=["untied", "tied"])
def vl_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl"), tied=request.param == "tied")


def image(width: int, height: int, seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def ask(folder: Path, sizes: list[tuple[int, int]]) -> dict[str, Tensor]:
    images = [image(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    content: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for index in range(len(images)):
        content += [{"type": "image"}, {"type": "text", "text": f" image {index}; "}]
    return checkpoints.oracle_inputs(folder, [{"role": "user", "content": content}], images)


def tell(model: LanguageModel, theirs: Any, inputs: dict[str, Tensor]) -> tuple[Story, int]:
    """The story of a prompt with images, and how far positions run behind places after it."""
    tokens = inputs["input_ids"][0]
    image_token = theirs.config.image_token_id
    visual = tokens == image_token
    positions, delta = theirs.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    assert model.vision is not None
    grids = [(height, width) for _, height, width in inputs["image_grid_thw"].tolist()]
    with torch.inference_mode():
        features = model.vision(inputs["pixel_values"], grids)
    embeds = model.embed(tokens)
    width = model.hidden_size
    embeds[visual] = features[:, :width]
    levels = torch.zeros(model.vision.depth_levels, len(tokens), width, dtype=embeds.dtype)
    levels[:, visual] = features[:, width:].reshape(len(features), -1, width).transpose(0, 1)
    return Story(embeds, positions[:, 0], levels, visual), int(delta)


def all_features(output: Any) -> Tensor:
    """Main features and levels side by side. Some versions give levels per image, some joined."""
    levels = [torch.cat(level) if isinstance(level, tuple) else level for level in output.deepstack_features]
    return torch.cat([torch.cat(output.pooler_output), *levels], dim=-1)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(
    "sizes", [[(64, 64)], [(37, 113)], [(200, 61)], [(96, 64), (33, 150), (90, 90)]], ids=str
)
def test_logits_with_images_equal_transformers_and_so_does_decoding(
    vl_folder: Path, sizes: list[tuple[int, int]], chunk: int | None
) -> None:
    theirs = transformers.Qwen3VLForConditionalGeneration.from_pretrained(vl_folder, dtype=torch.float32)
    ours = open_model(vl_folder)
    inputs = ask(vl_folder, sizes)
    with torch.inference_mode():
        expected = theirs(**inputs).logits[0]
    story, delta = tell(ours, theirs, inputs)
    walker = Walker(ours)
    logits = walker.run(story, chunk)
    assert relative_error(logits, expected) < CLOSE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))

    generated = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    last = logits[-1]
    for token in generated[len(expected) :]:
        assert int(last.argmax()) == int(token)
        place = len(story.embeds)
        story.extend(ours.embed(token[None]), torch.full((3, 1), place + delta))
        last = walker.step([(story, 1)])[0][-1]


def test_vision_features_and_deepstack_levels_equal_transformers(vl_folder: Path) -> None:
    theirs = transformers.Qwen3VLForConditionalGeneration.from_pretrained(vl_folder, dtype=torch.float32)
    ours = open_model(vl_folder)
    assert ours.vision is not None
    inputs = ask(vl_folder, [(96, 64), (96, 64), (33, 150), (64, 96), (250, 250)])
    grids = [(height, width) for _, height, width in inputs["image_grid_thw"].tolist()]
    with torch.inference_mode():
        output = theirs.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        expected = all_features(output)
        features = ours.vision(inputs["pixel_values"], grids)
        again = ours.vision(inputs["pixel_values"], grids)
    assert features.shape == (len(expected), (1 + ours.vision.depth_levels) * ours.vision.out_dim)
    assert relative_error(features, expected) < CLOSE
    assert torch.equal(features, again)


def test_frame_pairs_of_videos_are_views_of_their_own(vl_folder: Path) -> None:
    theirs = transformers.Qwen3VLForConditionalGeneration.from_pretrained(vl_folder, dtype=torch.float32)
    vision = open_model(vl_folder).vision
    assert vision is not None
    videos = [(3, 4, 6), (2, 8, 2)]  # frame pairs, rows, columns
    grids = [(rows, columns) for pairs, rows, columns in videos for _ in range(pairs)]
    patches = torch.randn(3 * 24 + 2 * 16, vision.patch_dim, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = theirs.model.get_video_features(patches, torch.tensor(videos))
        expected = all_features(output)
        assert relative_error(vision(patches, grids), expected) < CLOSE


def test_bfloat16_stays_close_to_float32(vl_folder: Path) -> None:
    theirs = transformers.Qwen3VLForConditionalGeneration.from_pretrained(vl_folder, dtype=torch.float32)
    wide, narrow = open_model(vl_folder), open_model(vl_folder, torch.bfloat16)
    inputs = ask(vl_folder, [(64, 96)])
    exact = Walker(wide).run(tell(wide, theirs, inputs)[0])
    rough = Walker(narrow).run(tell(narrow, theirs, inputs)[0], 7)
    assert rough.dtype == torch.float32
    # About 1% per operation, through a dozen layers with sharp attention.
    assert torch.nn.functional.cosine_similarity(exact, rough).min() > 0.9


def test_deepstack_levels_matter(vl_folder: Path) -> None:
    """The parity above would be empty if the levels hardly changed the logits."""
    theirs = transformers.Qwen3VLForConditionalGeneration.from_pretrained(vl_folder, dtype=torch.float32)
    ours = open_model(vl_folder)
    story, _ = tell(ours, theirs, ask(vl_folder, [(64, 64)]))
    logits = Walker(ours).run(story)
    for level in range(3):
        assert story.levels is not None
        changed = story.levels.clone()
        changed[level] = 0
        other = Walker(ours).run(Story(story.embeds, story.positions, changed, story.visual))
        assert relative_error(other, logits) > 0.01
