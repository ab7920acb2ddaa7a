"""A token limit is kept by every image, by the engine's own arithmetic, and nothing is ever enlarged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saccade.errors import ConfigError
from saccade.inputs.image_processor import MAX_ASPECT, plain_view
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.tools.evaluation.resize import least_tokens, shrink, size_within, visual_tokens


def processing(least: int, most: int = 4096, merge: int = 2) -> Qwen2VLImageProcessor:
    """Limits in tokens of 32 x 32 pixels (16 x 16 with merge 1)."""
    area = (16 * merge) ** 2
    return Qwen2VLImageProcessor(
        patch_size=16,
        merge_size=merge,
        temporal_patch_size=2,
        min_pixels=least * area,
        max_pixels=most * area,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255,
    )


sides = st.integers(1, 3000)


@given(
    width=sides,
    height=sides,
    least=st.sampled_from([1, 4, 49, 64]),
    extra=st.sampled_from([0, 1, 15, 64, 192, 960]),
    merge=st.sampled_from([1, 2]),
)
def test_no_image_exceeds_the_limit_and_none_grows(
    width: int, height: int, least: int, extra: int, merge: int
) -> None:
    if max(width, height) / min(width, height) > MAX_ASPECT:
        return
    rule = processing(least, merge=merge)
    limit = least + extra
    try:
        smaller = size_within((width, height), limit, rule)
    except ConfigError:
        # Only an image too small to be left alone, which the checkpoint itself enlarges, may have no size.
        assert width * height < 4 * rule.min_pixels or min(width, height) < rule.factor
        return
    assert smaller[0] <= width
    assert smaller[1] <= height
    view = plain_view(bytes(16), smaller, rule)  # what the engine will make of it
    assert view.tokens <= limit
    assert view.tokens == visual_tokens(smaller, rule)


@pytest.mark.parametrize("limit", [64, 128, 256, 512, 1024])
@pytest.mark.parametrize("size", [(1344, 1344), (1088, 704), (672, 224), (673, 1211)])
def test_it_is_the_size_the_processor_would_choose_with_that_cap(size: tuple[int, int], limit: int) -> None:
    """And then the engine has nothing left to resize: pixels are interpolated once."""
    rule = processing(49)
    smaller = size_within(size, limit, rule)
    assert rule.grid(*smaller) == processing(49, most=limit).grid(*size)
    if smaller != size:
        rows, columns = rule.grid(*smaller)
        assert smaller == (columns * rule.patch_size, rows * rule.patch_size)
        assert visual_tokens(smaller, rule) > 0.7 * limit  # the limit is used


def test_an_image_within_the_limit_is_not_resized() -> None:
    assert size_within((300, 200), 64, processing(4)) == (300, 200)


def test_a_limit_at_the_checkpoints_own_least_changes_the_shape_rather_than_fail() -> None:
    """With 64 tokens at least and at most, only 8x8, 4x16, 2x32 and 1x64 are left."""
    assert size_within((960, 640), 64, processing(64)) == (256, 256)
    assert size_within((1600, 300), 64, processing(64)) == (512, 128)


def test_a_very_long_image_keeps_the_limit() -> None:
    """The size rule's side of at least one token would cost 80 here."""
    assert size_within((3000, 30), 64, processing(49)) == (2048, 30)


def test_a_limit_below_the_checkpoints_least_is_refused_with_the_numbers() -> None:
    rule = processing(49)
    assert least_tokens(rule) == 49
    with pytest.raises(ConfigError, match=r"800x600 .* at most 48 .* 49 tokens"):
        size_within((800, 600), 48, rule)


def test_shrinking_filters_as_pillow_does_and_leaves_the_rest_untouched() -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    assert shrink(image, (120, 90)) is image
    small = shrink(image, (64, 32))
    expected = Image.fromarray(image).resize((64, 32), Image.Resampling.BICUBIC)
    assert small.shape == (32, 64, 3)
    assert small.dtype == np.uint8
    assert np.array_equal(small, np.asarray(expected))
    assert np.std(small) < 0.6 * np.std(image)  # antialiased: noise is averaged, not sampled
