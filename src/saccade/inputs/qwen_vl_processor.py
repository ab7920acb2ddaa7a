"""The image and video processors of Qwen2-VL to Qwen3-VL checkpoints, equal to those of transformers.

`smart_resize` rounds both sides of an image to multiples of patch_size * merge_size. If the area then exceeds
max_pixels, both sides shrink by the same ratio (rounded down); if it is below min_pixels, both grow (rounded
up).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from blake3 import blake3

from saccade.errors import CheckpointError, MediaRefused
from saccade.inputs.image_processor import (
    BICUBIC,
    ImageProcessor,
    PromptView,
    Size,
    VideoProcessor,
    check_size,
)
from saccade.lod.types import Grid
from saccade.request import View

Json = Mapping[str, Any]

# Defaults of transformers where a file has no value.
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALVES = [0.5, 0.5, 0.5]


@dataclass(frozen=True, kw_only=True)
class Qwen2VLImageProcessor(ImageProcessor):
    supports_lod = True

    @classmethod
    def from_config(cls, processor: Json, model: Json) -> Self:
        where = "the image processor"
        settings = _patch_settings(processor, where, patch_size=14, mean=CLIP_MEAN, std=CLIP_STD)
        least, most = _area(processor, where, (56 * 56, 28 * 28 * 1280))
        return cls(min_pixels=least, max_pixels=most, **settings)

    def grid(self, width: int, height: int) -> Grid:
        check_size(width, height)
        rows, columns = smart_resize(width, height, self.factor, self.min_pixels, self.max_pixels)
        return rows // self.patch_size, columns // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVideoProcessor(VideoProcessor):
    """Every `temporal_patch_size` sampled frames become one view, preceded by their timestamp."""

    fps: float = 2.0  # frames sampled per second of video
    min_frames: int = 4
    max_frames: int = 768
    frame_tokens: int | None = None  # most tokens of one frame (`cap_pixels_per_frame`); None: no limit
    vision_start: tuple[int, ...] = ()  # token ids before and after each view
    vision_end: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, processor: Json, model: Json) -> Self:
        where = "the video processor"
        if processor.get("num_frames") is not None or processor.get("do_sample_frames") is False:
            raise CheckpointError(
                f"{where} fixes num_frames or turns do_sample_frames off; only fps is implemented"
            )
        settings = _patch_settings(processor, where, patch_size=16, mean=HALVES, std=HALVES)
        least, most = _area(processor, where, (128 * 32 * 32, 32 * 32 * 768))
        capped = bool(processor.get("cap_pixels_per_frame", False))
        start, end = model.get("vision_start_token_id"), model.get("vision_end_token_id")
        return cls(
            min_pixels=least,
            max_pixels=most,
            fps=positive_number(processor, where, "fps", 2.0),
            min_frames=int(positive_number(processor, where, "min_frames", 4)),
            max_frames=int(positive_number(processor, where, "max_frames", 768)),
            frame_tokens=int(positive_number(processor, where, "max_video_tokens", 768)) if capped else None,
            vision_start=() if start is None else (start,),
            vision_end=() if end is None else (end,),
            **settings,
        )

    def grid(self, width: int, height: int, frames: int) -> Grid:
        if width < 1 or height < 1:
            raise MediaRefused(f"The video is {width}x{height} pixels; both sides must be at least 1.")
        frames = max(frames, self.temporal_patch_size)  # a single frame is shown twice
        factor, most = self.factor, self.max_pixels
        if self.frame_tokens is not None:
            cap = self.frame_tokens * factor * factor
            most = max(min(cap, self.max_pixels // frames), int(self.min_pixels * 1.05)) * frames
        if height < factor or width < factor:  # smaller than a token: scaled up to one first
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        check_size(width, height)
        padded = round(frames / self.temporal_patch_size) * self.temporal_patch_size
        rows, columns = smart_resize(width, height, factor, self.min_pixels, most, frames, padded)
        return rows // self.patch_size, columns // self.patch_size

    def sample(self, total: int, fps: float, limit: int) -> list[int]:
        if total < 1:
            raise MediaRefused("The video has no frames.")
        wanted = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
        count = max(1, min(wanted, limit))
        return [int(index) for index in np.linspace(0, total - 1, count).round()]

    def groups(self, frames: int) -> list[list[int]]:
        return frame_groups(frames, self.temporal_patch_size)

    def timestamps(self, indices: Sequence[int], fps: float) -> list[float]:
        """Seconds of each temporal patch: the middle of its first and last frame."""
        groups = self.groups(len(indices))
        return [(indices[group[0]] / fps + indices[group[-1]] / fps) / 2 for group in groups]

    def views(
        self, content: bytes, size: Size, indices: Sequence[int], fps: float, total: int
    ) -> tuple[PromptView, ...]:
        grid, box = self.grid(*size, len(indices)), (0, 0, *size)
        found = []
        for group, seconds in zip(self.groups(len(indices)), self.timestamps(indices, fps), strict=True):
            shown = frames_hash(content, [indices[position] for position in group])
            view = View(shown, box, grid, self.merge_size, self.digest)
            before: tuple[str | int, ...] = (f"<{seconds:.1f} seconds>", *self.vision_start)
            found.append(PromptView(view, before, self.vision_end, tuple(group)))
        return tuple(found)

    def num_tokens(self, size: Size, frames: int) -> int:
        rows, columns = self.grid(*size, frames)
        return len(self.groups(frames)) * (rows * columns // self.merge_size**2)


@dataclass(frozen=True, kw_only=True)
class Qwen2VLVideoProcessor(VideoProcessor):
    """Every `temporal_patch_size` sampled frames become one view; all stand in the same rows and columns, at
    times that grow by one (Qwen2-VL) or with the seconds between them (Qwen2.5-VL)."""

    fps: float = 2.0  # frames sampled per second of video
    min_frames: int = 4
    max_frames: int = 768
    video_tokens: int | None = None  # bounds all frames together (`cap_pixels_per_frame`); None: no limit
    tokens_per_second: float | None = None  # rotary positions of a second; None: one for each view

    @classmethod
    def from_config(cls, processor: Json, model: Json) -> Self:
        where = "the video processor"
        if processor.get("num_frames") is not None:
            raise CheckpointError(f"{where} fixes num_frames; only fps is implemented")
        settings = _patch_settings(processor, where, patch_size=14, mean=CLIP_MEAN, std=CLIP_STD)
        least, most = _area(processor, where, (128 * 28 * 28, 28 * 28 * 768))
        capped = bool(processor.get("cap_pixels_per_frame", False))
        vision = model.get("vision_config")
        vision = vision if isinstance(vision, Mapping) else {}
        timed = "tokens_per_second" in vision or model.get("model_type") == "qwen2_5_vl"
        return cls(
            min_pixels=least,
            max_pixels=most,
            fps=positive_number(processor, where, "fps", 2.0),
            min_frames=int(positive_number(processor, where, "min_frames", 4)),
            max_frames=int(positive_number(processor, where, "max_frames", 768)),
            video_tokens=int(positive_number(processor, where, "max_video_tokens", 128000))
            if capped
            else None,
            tokens_per_second=positive_number(vision, "config.json", "tokens_per_second", 4)
            if timed
            else None,
            **settings,
        )

    def grid(self, width: int, height: int, frames: int) -> Grid:
        check_size(width, height)
        most = self.max_pixels
        if self.video_tokens is not None:
            total = int(self.video_tokens * self.factor * self.factor * 0.9)
            most = min(most, total * self.temporal_patch_size // max(frames, 1))
            most = max(most, int(self.min_pixels * 1.05))
        rows, columns = smart_resize(width, height, self.factor, self.min_pixels, most)
        return rows // self.patch_size, columns // self.patch_size

    def sample(self, total: int, fps: float, limit: int) -> list[int]:
        if total < 1:
            raise MediaRefused("The video has no frames.")
        step = self.temporal_patch_size
        most = min(self.max_frames, total, limit) // step * step
        wanted = min(max(total / fps * self.fps, self.min_frames), most, total)
        count = int(wanted) // step * step
        if count < 1:  # fewer frames than a view has: the last one repeats
            return list(range(min(total, limit)))
        return [position * total // count for position in range(count)]

    def views(
        self, content: bytes, size: Size, indices: Sequence[int], fps: float, total: int
    ) -> tuple[PromptView, ...]:
        grid, box = self.grid(*size, len(indices)), (0, 0, *size)
        groups = frame_groups(len(indices), self.temporal_patch_size)
        interval = np.float32(1)
        if self.tokens_per_second is not None:
            sampled_fps = len(indices) / total * fps
            seconds = np.float32(self.temporal_patch_size / sampled_fps)
            interval = np.float32(self.tokens_per_second) * seconds
        found = []
        for number, group in enumerate(groups):
            shown = frames_hash(content, [indices[position] for position in group])
            view = View(shown, box, grid, self.merge_size, self.digest)
            time = int(np.float32(number) * interval) if number else None
            found.append(PromptView(view, frames=tuple(group), time=time))
        return tuple(found)

    def num_tokens(self, size: Size, frames: int) -> int:
        rows, columns = self.grid(*size, frames)
        views = len(frame_groups(frames, self.temporal_patch_size))
        return views * (rows * columns // self.merge_size**2)


def frame_groups(frames: int, step: int) -> list[list[int]]:
    """Positions of the frames of each temporal patch; the last frame repeats to fill the last one."""
    return [[min(start + offset, frames - 1) for offset in range(step)] for start in range(0, frames, step)]


def frames_hash(content: bytes, indices: Sequence[int]) -> bytes:
    """Hash of some frames of the video whose content hash is `content`."""
    parts = (b"frames", content, b"".join(index.to_bytes(8, "little") for index in indices))
    return blake3(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest(length=32)


def smart_resize(
    width: int, height: int, factor: int, least: int, most: int, frames: int = 1, padded: int = 1
) -> tuple[int, int]:
    """Resized height and width, multiples of `factor`, whose area is within `least` and `most`.

    Of a video it is the area of all `frames` together, `padded` to whole temporal patches.
    """
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if padded * rows * columns > most:
        shrink = math.sqrt((frames * height * width) / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif padded * rows * columns < least:
        grow = math.sqrt(least / (frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def _patch_settings(
    config: Json, where: str, patch_size: int, mean: list[float], std: list[float]
) -> dict[str, Any]:
    """The fields of `PatchSettings` but for the area; refuses steps that are not implemented."""
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if config.get(step, True) is False:
            raise CheckpointError(f"{where} turns {step} off; that is not implemented")
    for step in ("do_pad", "do_center_crop"):
        if config.get(step):
            raise CheckpointError(f"{where} turns {step} on; that is not implemented")
    resample = config.get("resample", BICUBIC)
    if resample != BICUBIC:
        raise CheckpointError(
            f"{where} resamples with filter {resample!r}; only bicubic ({BICUBIC}) is implemented"
        )
    return {
        "patch_size": int(positive_number(config, where, "patch_size", patch_size)),
        "merge_size": int(positive_number(config, where, "merge_size", 2)),
        "temporal_patch_size": int(positive_number(config, where, "temporal_patch_size", 2)),
        "mean": read_triple(config, where, "image_mean", mean),
        "std": read_triple(config, where, "image_std", std),
        "rescale_factor": positive_number(config, where, "rescale_factor", 1 / 255),
    }


def _area(config: Json, where: str, default: tuple[int, int]) -> tuple[int, int]:
    """Fewest and most pixels; `min_pixels` and `max_pixels` of older files win over `size`."""
    size = config.get("size")
    size = size if isinstance(size, dict) else {}
    least = config.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default[0]
    most = config.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default[1]
    for value in (least, most):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{where} has the area limit {value!r}; a positive whole number is needed")
    if least > most:
        raise CheckpointError(f"{where} asks for at least {least} and at most {most} pixels")
    return least, most


def positive_number(config: Json, where: str, key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{where} has {key} {value!r}; a positive number is needed")
    return float(value)


def read_triple(config: Json, where: str, key: str, default: list[float]) -> tuple[float, float, float]:
    value = config.get(key, default)
    numbers = isinstance(value, list) and all(isinstance(one, int | float) for one in value)
    if not numbers or len(value) != 3:
        raise CheckpointError(f"{where} has {key} {value!r}; three numbers are needed")
    return float(value[0]), float(value[1]), float(value[2])
