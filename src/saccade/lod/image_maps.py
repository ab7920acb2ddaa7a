"""What pictures say by themselves, as captured calls: the texture and the maps made of it.

takes   a picture on the device, the token grid of its global view
gives   maps [STILL_MAPS, rows, columns], as `lod.relevance.still` gives them
owns    a captured call for each shape that came before (least recently used ones go), the buffer all of them
        read, the streams their branches are recorded on
never   lets a capture that fails end a request: such a shape takes the ordinary way, for good

Dozens of small kernels: launched one by one they cost the host several times what they cost the device. A
shape is the size the texture is made at and the grid, so pictures of one form share it, however large.
"""

import logging
from collections import OrderedDict
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.cuda_graph import CudaRecorder, PlainRecorder, Recorder, Replay
from saccade.lod.scorers import STILL, STILL_MAPS, still
from saccade.lod.texture import LONGEST, channels, working
from saccade.lod.types import Grid

log = logging.getLogger(__name__)

MOST_SHAPES = 32
SIGHTINGS = 2
NEVER = -1  # sightings of a shape that cannot be captured
COUNTED = 1024  # shapes whose sightings are known
# Of the device: the buffer, planes of the texture's size while a call runs (about 50 without the kernels),
# 3 MB a captured shape.
MOST_BYTES = 53 * LONGEST * LONGEST * 4 + (MOST_SHAPES << 20) * 3


class Shape(NamedTuple):
    size: tuple[int, int]  # rows, columns of the texture
    grid: Grid


class Still:
    """One shape over static buffers."""

    def __init__(self, shape: Shape, pixels: Tensor, streams: tuple[torch.cuda.Stream, ...]) -> None:
        high, wide = shape.size
        self._grid, self._streams = shape.grid, streams
        self._colour = pixels[: 3 * high * wide].view(3, high, wide)
        self._maps = pixels.new_zeros(STILL_MAPS, *shape.grid)
        self.replay: Replay | None = None

    def __call__(self, colour: Tensor) -> Tensor:
        self._colour.copy_(colour)
        (self.replay or self.run)()
        return self._maps.clone()

    def run(self) -> None:
        """What is captured."""
        self._maps.copy_(still(channels(self._colour), self._grid, self._streams))


class Stills:
    def __init__(
        self,
        device: torch.device,
        recorder: Recorder | None,  # None: nothing is captured
        *,
        sightings: int = SIGHTINGS,
        most_shapes: int = MOST_SHAPES,
        branches: bool = True,  # the maps side by side; False: to see what that is worth
    ) -> None:
        self._device, self._recorder, self._branches = device, recorder, branches
        self._sightings, self._most_shapes = sightings, most_shapes
        self._shapes: OrderedDict[Shape, Still] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[Shape, int] = OrderedDict()  # how often shapes not captured have come
        self._retired: Still | None = None  # the last that went: a step in flight may still run it

    def __len__(self) -> int:
        return len(self._shapes)

    @torch.inference_mode()
    def maps(self, picture: Tensor, grid: Grid) -> Tensor:
        """Of a picture uint8 [height, width, 3]."""
        colour = working(picture)
        shape = Shape((colour.shape[1], colour.shape[2]), grid)
        found = self._shapes.get(shape)
        if found is not None:
            self._shapes.move_to_end(shape)
            return found(colour)
        if self._recorder is None or not self._comes_often(shape):
            return still(channels(colour), grid)
        return self._capture(shape, colour, self._recorder)

    @cached_property
    def _pixels(self) -> Tensor:
        return torch.zeros(3 * LONGEST * LONGEST, device=self._device)

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Always the same ones: memory that a branch used is free for that stream's next branches alone."""
        if self._device.type != "cuda" or not self._branches:
            return ()
        return tuple(torch.cuda.Stream(self._device) for _ in STILL)  # type: ignore[no-untyped-call]

    def _comes_often(self, shape: Shape) -> bool:
        seen = self._seen.get(shape, 0)
        if seen == NEVER:
            return False
        self._seen[shape] = seen + 1
        self._seen.move_to_end(shape)
        while len(self._seen) > COUNTED:
            self._seen.popitem(last=False)
        return seen + 1 >= self._sightings

    def _capture(self, shape: Shape, colour: Tensor, recorder: Recorder) -> Tensor:
        try:
            made = Still(shape, self._pixels, self._streams)
            maps = made(colour)  # nothing may be made or compiled while capturing
            made.replay = recorder.record(made.run)
        except Exception as error:  # whatever it is: the ordinary way says so if it cannot do without
            self._seen[shape] = NEVER
            first = str(error).partition("\n")[0]
            log.warning("looks at pictures of %s pixels run uncaptured, slower: %s", shape.size, first)
            return still(channels(colour), shape.grid)
        self._seen.pop(shape, None)
        while len(self._shapes) >= self._most_shapes:
            _, self._retired = self._shapes.popitem(last=False)
        self._shapes[shape] = made
        return maps

    def check(self) -> None:
        """Raise unless the bounds hold."""
        if len(self._shapes) > self._most_shapes or len(self._seen) > COUNTED:
            raise RuntimeError(f"{len(self._shapes)} shapes are captured, {len(self._seen)} counted")
        if set(self._shapes) & set(self._seen):
            raise RuntimeError("a captured shape is still being counted")
        if any(made.replay is None for made in self._shapes.values()):
            raise RuntimeError("a shape among the captured ones is not captured")


def captured_stills(device: torch.device, *, graphs: bool) -> Stills:
    """As the device has it; on a CPU the twin, which captures whatever comes."""
    if not graphs:
        return Stills(device, None)
    if device.type == "cuda":
        return Stills(device, CudaRecorder(device))
    return Stills(device, PlainRecorder(), sightings=1)
