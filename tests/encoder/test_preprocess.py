"""Patches against the checkpoint's PIL-based processor, bit for bit."""

from collections.abc import Callable
from importlib import import_module

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.encoder.preprocess import (
    WEIGHT_BITS,
    Preprocessor,
    fixed_point_weights,
    resize,
    resizes_vertically_first,
)
from saccade.inputs.image_processor import plain_view
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.request import Pixels, View
from tests.encoder.make_patches import patches

PILLOW_ORDERS_PASSES = int(PIL.__version__.split(".")[0]) >= 13

QWEN3 = Qwen2VLImageProcessor(
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=4096,
    max_pixels=400_000,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)
QWEN2 = Qwen2VLImageProcessor(
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=3136,
    max_pixels=300_000,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    rescale_factor=1 / 255,
)

SIZES = [(64, 96), (33, 65), (200, 200), (1, 1), (7, 900), (1200, 8), (701, 503), (503, 701), (1080, 1920)]


def noise(rng: np.random.Generator, height: int, width: int) -> Pixels:
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def scene(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """Gradients with hard edges: smooth areas, and the overshoot that clipping must catch."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 127 * np.sin(x / rng.uniform(3, 60) + y / rng.uniform(3, 60)) for _ in range(3)]
    picture = np.stack(waves, axis=2).astype(np.uint8)
    picture[height // 3 : height // 2, width // 4 :] = 255
    picture[height // 2 :, : width // 3] = 0
    return picture


def reference(picture: Pixels, processing: Qwen2VLImageProcessor) -> tuple[np.ndarray, list[int]]:
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        patch_size=processing.patch_size,
        merge_size=processing.merge_size,
        temporal_patch_size=processing.temporal_patch_size,
        image_mean=list(processing.mean),
        image_std=list(processing.std),
    )
    made = processor(images=[Image.fromarray(picture)], return_tensors="np")
    return made["pixel_values"], made["image_grid_thw"][0].tolist()


def one_axis_at_a_time(picture: Pixels, size: tuple[int, int]) -> Pixels:
    """Pillow's passes in our order: what Pillow 13 does in one call, and any Pillow in two."""
    image = Image.fromarray(picture)
    height, width = size
    between = (
        (image.width, height) if resizes_vertically_first(picture.shape[:2], size) else (width, image.height)
    )
    for target in (between, (width, height)):
        image = image.resize(target, Image.Resampling.BICUBIC)
    return np.asarray(image)


def by_weights(picture: Pixels, size: tuple[int, int], vertical_first: bool) -> Pixels:
    """Both passes in integers, with the weights that the kernels use."""
    values = picture.astype(np.int64)
    for axis in (0, 1) if vertical_first else (1, 0):
        source, target = values.shape[axis], size[axis]
        if source == target:
            continue
        first, weights = fixed_point_weights(source, target)
        taps = np.minimum(first[:, None] + np.arange(weights.shape[1]), source - 1)  # weights beyond are 0
        gathered = np.moveaxis(values, axis, 0)[taps]
        sums = np.einsum("ot,ot...->o...", weights.astype(np.int64), gathered)
        rounded = (sums + (1 << (WEIGHT_BITS - 1))) >> WEIGHT_BITS
        values = np.moveaxis(rounded.clip(0, 255), 0, axis)
    return values.astype(np.uint8)


@pytest.mark.skipif(not PILLOW_ORDERS_PASSES, reason="Pillow before 13 orders its passes otherwise")
@pytest.mark.parametrize("processing", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("content", [noise, scene])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_patches_equal_the_processors(
    size: tuple[int, int],
    content: Callable[[np.random.Generator, int, int], Pixels],
    processing: Qwen2VLImageProcessor,
) -> None:
    picture = content(np.random.default_rng(sum(size)), *size)
    expected, grid = reference(picture, processing)
    view = plain_view(b"c" * 16, (size[1], size[0]), processing)
    made = patches(torch.from_numpy(picture[None]), view, processing)
    assert [1, *view.grid] == grid
    assert made.dtype == torch.float32
    assert made.shape == expected.shape
    assert np.array_equal(made.numpy(), expected)


@pytest.mark.parametrize("seed", range(60))
def test_resizing_gives_pillows_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width, rows, columns = (int(side) for side in rng.integers(1, 300, 4))
    if seed % 3 == 0:  # nearly the same size, where windows are narrowest
        rows, columns = max(1, height + int(rng.integers(-2, 3))), max(1, width + int(rng.integers(-2, 3)))
    picture = noise(rng, height, width) if seed % 2 else scene(rng, height, width)
    vertical_first = resizes_vertically_first((height, width), (rows, columns))
    expected = one_axis_at_a_time(picture, (rows, columns))
    made = resize(torch.from_numpy(picture), (rows, columns), vertical_first)
    assert np.array_equal(made.numpy(), expected)
    assert np.array_equal(by_weights(picture, (rows, columns), vertical_first), expected)


@pytest.mark.skipif(not PILLOW_ORDERS_PASSES, reason="Pillow before 13 orders its passes otherwise")
@pytest.mark.parametrize("seed", range(30))
def test_passes_are_ordered_as_pillow_orders_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width, rows, columns = (int(side) for side in rng.integers(5, 90, 4))
    picture = noise(rng, height, width)
    whole = Image.fromarray(picture).resize((columns, rows), Image.Resampling.BICUBIC)
    assert np.array_equal(one_axis_at_a_time(picture, (rows, columns)), np.asarray(whole))


@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 64), (64, 1), (2000, 3), (3, 2000), (101, 100)])
def test_weights_of_an_output_pixel_sum_to_one(source: int, target: int) -> None:
    first, weights = fixed_point_weights(source, target)
    taps = np.count_nonzero(weights, axis=1)
    assert np.all(np.abs(weights.sum(axis=1) - (1 << 22)) <= taps)  # half a unit of rounding per tap
    assert np.all(first >= 0)


