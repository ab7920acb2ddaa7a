"""How large a picture or a video frame is to the model, and which frames of a video it sees.

takes   source sizes in pixels, frame counts, the checkpoint's processing values
gives   patch grids, `View`s, frame indices, timestamps
never   touches a pixel

The rule for a picture of width x height (the one of the Qwen-VL processors): both sides are rounded to a
multiple of `factor` = patch_size * merge_size; if the area then is above `max_pixels` both sides shrink by
the same ratio (rounded down, at least one factor), if it is below `min_pixels` both grow (rounded up). A side
ratio above 200 is refused. So 1x1 is fine, 1x20000 is not, 100x20000 is.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from blake3 import blake3

from saccade.errors import MediaRefused
from saccade.request import View

MAX_ASPECT = 200  # longer side / shorter side
DEFAULT_FPS = 24.0  # assumed for frames given without a rate


@dataclass(frozen=True, kw_only=True)
class _Processing:
    """What pictures and video frames have in common."""

    patch_size: int
    merge_size: int  # patches per token along each side
    temporal_patch_size: int  # frames per patch; a picture is repeated to fill it
    min_pixels: int  # after resizing: of a picture, or of all sampled frames of a video together
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float

    @property
    def factor(self) -> int:
        """Source pixels of one token along each side, after resizing."""
        return self.patch_size * self.merge_size

    @cached_property
    def digest(self) -> bytes:
        """Names what is done to pixels once the grid is chosen, which is not in it: the view has its grid."""
        sizes = np.array([self.patch_size, self.merge_size, self.temporal_patch_size], dtype="<i8").tobytes()
        values = np.array([*self.mean, *self.std, self.rescale_factor], dtype="<f8").tobytes()
        return blake3(b"bicubic-antialias-u8\0" + sizes + values).digest(length=16)


@dataclass(frozen=True, kw_only=True)
class ImageProcessing(_Processing):
    """What the checkpoint's image processor does: bicubic resize, rescale, normalise, cut into patches."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches for a picture of this size."""
        rows, columns = fit(width, height, self.factor, self.min_pixels, self.max_pixels)
        return rows // self.patch_size, columns // self.patch_size

    def token_grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens for a picture of this size."""
        rows, columns = self.grid(width, height)
        return rows // self.merge_size, columns // self.merge_size


@dataclass(frozen=True, kw_only=True)
class VideoProcessing(_Processing):
    """What the checkpoint's video processor does: sample frames, then as for pictures, two frames a patch."""

    fps: float = 2.0  # frames sampled per second of video
    min_frames: int = 4
    max_frames: int = 768
    frame_tokens: int | None = None  # None: no cap; else tokens one frame may cost (`cap_pixels_per_frame`)

    def grid(self, width: int, height: int, frames: int) -> tuple[int, int]:
        """Rows and columns of patches of every frame, for a video of `frames` sampled frames."""
        frames = max(frames, self.temporal_patch_size)  # a lone frame is shown twice
        most = self.max_pixels
        if self.frame_tokens is not None:
            cap = self.frame_tokens * self.factor * self.factor
            most = max(min(cap, self.max_pixels // frames), int(self.min_pixels * 1.05)) * frames
        rows, columns = _fit_frames(
            width, height, frames, self.temporal_patch_size, self.factor, self.min_pixels, most
        )
        return rows // self.patch_size, columns // self.patch_size

    def sample(self, total: int, fps: float, limit: int) -> list[int]:
        """Indices of the frames to show, of a video of `total` frames at `fps`, `limit` at most."""
        if total < 1:
            raise MediaRefused("The video has no frames.")
        wanted = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
        count = max(1, min(wanted, limit))
        return [int(index) for index in np.linspace(0, total - 1, count).round()]

    def timestamps(self, indices: list[int], fps: float) -> list[float]:
        """Seconds of each temporal patch: the middle of its first and last frame."""
        pairs = self.groups(len(indices))
        return [(indices[group[0]] / fps + indices[group[-1]] / fps) / 2 for group in pairs]

    def groups(self, frames: int) -> list[list[int]]:
        """Positions of the frames of each temporal patch; the last frame repeats to fill the last one."""
        step = self.temporal_patch_size
        return [
            [min(start + offset, frames - 1) for offset in range(step)] for start in range(0, frames, step)
        ]


def check_size(width: int, height: int) -> None:
    """Refuses an empty picture and one longer than 200 times its other side."""
    if width < 1 or height < 1:
        raise MediaRefused(f"The picture is {width}x{height} pixels; both sides must be at least 1.")
    _check_aspect(width, height)


def _check_aspect(width: int, height: int) -> None:
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise MediaRefused(
            f"The picture is {width}x{height} pixels; the longer side may be at most {MAX_ASPECT} times the"
            " shorter. Crop or pad it."
        )


def fit(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Resized height and width in pixels, multiples of `factor`, area within `least` .. `most`."""
    check_size(width, height)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt((height * width) / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def _fit_frames(
    width: int, height: int, frames: int, temporal: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """As `fit`, for all frames together; frames smaller than a token are first scaled up to one."""
    if width < 1 or height < 1:
        raise MediaRefused(f"The video is {width}x{height} pixels; both sides must be at least 1.")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(width, height)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    padded = round(frames / temporal) * temporal
    if padded * rows * columns > most:
        shrink = math.sqrt((frames * height * width) / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif padded * rows * columns < least:
        grow = math.sqrt(least / (frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def plain_view(content: bytes, size: tuple[int, int], processing: ImageProcessing) -> View:
    """The whole picture at the resolution its processor gives it; `size` is (width, height)."""
    width, height = size
    return View(
        content=content,
        box=(0, 0, width, height),
        grid=processing.grid(width, height),
        merge=processing.merge_size,
        processing=processing.digest,
    )


def global_view(view: View, token_grid: tuple[int, int]) -> View:
    """The same part of the same picture in another token grid."""
    grid = token_grid[0] * view.merge, token_grid[1] * view.merge
    return View(view.content, view.box, grid, view.merge, view.processing)


def video_view(content: bytes, size: tuple[int, int], frames: int, processing: VideoProcessing) -> View:
    """One temporal patch of a video of `frames` sampled frames; `content` names that patch's frames."""
    width, height = size
    return View(
        content=content,
        box=(0, 0, width, height),
        grid=processing.grid(width, height, frames),
        merge=processing.merge_size,
        processing=processing.digest,
    )
