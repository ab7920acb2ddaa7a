"""Sizes, frames and times equal the reference processors'."""

import math
import random

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as image_rule
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor as Reference
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_rule
from transformers.video_utils import VideoMetadata

from saccade.errors import MediaRefused
from saccade.inputs.image_processor import plain_view
from saccade.inputs.qwen_vl_processor import (
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
)


def image(patch: int = 16, least: int = 65536, most: int = 16777216) -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=least,
        max_pixels=most,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255,
    )


def video(least: int = 4096, most: int = 25165824, frame_tokens: int | None = None) -> Qwen3VLVideoProcessor:
    return Qwen3VLVideoProcessor(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=least,
        max_pixels=most,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255,
        frame_tokens=frame_tokens,
    )


def some_sizes(count: int) -> list[tuple[int, int]]:
    draw = random.Random(7)
    edges = [(1, 1), (1, 200), (200, 1), (15, 16), (16, 15), (31, 33), (48, 80), (100, 20000), (8000, 8000)]
    return edges + [
        (int(math.exp(draw.uniform(0, 9))), int(math.exp(draw.uniform(0, 9)))) for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("patch", "least", "most"), [(16, 65536, 16777216), (14, 3136, 1003520), (16, 1024, 4096)]
)
def test_image_grids_equal_those_of_transformers(patch: int, least: int, most: int) -> None:
    processing = image(patch, least, most)
    compared = refused = 0
    for width, height in some_sizes(400):
        try:
            rows, columns = image_rule(height, width, patch * 2, least, most)
        except ValueError:
            refused += 1
            with pytest.raises(MediaRefused, match="200 times"):
                processing.grid(width, height)
            continue
        compared += 1
        assert processing.grid(width, height) == (rows // patch, columns // patch), (width, height)
    assert compared > 200
    assert refused > 10


def test_patch_counts_equal_those_of_transformers() -> None:
    oracle = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216})
    for width, height in [(640, 480), (1, 1), (1999, 33)]:
        rows, columns = image().grid(width, height)
        assert rows * columns == oracle.get_number_of_image_patches(height, width)


@pytest.mark.parametrize(("width", "height"), [(1, 20000), (20000, 1), (1, 201)])
def test_an_aspect_ratio_above_200_is_refused(width: int, height: int) -> None:
    with pytest.raises(MediaRefused, match="200 times"):
        image().grid(width, height)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0)])
def test_an_empty_image_is_refused(width: int, height: int) -> None:
    with pytest.raises(MediaRefused, match="at least 1"):
        image().grid(width, height)