def test_a_box_is_cut_before_it_is_resized() -> None:
    picture = noise(np.random.default_rng(5), 120, 150)
    cut = View(content=b"c" * 16, box=(10, 20, 131, 97), grid=(6, 8), merge=2, processing=QWEN3.digest)
    whole = View(content=b"c" * 16, box=(0, 0, 121, 77), grid=(6, 8), merge=2, processing=QWEN3.digest)
    inside = np.ascontiguousarray(picture[20:97, 10:131])
    made = patches(torch.from_numpy(picture[None]), cut, QWEN3)
    assert torch.equal(made, patches(torch.from_numpy(inside[None]), whole, QWEN3))


def test_two_frames_fill_the_temporal_axis_and_one_is_repeated() -> None:
    rng = np.random.default_rng(6)
    pair = np.stack([noise(rng, 60, 100), noise(rng, 60, 100)])
    view = plain_view(b"c" * 16, (100, 60), QWEN3)
    assert not resizes_vertically_first((60, 100), (view.grid[0] * 16, view.grid[1] * 16))
    together = patches(torch.from_numpy(pair), view, QWEN3).view(-1, 3, 2, 256)
    for frame in (0, 1):
        alone = patches(torch.from_numpy(pair[frame : frame + 1]), view, QWEN3).view(-1, 3, 2, 256)
        assert torch.equal(alone[:, :, 0], alone[:, :, 1])
        assert torch.equal(alone[:, :, 0], together[:, :, frame])


def test_frames_are_resized_along_their_rows_first() -> None:
    pair = np.stack([noise(np.random.default_rng(7), 203, 657)] * 2)
    view = View(content=b"c" * 16, box=(0, 0, 657, 203), grid=(12, 42), merge=2, processing=QWEN3.digest)
    assert resizes_vertically_first((203, 657), (192, 672))
    made = patches(torch.from_numpy(pair), view, QWEN3).view(6, 21, 2, 2, 3, 2, 16, 16)
    picture = made[:, :, :, :, :, 0].permute(0, 2, 5, 1, 3, 6, 4).reshape(192, 672, 3)
    image = Image.fromarray(pair[0])
    for target in ((672, 203), (672, 192)):
        image = image.resize(target, Image.Resampling.BICUBIC)
    assert np.array_equal(((picture * 0.5 + 0.5) * 255).round().byte().numpy(), np.asarray(image))


@pytest.mark.parametrize(
    ("shape", "box", "grid", "merge", "complaint"),
    [
        ((3, 8, 8, 3), (0, 0, 8, 8), (2, 2), 2, "3 frames"),
        ((1, 8, 8, 4), (0, 0, 8, 8), (2, 2), 2, "uint8"),
        ((1, 8, 8, 3), (0, 0, 9, 8), (2, 2), 2, "exceeds the image"),
        ((1, 8, 8, 3), (4, 0, 4, 8), (2, 2), 2, "empty"),
        ((1, 8, 8, 3), (0, 0, 8, 8), (3, 2), 2, "merge"),
        ((1, 8, 8, 3), (0, 0, 8, 8), (3, 3), 3, "merge"),
    ],
)
def test_what_does_not_fit_is_refused(
    shape: tuple[int, ...],
    box: tuple[int, int, int, int],
    grid: tuple[int, int],
    merge: int,
    complaint: str,
) -> None:
    view = View(content=b"c" * 16, box=box, grid=grid, merge=merge, processing=QWEN3.digest)
    with pytest.raises(ValueError, match=complaint):
        patches(torch.zeros(shape, dtype=torch.uint8), view, QWEN3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_cuda_makes_the_same_patches(size: tuple[int, int]) -> None:
    picture = torch.from_numpy(noise(np.random.default_rng(9), *size)[None])
    view = plain_view(b"c" * 16, (size[1], size[0]), QWEN2)
    device = torch.device("cuda")
    made = Preprocessor(QWEN2, device).patches(picture.to(device), view)
    assert torch.equal(made.cpu(), patches(picture, view, QWEN2))


@pytest.mark.parametrize("content", [noise, scene])
@pytest.mark.parametrize("size", [(203, 657), (480, 640), (100, 90), (319, 173)], ids=str)
def test_frame_pairs_are_within_one_level_of_the_video_processor(
    size: tuple[int, int], content: Callable[[np.random.Generator, int, int], Pixels]
) -> None:
    pytest.importorskip("torchvision", reason="the reference video processor needs it")
    reference_module = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    processor = reference_module.Qwen3VLVideoProcessor()
    rng = np.random.default_rng(sum(size))
    frames = np.stack([content(rng, *size) for _ in range(4)])
    channels_first = torch.from_numpy(frames).permute(0, 3, 1, 2)
    expected = processor(videos=[channels_first], return_tensors="pt", do_sample_frames=False)
    grid = expected["video_grid_thw"][0].tolist()
    box = (0, 0, size[1], size[0])
    view = View(content=b"c" * 16, box=box, grid=(grid[1], grid[2]), merge=2, processing=QWEN3.digest)
    made = torch.cat([patches(torch.from_numpy(frames[i : i + 2]), view, QWEN3) for i in (0, 2)])
    levels = (made - expected["pixel_values_videos"]).abs() * 0.5 * 255
    assert float((levels < 1.001).float().mean()) >= 0.999
