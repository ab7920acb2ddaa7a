"""Simulated traffic: kinds of requests such as `image:rate=6,prompt=64,image=1024x1024,output=64`, and
Poisson arrivals of requests. A simulated view has sizes and an identity, no pixels."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import NamedTuple

import numpy as np

from saccade.errors import ConfigError
from saccade.inputs.image_processor import check_size
from saccade.inputs.qwen_vl_processor import smart_resize
from saccade.request import Media, Request, Sampling, View

SYNTAX = "NAME:key=value,... with the keys " + (
    "rate, prompt, output, shared, priority, image=WxH, video=WxH, frames, images, view_tokens, distinct"
)


@dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """How an image becomes tokens. Defaults are those of the Qwen3-VL processors."""

    patch: int = 16
    merge: int = 2
    frames: int = 2  # of a video per view
    least_pixels: int = 65_536
    most_pixels: int = 16_777_216

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of an image of (width, height)."""
        check_size(*size)
        rows, columns = smart_resize(*size, self.patch * self.merge, self.least_pixels, self.most_pixels)
        return rows // self.patch, columns // self.patch


@dataclass(frozen=True, kw_only=True)
class TrafficKind:
    name: str
    rate: float = 1.0  # per second
    prompt: int = 128  # text tokens
    output: int = 128  # mean tokens of an answer, drawn from half to one and a half of it
    shared: int = 0  # leading prompt tokens that all requests of the kind share
    priority: int = 0
    image: tuple[int, int] | None = None  # width, height
    video: tuple[int, int] | None = None
    frames: int = 32  # of a video, after sampling
    images: int = 1  # per request, if there are any
    view_tokens: int | None = None  # of each view, instead of width and height
    distinct: int | None = None  # number of distinct images; None: each is new

    def __post_init__(self) -> None:
        counts = ("prompt", "output", "frames", "images", "view_tokens", "distinct")
        for key, least in {"shared": 0, **dict.fromkeys(counts, 1)}.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise ConfigError(f"{self.name}: {key} is {value}; use {least} or more")
        if not 0 < self.rate < 1e6:
            raise ConfigError(
                f"{self.name}: rate is {self.rate}; it must be positive, in requests per second"
            )
        if self.shared > self.prompt:
            raise ConfigError(
                f"{self.name}: {self.shared} tokens are shared, but the prompt has {self.prompt}"
            )
        if self.image and self.video:
            raise ConfigError(f"{self.name}: give image or video; make two kinds of traffic for both")

    def grids(self, vision: VisionSizes) -> list[tuple[int, int]]:
        """The patch grid of every view of a request."""
        size = self.image or self.video
        if size is None and self.view_tokens is None:
            return []
        count = self.images if self.video is None else self.images * -(-self.frames // vision.frames)
        if self.view_tokens is not None:
            return [(vision.merge, vision.merge * self.view_tokens)] * count
        return [vision.grid(size or (0, 0))] * count

    def visual_tokens(self, vision: VisionSizes) -> int:
        return sum(rows * columns // vision.merge**2 for rows, columns in self.grids(vision))

    def tokens(self, vision: VisionSizes) -> int:
        """Of a request with its complete answer."""
        return self.prompt + self.visual_tokens(vision) + self.output


def parse_kind(text: str) -> TrafficKind:
    """Parses `NAME:key=value,...`."""
    name, colon, rest = text.partition(":")
    known = {field.name for field in fields(TrafficKind)} - {"name"}
    values: dict[str, int | float | tuple[int, int]] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not equals:
            raise ConfigError(f"{part!r} in the traffic {text!r} is not understood; write {SYNTAX}")
        try:
            values[key] = _value(key, value)
        except ValueError:
            raise ConfigError(f"{key} is {value!r} in the traffic {text!r}; write {SYNTAX}") from None
    if not name or not colon:
        raise ConfigError(f"the traffic {text!r} is not understood; write {SYNTAX}")
    return TrafficKind(name=name, **values)  # type: ignore[arg-type]  # the keys are its fields


def _value(key: str, value: str) -> int | float | tuple[int, int]:
    if key in ("image", "video"):
        width, _, height = value.partition("x")
        return int(width), int(height)
    return float(value) if key == "rate" else int(value)


class Arrival(NamedTuple):
    at: float  # seconds
    kind: TrafficKind
    request: Request


def arrivals(
    kinds: Sequence[TrafficKind],
    vision: VisionSizes,
    seed: int,
    *,
    seconds: float | None,
    requests: int | None = None,
) -> Iterator[Arrival]:
    """In order of time, for `seconds` or until there are `requests`."""
    draw = Random(seed)
    due = [(draw.expovariate(kind.rate), index) for index, kind in enumerate(kinds)]
    heapq.heapify(due)
    number = 0
    while due and (requests is None or number < requests):
        at, index = heapq.heappop(due)
        if seconds is not None and at > seconds:
            return
        kind = kinds[index]
        heapq.heappush(due, (at + draw.expovariate(kind.rate), index))
        yield Arrival(at, kind, _request(kind, index, number, vision, draw, at))
        number += 1


def _request(
    kind: TrafficKind, index: int, number: int, vision: VisionSizes, draw: Random, at: float
) -> Request:
    """Token ids are those of the request (or of the kind, if shared), so that nothing else is equal."""
    grids = kind.grids(vision)
    chosen = number if kind.distinct is None else draw.randrange(kind.distinct)
    media = tuple(
        _medium(kind.shared + slot, index, chosen, slot, grid, vision) for slot, grid in enumerate(grids)
    )
    own = 1_000 + number
    prompt = (1 + index,) * kind.shared + (0,) * len(grids) + (own,) * (kind.prompt - kind.shared)
    low = max(kind.output // 2, 1)
    output = draw.randint(low, max(2 * kind.output - low, low))
    return Request(
        id=str(number),
        prompt=prompt,
        media=media,
        sampling=Sampling(max_tokens=output),
        priority=kind.priority,
        arrived=at,
    )


_NO_PIXELS = np.zeros((1, 1, 1, 3), dtype=np.uint8)


def _medium(
    slot: int, kind: int, chosen: int, which: int, grid: tuple[int, int], vision: VisionSizes
) -> Media:
    content = b"".join(part.to_bytes(8, "little") for part in (kind, chosen, which))
    box = (0, 0, grid[1] * vision.patch, grid[0] * vision.patch)
    return Media(slot, View(content, box, grid, vision.merge, b"simulated"), _NO_PIXELS)
