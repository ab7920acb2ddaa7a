"""Image processors of families whose vision tower takes views of one fixed size, equal to transformers'.

LLaVA-1.5 crops the centre of an image. Idefics3 and SmolVLM cut a resized image into tiles, named by row and
column, and add the whole image.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from saccade.errors import CheckpointError
from saccade.inputs.image_processor import (
    BICUBIC,
    FILTERS,
    ImageProcessor,
    PromptView,
    Size,
    check_size,
)
from saccade.inputs.qwen_vl_processor import CLIP_MEAN, CLIP_STD, HALVES, positive_number, read_triple
from saccade.lod.types import Detail, Grid
from saccade.request import View

Json = Mapping[str, Any]
WHERE = "the image processor"
LANCZOS = 1
MAX_SIDE = 4096  # of an image of Idefics3 after its first resize


@dataclass(frozen=True, kw_only=True)
class FixedSizeProcessor(ImageProcessor):
    """Every view has `side` x `side` pixels."""

    sequential = True
    side: int

    def grid(self, width: int, height: int) -> Grid:
        check_size(width, height)
        return self.side // self.patch_size, self.side // self.patch_size

    def view(self, content: bytes, size: Size, resizes: tuple[Size, ...], offset: Size = (0, 0)) -> View:
        box = (0, 0, *size)
        return View(content, box, self.grid(*size), self.merge_size, self.digest, resizes, offset)


@dataclass(frozen=True, kw_only=True)
class CLIPImageProcessor(FixedSizeProcessor):
    """The shorter side becomes `side`, then the centre is cut out."""

    no_video = "LLaVA-1.5 takes no videos"

    @classmethod
    def from_config(cls, processor: Json, model: Json) -> Self:
        shorter = _edge(processor, "size", 224, "shortest_edge")
        side = _edge(processor, "crop_size", 224)
        if shorter != side or processor.get("do_center_crop") is False:
            raise CheckpointError(
                f"{WHERE} resizes the shorter side to {shorter} and crops {side} pixels; only crops of that"
                " same size are implemented"
            )
        return cls(side=side, **_settings(processor, model, side, 1, BICUBIC, CLIP_MEAN, CLIP_STD))

    def views(self, content: bytes, size: Size, detail: Detail | None = None) -> tuple[PromptView, ...]:
        width, height = size
        check_size(width, height)
        longer = int(self.side * max(size) / min(size))
        resized = (self.side, longer) if width <= height else (longer, self.side)
        offset = (resized[0] - self.side) // 2, (resized[1] - self.side) // 2
        return (PromptView(self.view(content, size, (resized,), offset)),)


@dataclass(frozen=True, kw_only=True)
class Idefics3ImageProcessor(FixedSizeProcessor):
    """The longer side becomes `longest`, then both sides multiples of `side`: tiles row by row, then the
    whole image. An image of one tile is shown once. `detail` low leaves out the tiles."""

    no_video = "videos of SmolVLM are not implemented"
    longest: int
    split: bool = True

    @classmethod
    def from_config(cls, processor: Json, model: Json) -> Self:
        side = _edge(processor, "max_image_size", 364, "longest_edge")
        longest = _edge(processor, "size", 4 * 364, "longest_edge")
        if longest > MAX_SIDE:
            raise CheckpointError(f"{WHERE} resizes to {longest} pixels; at most {MAX_SIDE} are implemented")
        merge = model.get("scale_factor", 2)
        if isinstance(merge, bool) or not isinstance(merge, int) or merge < 1:
            raise CheckpointError(
                f"config.json has scale_factor {merge!r}; a positive whole number is needed"
            )
        settings = _settings(processor, model, side, merge, LANCZOS, HALVES, HALVES)
        split = processor.get("do_image_splitting", True) is not False
        return cls(side=side, longest=longest, split=split, **settings)

    def views(self, content: bytes, size: Size, detail: Detail | None = None) -> tuple[PromptView, ...]:
        check_size(*size)
        first = _scale_longest(size, self.longest)
        around = "<fake_token_around_image>"
        whole = (self.side, self.side)
        if not self.split or detail == "low":
            view = self.view(content, size, (first, whole))
            return (PromptView(view, (f"{around}<global-img>",), (around,)),)
        canvas = _round_up(first, self.side)
        columns, rows = canvas[0] // self.side, canvas[1] // self.side
        if rows == columns == 1:
            view = self.view(content, size, (first, canvas))
            return (PromptView(view, (f"{around}<global-img>",), (around,)),)
        found = []
        for row in range(rows):
            for column in range(columns):
                view = self.view(content, size, (first, canvas), (column * self.side, row * self.side))
                # One text: a tokenizer may join the newlines of two rows.
                newline = "\n" if row and not column else ""
                found.append(PromptView(view, (f"{newline}{around}<row_{row + 1}_col_{column + 1}>",)))
        view = self.view(content, size, (first, canvas, whole))
        found.append(PromptView(view, (f"\n\n{around}<global-img>",), (around,)))
        return tuple(found)


def _scale_longest(size: Size, longest: int) -> Size:
    """The longer side becomes `longest`; the other keeps the ratio, rounded up to an even number."""
    width, height = size
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return longest, max(other + other % 2, 1)
    other = int(longest * ratio)
    return max(other + other % 2, 1), longest


def _round_up(size: Size, side: int) -> Size:
    """Both sides as multiples of `side`, the longer one first."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height


def _settings(
    config: Json, model: Json, side: int, merge: int, resample: int, mean: list[float], std: list[float]
) -> dict[str, Any]:
    """The fields of `PatchSettings`; refuses a view that is not what the vision tower takes."""
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if config.get(step, True) is False:
            raise CheckpointError(f"{WHERE} turns {step} off; that is not implemented")
    chosen = config.get("resample", resample)
    if chosen not in FILTERS:
        raise CheckpointError(
            f"{WHERE} resamples with filter {chosen!r}; implemented are {', '.join(map(str, FILTERS))}"
        )
    vision = model.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patch, image = (
        int(positive_number(vision, "config.json", "patch_size", 32)),
        vision.get("image_size", 224),
    )
    if image != side:
        raise CheckpointError(
            f"{WHERE} makes views of {side} x {side} pixels; the vision tower takes {image} ('image_size' of"
            " config.json)"
        )
    if side // patch % merge:
        raise CheckpointError(
            f"config.json: {side // patch} patches of a view's side do not divide by {merge}"
        )
    return {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 1,
        "min_pixels": side * side,
        "max_pixels": side * side,
        "mean": read_triple(config, WHERE, "image_mean", mean),
        "std": read_triple(config, WHERE, "image_std", std),
        "rescale_factor": positive_number(config, WHERE, "rescale_factor", 1 / 255),
        "resample": chosen,
    }


def _edge(config: Json, key: str, default: int, name: str = "height") -> int:
    """A size in pixels: a number, {`name`: number}, or a square's height and width."""
    value = config.get(key, default)
    if isinstance(value, Mapping):
        value = value.get(name) if name in value else value.get("height")
        if "width" in config[key] and config[key]["width"] != value:
            raise CheckpointError(f"{WHERE} has {key} {dict(config[key])}; only squares are implemented")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{WHERE} has {key} {config.get(key)!r}; a size in pixels is needed")
    return value
