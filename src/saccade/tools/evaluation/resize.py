"""Uniform resizing to a token limit, the baseline that level of detail has to beat.

Every size is judged by the checkpoint's own rule (`inputs.image_processor`); an image is never enlarged."""

import math
from collections.abc import Iterator

import numpy as np
from PIL import Image

from saccade.errors import ConfigError
from saccade.inputs.image_processor import ImageProcessor
from saccade.inputs.qwen_vl_processor import smart_resize
from saccade.request import Pixels


def visual_tokens(size: tuple[int, int], processing: ImageProcessor) -> int:
    """Tokens of an image of `size` (width, height)."""
    rows, columns = processing.grid(*size)
    return rows * columns // processing.merge_size**2


def least_tokens(processing: ImageProcessor) -> int:
    """Fewest tokens of any image: smaller ones are enlarged to `min_pixels`."""
    return max(1, math.ceil(processing.min_pixels / processing.factor**2))


def size_within(size: tuple[int, int], limit: int, processing: ImageProcessor) -> tuple[int, int]:
    """Width and height to resize to so that the image costs at most `limit` tokens.

    It is the size that the checkpoint's processor would choose if its `max_pixels` were the limit, so the
    engine does not resize again. Very long images, and limits close to `min_pixels`, have no such size; they
    get the allowed grid nearest in shape."""
    if visual_tokens(size, processing) <= limit:
        return size
    for candidate in _candidates(size, limit, processing):
        smaller = min(candidate[0], size[0]), min(candidate[1], size[1])
        if visual_tokens(smaller, processing) <= limit:
            return smaller
    raise ConfigError(
        f"no size of a {size[0]}x{size[1]} image costs at most {limit} visual tokens with this checkpoint,"
        f" which enlarges images to {processing.min_pixels} pixels, {least_tokens(processing)} tokens;"
        " raise the limit"
    )


def _candidates(size: tuple[int, int], limit: int, processing: ImageProcessor) -> Iterator[tuple[int, int]]:
    factor = processing.factor
    width, height = size
    most = min(processing.max_pixels, limit * factor * factor)
    rows, columns = smart_resize(width, height, factor, processing.min_pixels, most)
    yield columns, rows
    grids = [
        (columns, rows)
        for rows in range(1, limit + 1)
        for columns in range(1, limit // rows + 1)
        if columns * rows >= least_tokens(processing)
    ]
    shape = math.log(width / height)
    grids.sort(key=lambda grid: (abs(math.log(grid[0] / grid[1]) - shape), -grid[0] * grid[1]))
    for columns, rows in grids:
        yield columns * factor, rows * factor


def shrink(image: Pixels, size: tuple[int, int]) -> Pixels:
    """The image [height, width, 3] at `size` (width, height), by Pillow's antialiased bicubic filter, the one
    the processors use."""
    if (image.shape[1], image.shape[0]) == size:
        return image
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