@pytest.mark.parametrize("frame_tokens", [None, 768, 20])
def test_video_grids_equal_those_of_transformers(frame_tokens: int | None) -> None:
    draw = random.Random(3)
    processing = video(frame_tokens=frame_tokens)
    compared = 0
    for width, height in some_sizes(300):
        frames = draw.randint(2, 768)
        most = processing.max_pixels
        if frame_tokens is not None:
            share = min(frame_tokens * 32 * 32, most // frames)
            most = max(share, int(processing.min_pixels * 1.05)) * frames
        try:
            rows, columns = video_rule(frames, height, width, 2, 32, processing.min_pixels, most)
        except ValueError:
            with pytest.raises(MediaRefused):
                processing.grid(width, height, frames)
            continue
        compared += 1
        assert processing.grid(width, height, frames) == (rows // 16, columns // 16), (width, height, frames)
    assert compared > 200


def test_a_video_of_one_frame_is_sized_as_two() -> None:
    assert video().grid(640, 480, 1) == video().grid(640, 480, 2)


class _Sampler:
    """The attributes the reference's sampling rule reads; the class itself needs torchvision."""

    fps, min_frames, max_frames = 2, 4, 768


def test_sampled_frames_equal_those_of_transformers() -> None:
    draw = random.Random(5)
    for _ in range(300):
        total, fps = draw.randint(1, 60000), draw.choice([1.0, 10.0, 23.976, 24.0, 29.97, 30.0, 60.0])
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        reference = Reference.sample_frames(_Sampler(), metadata)
        assert video().sample(total, fps, 768) == reference.tolist(), (total, fps)


def test_the_limit_caps_sampled_frames_and_keeps_first_and_last() -> None:
    indices = video().sample(100_000, 30.0, 16)
    assert len(indices) == 16
    assert (indices[0], indices[-1]) == (0, 99_999)


def test_a_video_without_frames_is_refused() -> None:
    with pytest.raises(MediaRefused, match="no frames"):
        video().sample(0, 24.0, 768)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_timestamps_equal_those_of_transformers(count: int) -> None:
    indices = [int(index) for index in np.linspace(0, 100, count).round()]
    reference = Qwen3VLProcessor._calculate_timestamps(None, list(indices), 29.97, 2)
    assert video().timestamps(indices, 29.97) == reference
    assert len(video().groups(count)) == len(reference)


def test_groups_repeat_the_last_frame() -> None:
    assert video().groups(5) == [[0, 1], [2, 3], [4, 4]]


def test_digest_covers_what_is_done_to_pixels_and_not_the_grid() -> None:
    assert image().digest == image(least=1).digest  # sizes are in the view's grid
    assert image().digest == video().digest
    assert image().digest != image(patch=14).digest


def test_views_cover_the_whole_image() -> None:
    view = plain_view(b"c" * 32, (640, 480), image())
    assert view.box == (0, 0, 640, 480)
    assert view.grid == (30, 40)
    assert view.tokens == 300
    pairs = [one.view for one in video().views(b"c" * 32, (640, 480), range(8), 24.0, 8)]
    assert {pair.box for pair in pairs} == {(0, 0, 640, 480)}
    assert {pair.processing for pair in pairs} == {view.processing}
    assert len({pair.key for pair in pairs}) == 4  # each names the frames it shows
    assert sum(pair.tokens for pair in pairs) == video().num_tokens((640, 480), 8)


def older_video(video_tokens: int | None = None, rate: float | None = None) -> Qwen2VLVideoProcessor:
    return Qwen2VLVideoProcessor(
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=3136,
        max_pixels=602112,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255,
        video_tokens=video_tokens,
        tokens_per_second=rate,
    )


def test_frames_sampled_for_qwen2_vl_follow_the_rule_of_transformers() -> None:
    """Its module needs torchvision, so the rule is written out. In float32 it may be a frame off, or give one
    more."""
    draw = random.Random(6)
    for _ in range(300):
        total, fps = draw.randint(2, 60000), draw.choice([1.0, 10.0, 23.976, 24.0, 29.97, 30.0, 60.0])
        count = min(max(total / fps * 2, 4), math.floor(min(768, total) / 2) * 2, total)
        count = math.floor(count / 2) * 2
        rule = torch.arange(0, total, total / count).int().tolist()
        found = older_video().sample(total, fps, 768)
        assert len(found) == count
        assert all(abs(ours - theirs) <= 1 for ours, theirs in zip(found, rule, strict=False)), (total, fps)


def test_a_single_frame_and_a_low_limit_still_give_frames_of_the_video() -> None:
    assert older_video().sample(1, 24.0, 768) == [0]
    assert older_video().sample(500, 24.0, 1) == [0]
    assert len(older_video().sample(500, 24.0, 7)) == 6


@pytest.mark.parametrize("video_tokens", [None, 128000, 2000])
def test_frame_sizes_of_qwen2_vl_equal_those_of_transformers(video_tokens: int | None) -> None:
    draw = random.Random(8)
    processing = older_video(video_tokens)
    for width, height in some_sizes(200):
        frames, most = draw.randint(2, 768), processing.max_pixels
        if video_tokens is not None:
            share = int(video_tokens * 28 * 28 * 0.9) * 2 // frames
            most = max(min(most, share), int(3136 * 1.05))
        try:
            rows, columns = image_rule(height, width, 28, 3136, most)
        except ValueError:
            with pytest.raises(MediaRefused):
                processing.grid(width, height, frames)
            continue
        assert processing.grid(width, height, frames) == (rows // 14, columns // 14)
        assert processing.num_tokens((width, height), frames) == -(-frames // 2) * rows * columns // 784


def test_times_of_qwen2_vl_count_views_and_those_of_qwen2_5_vl_seconds() -> None:
    indices = range(0, 120, 10)  # 12 of 120 frames at 30 a second: 3 a second, 2/3 s a view
    counted = older_video().views(b"c" * 32, (640, 480), indices, 30.0, 120)
    assert [one.time for one in counted] == [None, 1, 2, 3, 4, 5]
    timed = older_video(rate=4).views(b"c" * 32, (640, 480), indices, 30.0, 120)
    assert [one.time for one in timed] == [None, 2, 5, 8, 10, 13]
    assert not any(one.before or one.after for one in timed)
