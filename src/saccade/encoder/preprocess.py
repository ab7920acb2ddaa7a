"""The device half of the image processor: raw pixels to normalised patches, equal to the PIL-based processor.

Resizing is that of Pillow 13 for 8-bit images (bicubic, bilinear or Lanczos): one pass per axis; each output
pixel is a weighted sum over a window that widens when shrinking; weights are fixed-point numbers of 22
fractional bits; each pass rounds half up and clips to 0..255. The kernels follow that to the bit. The
reference implementation is Pillow itself, on the host. A view that names its resizes is cut out of the last.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from saccade.inputs.image_processor import BICUBIC, PatchSettings
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.vision.patchify import patchify_triton, resample_triton
from saccade.request import View

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WEIGHT_BITS = 22  # fractional bits of a weight: 32 less 8 of the pixel, less 2 for sums outside 0..255
_CURVATURE = -0.5  # Pillow's choice of the free parameter of the cubic
_CACHED_TAPS = 256  # (source, target) lengths; at most 60 KB each for 4,096 pixels of 4 taps
_PIECE_VALUES = 1 << 20  # pixels normalised at once (8 MiB in float64)


class Preprocessor:
    """A checkpoint's pixel processing on one device."""

    def __init__(
        self, processing: PatchSettings, device: torch.device, mode: KernelMode = DEFAULT_MODE
    ) -> None:
        self._processing, self._mode = processing, mode
        self._taps = lru_cache(maxsize=_CACHED_TAPS)(
            partial(build_taps, device=device, resample=processing.resample)
        )
        self._mean = torch.tensor(processing.mean, dtype=torch.float32, device=device).view(3, 1, 1)
        self._std = torch.tensor(processing.std, dtype=torch.float32, device=device).view(3, 1, 1)

    def patches(self, pixels: Tensor, view: View, dtype: torch.dtype = torch.float32) -> Tensor:
        """[frames, height, width, 3] uint8 -> [grid_h * grid_w, 3 * temporal * patch * patch] of dtype.

        Tokens follow each other in reading order, the merge x merge patches of a token likewise; a patch is
        laid out as channel, frame, row, column. One frame is repeated over the temporal axis.
        """
        processing = self._processing
        _check(pixels, view, processing)
        size = view.grid[0] * processing.patch_size, view.grid[1] * processing.patch_size
        x0, y0, x1, y1 = view.box
        pixels = pixels[:, y0:y1, x0:x1]
        sizes = [(height, width) for width, height in view.resizes] or [size]
        left, top = view.offset
        cut = None if sizes[-1] == size else (top, left, *size)
        if use_triton("patchify", pixels, self._mode):
            return self._patches_triton(pixels, view.grid, sizes, cut, dtype)
        frames = torch.stack([self._resize(frame, sizes, single=len(pixels) == 1) for frame in pixels])
        if cut is not None:
            frames = crop(frames.permute(0, 3, 1, 2), *cut).permute(0, 2, 3, 1).contiguous()
        return self._normalise(_patchify(frames, view.grid, processing)).to(dtype)

    def _resize(self, frame: Tensor, sizes: Sequence[tuple[int, int]], *, single: bool) -> Tensor:
        for size in sizes:
            vertical_first = single and resizes_vertically_first((frame.shape[0], frame.shape[1]), size)
            frame = resize(frame, size, vertical_first, self._processing.resample)
        return frame

    def _patches_triton(
        self,
        pixels: Tensor,
        grid: tuple[int, int],
        sizes: Sequence[tuple[int, int]],
        cut: tuple[int, int, int, int] | None,
        dtype: torch.dtype,
    ) -> Tensor:
        processing = self._processing
        planes = []
        for frame in pixels:
            rows = frame.permute(0, 2, 1)  # [height, 3, width]
            for size in sizes:
                source = rows.shape[0], rows.shape[2]
                vertical_first = len(pixels) == 1 and resizes_vertically_first(source, size)
                for along in ("y", "x") if vertical_first else ("x", "y"):
                    have, want = (source[1], size[1]) if along == "x" else (source[0], size[0])
                    if have != want:
                        rows = resample_triton(rows, *self._taps(have, want), along)
            planes.append(rows if cut is None else crop(rows.transpose(0, 1), *cut).transpose(0, 1))
        stacked = torch.stack(planes).contiguous()
        merge, patch, time = processing.merge_size, processing.patch_size, processing.temporal_patch_size
        return patchify_triton(stacked, self._value_table, grid, merge, patch, time, dtype)

    @cached_property
    def _value_table(self) -> Tensor:
        """[3, 256] float32: the normalised pixel values."""
        every = torch.arange(256, dtype=torch.uint8, device=self._mean.device).expand(1, 3, 1, 256)
        temporal = self._processing.temporal_patch_size
        return self._normalise(every).view(3, temporal, 256)[:, 0].contiguous()

    def _normalise(self, values: Tensor) -> Tensor:
        """[P, 3, frames, n] uint8 -> [P, 3 * temporal * n] float32 of (value * rescale_factor - mean) / std.

        The product is rounded from float64, the rest is float32, as the reference processor rounds. Pieces
        bound the float64 workspace.
        """
        count, channels, _, size = values.shape
        shape = (count, channels, self._processing.temporal_patch_size, size)
        result = torch.empty(shape, dtype=torch.float32, device=values.device)
        step = max(1, _PIECE_VALUES // values[:1].numel())
        for start in range(0, count, step):
            piece = values[start : start + step].double().mul_(self._processing.rescale_factor).float()
            result[start : start + step] = piece.sub_(self._mean).div_(self._std)
        return result.flatten(1)


def build_taps(
    source: int, target: int, device: torch.device, resample: int = BICUBIC
) -> tuple[Tensor, Tensor]:
    """First source pixel [target] and weights [target, taps] of each output pixel, int32 on the device."""
    fixed = fixed_point_weights(source, target, resample)
    first, weights = (torch.from_numpy(one.astype(np.int32)) for one in fixed)
    if device.type == "cuda":  # zoomed views bring new lengths all the time, and no step may wait for a table
        first, weights = first.pin_memory(), weights.pin_memory()
    return first.to(device, non_blocking=True), weights.to(device, non_blocking=True)


def _check(pixels: Tensor, view: View, processing: PatchSettings) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise ValueError(
            f"pixels are {pixels.dtype} {tuple(pixels.shape)}; uint8 [frames, height, width, 3] is needed"
        )
    frames, height, width, _ = pixels.shape
    if frames not in (1, processing.temporal_patch_size):
        raise ValueError(
            f"a view has {frames} frames; it must have 1 or the model's {processing.temporal_patch_size}"
        )
    x0, y0, x1, y1 = view.box
    if not (0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height):
        raise ValueError(f"box {view.box} is empty or exceeds the image of {width} x {height} pixels")
    if view.merge != processing.merge_size or view.grid[0] % view.merge or view.grid[1] % view.merge:
        raise ValueError(
            f"grid {view.grid} merged by {view.merge} does not fit the model's merge, {processing.merge_size}"
        )


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """[..., height, width] from a position that may lie outside; there it is black."""
    rows, columns = image.shape[-2:]
    inside = image[..., max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    missing = (
        min(max(-left, 0), width),
        min(max(left + width - columns, 0), width),
        min(max(-top, 0), height),
        min(max(top + height - rows, 0), height),
    )
    return F.pad(inside, missing) if any(missing) else inside


def resize(pixels: Tensor, size: tuple[int, int], vertical_first: bool, resample: int = BICUBIC) -> Tensor:
    """[height, width, 3] uint8 -> [*size, 3] uint8, by Pillow, one axis at a time."""
    image = Image.fromarray(np.ascontiguousarray(pixels.cpu().numpy()))
    height, width = size
    between = (image.width, height) if vertical_first else (width, image.height)
    for target in (between, (width, height)):
        image = image.resize(target, Image.Resampling(resample))
    return torch.from_numpy(np.array(image)).to(pixels.device)


def resizes_vertically_first(source: tuple[int, int], target: tuple[int, int]) -> bool:
    """Whether Pillow resizes vertically first; rounding between the passes makes the order matter.

    Pillow 13 does so when the height shrinks by more than twice the pixels that the width loses. Earlier
    versions never do, nor does torchvision, which the reference processor of video uses.
    """
    lost_height, lost_width = source[0] - target[0], source[1] - target[1]
    return lost_height > 0 and lost_height > 2 * lost_width


def fixed_point_weights(source: int, target: int, resample: int = BICUBIC) -> tuple[Ints, Floats]:
    """First source pixel [target] and weights [target, taps] * 2 ** WEIGHT_BITS of each output pixel.

    The order of the float64 operations is Pillow's, so that every weight rounds to the same integer.
    """
    scale = source / target
    stretch = max(scale, 1.0)  # the window widens when shrinking, never narrows
    reach, kernel = _KERNELS[resample]
    support = reach * stretch
    centre = (np.arange(target) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support + 0.5).astype(np.int64), source) - first
    tap = np.arange(int(count.max()))
    weights = kernel(((tap + first[:, None]) - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[tap >= count[:, None]] = 0.0
    total = np.cumsum(weights, axis=1)[:, -1:]  # strictly left to right, unlike sum()
    weights = np.divide(weights, total, out=weights, where=total != 0)
    fixed = weights * (1 << WEIGHT_BITS)
    return first, np.trunc(np.where(fixed < 0, fixed - 0.5, fixed + 0.5))


def _cubic(x: Floats) -> Floats:
    x = np.abs(x)
    a = _CURVATURE
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _triangle(x: Floats) -> Floats:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _lanczos(x: Floats) -> Floats:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3.0), 0.0)


def _sinc(x: Floats) -> Floats:
    x = x * np.pi
    return np.where(x == 0.0, 1.0, np.sin(x) / np.where(x == 0.0, 1.0, x))


# By the filter's number: source pixels it reaches to each side when not shrinking, and its function.
_KERNELS = {1: (3.0, _lanczos), 2: (1.0, _triangle), BICUBIC: (2.0, _cubic)}


def _patchify(frames: Tensor, grid: tuple[int, int], processing: PatchSettings) -> Tensor:
    """[frames, height, width, 3] -> [grid_h * grid_w, 3, frames, patch * patch], patches in merge order."""
    count = frames.shape[0]
    merge, patch = processing.merge_size, processing.patch_size
    cut = frames.view(count, grid[0] // merge, merge, patch, grid[1] // merge, merge, patch, 3)
    # -> token row, token column, row in token, column in token, channel, frame, y, x
    return cut.permute(1, 4, 2, 5, 7, 0, 3, 6).reshape(grid[0] * grid[1], 3, count, patch * patch)
