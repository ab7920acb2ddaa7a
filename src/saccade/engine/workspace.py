"""What pictures need of the device's memory beside weights, KV and kept features: measured, then set aside.

takes   the tower, what the checkpoint does to pictures, the limits of a step
gives   bytes: of the largest view while it is computed, and of what stays from call to call
never   runs the whole tower: its layers need the same, one after the other
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from saccade.encoder import upload
from saccade.encoder.encoder_graphs import MAX_PATCHES, MAX_SHAPES, EncoderBuffers
from saccade.encoder.preprocess import PixelProcessing, Preprocessor
from saccade.lod import image_maps
from saccade.models.interface import VisionTower
from saccade.request import View

GRAPH_BYTES = 10 << 20  # of the launch data of a captured shape, some 300 kernels
LARGEST_SOURCE = 8000  # pixels along each side of what is resized: 64 million, what the front lets through


class Processing(PixelProcessing, Protocol):
    @property
    def max_pixels(self) -> int: ...


class EncoderMemory(NamedTuple):
    peak: int  # while the largest view is computed
    kept: int  # static buffers, the graphs' own memory, views half way through the tower


def largest_grid(tower: VisionTower, processing: Sequence[Processing], most_tokens: int) -> tuple[int, int]:
    """Rows and columns of patches of the largest view that a checkpoint's processors give, or that a context
    of so many tokens holds, if that is less. Near a square; shape makes no difference to the bytes."""
    merge = tower.merge
    tokens = max(one.max_pixels // (one.patch_size * merge) ** 2 for one in processing)
    tokens = max(min(tokens, most_tokens), 1)
    rows = math.isqrt(tokens)
    return rows * merge, tokens // rows * merge


def partial_view_bytes(tower: VisionTower, dtype: torch.dtype, count: int) -> int:
    """Of views of so many patches between two layers: the stream, and the deep levels at their most."""
    levels = tower.depth_levels * tower.out_dim / tower.merge**2
    return int(count * (tower.hidden_dim + levels) * dtype.itemsize)


@torch.inference_mode()
def measure_encoder_memory(
    tower: VisionTower,
    processing: Sequence[Processing],
    device: torch.device,
    dtype: torch.dtype,
    most_tokens: int,
    encode_patches: int,
) -> EncoderMemory:
    """`encode_patches`: of all views in the making."""
    grid = largest_grid(tower, processing, most_tokens)
    size = grid[0] * grid[1]
    peak = _measure(tower, processing[0], grid, device, dtype)
    side = math.isqrt(min(MAX_PATCHES, size)) // tower.merge * tower.merge
    captured = _measure(tower, None, (side, side), device, dtype)
    kept = partial_view_bytes(tower, dtype, max(encode_patches, size))
    kept += (
        EncoderBuffers.nbytes(tower, dtype)
        + captured
        + MAX_SHAPES * GRAPH_BYTES
        + image_maps.MAX_BYTES
        + upload.UPLOADED_BYTES
    )
    return EncoderMemory(peak, kept)


def _measure(
    tower: VisionTower,
    processing: Processing | None,
    grid: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Peak bytes of a view: pixels to patches (with `processing`), a layer with its deep level, the end."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    if processing is not None:
        side = LARGEST_SOURCE
        pixels = torch.zeros(1, side, side, 3, dtype=torch.uint8, device=device)
        view = View(bytes(16), (0, 0, side, side), grid, tower.merge, processing.digest)
        cut = Preprocessor(processing, device, mode=tower.mode).patches(pixels, view, dtype)
        del pixels
    else:
        cut = torch.zeros(grid[0] * grid[1], tower.patch_dim, dtype=dtype, device=device)
    layout = tower.layout([grid])
    stream = tower.begin(cut, layout)
    del cut
    layer = tower.deep[0] if tower.deep else 0
    stream, levels = tower.carry(stream, layout, layer, layer + 1)
    features = tower.finish(stream, [levels[0]] * tower.depth_levels if levels else [])
    del stream, levels, features
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
