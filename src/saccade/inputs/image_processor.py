"""The interface of image processors: image and video sizes to views, token counts and prompt text.

Each model family implements `ImageProcessor` (and `VideoProcessor`) in its own file, and checkpoint.py
selects the implementation by the class name in preprocessor_config.json. This is the torch-free half: it
never sees pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from blake3 import blake3

from saccade.errors import MediaRefused
from saccade.lod.types import Detail, Grid
from saccade.request import View

BICUBIC = 3  # Pillow's and the processors' number of the filter
FILTERS = {1: b"lanczos", 2: b"bilinear", BICUBIC: b"bicubic"}
MAX_ASPECT = 200  # longer side / shorter side
Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class PromptView:
    """A view and the prompt around its placeholder: text, which is tokenised, and token ids."""

    view: View
    before: tuple[str | int, ...] = ()
    after: tuple[str | int, ...] = ()
    frames: tuple[int, ...] | None = None  # positions of the video frames it shows; None: all pixels
    time: int | None = None  # `Media.time`


@dataclass(frozen=True, kw_only=True)
class PatchSettings:
    """How pixels become patches. The engine core reads it to preprocess on the device."""

    patch_size: int
    merge_size: int  # patches per token along each side
    temporal_patch_size: int  # frames per patch; an image is repeated to fill it
    min_pixels: int  # after resizing: of an image, or of all sampled frames of a video together
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    resample: int = BICUBIC  # one of FILTERS

    @property
    def factor(self) -> int:
        """Resized pixels of one token along each side."""
        return self.patch_size * self.merge_size

    @cached_property
    def digest(self) -> bytes:
        """Hash of everything that is done to pixels except the choice of the grid, which is in the view."""
        sizes = np.array([self.patch_size, self.merge_size, self.temporal_patch_size], dtype="<i8").tobytes()
        values = np.array([*self.mean, *self.std, self.rescale_factor], dtype="<f8").tobytes()
        return blake3(FILTERS[self.resample] + b"-antialias-u8\0" + sizes + values).digest(length=16)


@dataclass(frozen=True, kw_only=True)
class ImageProcessor(PatchSettings, ABC):
    """What one model family makes of an image."""

    # Whether an image is one view that may have any token grid; level of detail needs that.
    supports_lod: ClassVar[bool] = False
    # Whether rotary positions of visual tokens are counted like those of text, not by the token grid.
    sequential: ClassVar[bool] = False
    # Why the family's video processor is not read; empty: it is.
    no_video: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def from_config(cls, processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        """From preprocessor_config.json and config.json; CheckpointError for what is not implemented."""

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of patches of a view of the whole image."""

    def token_grid(self, width: int, height: int) -> Grid:
        rows, columns = self.grid(width, height)
        return rows // self.merge_size, columns // self.merge_size

    def views(self, content: bytes, size: Size, detail: Detail | None = None) -> tuple[PromptView, ...]:
        """What replaces the image's placeholder. A family that tiles images returns a view per tile.

        `detail` is what the request says. Families that support LOD leave it to LOD.
        """
        return (PromptView(plain_view(content, size, self)),)

    def num_tokens(self, size: Size, detail: Detail | None = None) -> int:
        """Visual tokens of an image; the same with its sides swapped, as an EXIF orientation may do."""
        return sum(one.view.tokens for one in self.views(b"", size, detail))


@dataclass(frozen=True, kw_only=True)
class VideoProcessor(PatchSettings, ABC):
    """What one model family makes of a video."""

    @classmethod
    @abstractmethod
    def from_config(cls, processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        """From video_preprocessor_config.json and config.json."""

    @abstractmethod
    def sample(self, total: int, fps: float, limit: int) -> list[int]:
        """Indices of the frames to show, of a video of `total` frames at `fps`; at most `limit`."""

    @abstractmethod
    def grid(self, width: int, height: int, frames: int) -> Grid:
        """Rows and columns of patches of every frame, for a video of `frames` sampled frames."""

    @abstractmethod
    def views(
        self, content: bytes, size: Size, indices: Sequence[int], fps: float, total: int
    ) -> tuple[PromptView, ...]:
        """What replaces the video's placeholder; `indices` are the frames sampled of `total`."""

    @abstractmethod
    def num_tokens(self, size: Size, frames: int) -> int:
        """Visual tokens of a video of `frames` sampled frames."""


def check_size(width: int, height: int) -> None:
    """Refuses an empty image and one whose sides differ by more than a factor of `MAX_ASPECT`."""
    if width < 1 or height < 1:
        raise MediaRefused(f"The image is {width}x{height} pixels; both sides must be at least 1.")
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise MediaRefused(
            f"The image is {width}x{height} pixels; the longer side may be at most {MAX_ASPECT} times the"
            " shorter. Crop or pad it."
        )


def plain_view(content: bytes, size: Size, processor: ImageProcessor) -> View:
    """The whole image at the resolution the processor gives it."""
    return View(content, (0, 0, *size), processor.grid(*size), processor.merge_size, processor.digest)


def global_view(view: View, token_grid: Grid) -> View:
    """The same region of the same image at another token grid."""
    grid = token_grid[0] * view.merge, token_grid[1] * view.merge
    return View(view.content, view.box, grid, view.merge, view.processing)
