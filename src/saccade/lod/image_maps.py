"""What pictures say by themselves, as captured calls: the texture and the maps made of it.

takes   a picture on the device, the token grid of its global view
gives   maps [STILL_MAPS, rows, columns], as `lod.relevance.still` gives them
owns    a captured call for each shape that came before (least recently used ones go), the buffer all of them
        read, the streams their branches are recorded on
never   lets a capture that fails end a request: such a shape takes the ordinary way, for good

Dozens of small kernels: launched one by one they cost the host several times what they cost the device. A
shape is the size the texture is made at and the grid, so pictures of one form share it, however large.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.cuda_graph import CudaGraphCache, CudaRecorder, PlainRecorder, Recorder, Replay
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.lod.scorers import IMAGE_MAP_NAMES, NUM_IMAGE_MAPS, image_maps
from saccade.lod.texture import LONGEST, channels, to_working_size
from saccade.lod.types import Grid

MOST_SHAPES = 32
SIGHTINGS = 2
# Of the device: the buffer, planes of the texture's size while a call runs (about 50 without the kernels),
# 3 MB a captured shape.
MOST_BYTES = 53 * LONGEST * LONGEST * 4 + (MOST_SHAPES << 20) * 3


class Shape(NamedTuple):
    size: tuple[int, int]  # rows, columns of the texture
    grid: Grid


class Still:
    """One shape over static buffers."""

    def __init__(
        self, shape: Shape, pixels: Tensor, streams: tuple[torch.cuda.Stream, ...], mode: KernelMode
    ) -> None:
        high, wide = shape.size
        self._grid, self._streams, self._mode = shape.grid, streams, mode
        self._colour = pixels[: 3 * high * wide].view(3, high, wide)
        self._maps = pixels.new_zeros(NUM_IMAGE_MAPS, *shape.grid)
        self.replay: Replay | None = None

    def __call__(self, colour: Tensor) -> Tensor:
        self._colour.copy_(colour)
        (self.replay or self.run)()
        return self._maps.clone()

    def run(self) -> None:
        """What is captured."""
        self._maps.copy_(
            image_maps(channels(self._colour, self._mode), self._grid, self._streams, self._mode)
        )


class Stills:
    def __init__(
        self,
        device: torch.device,
        recorder: Recorder | None,  # None: nothing is captured
        *,
        sightings: int = SIGHTINGS,
        most_shapes: int = MOST_SHAPES,
        branches: bool = True,  # the maps side by side; False: to see what that is worth
        mode: KernelMode = DEFAULT_MODE,
    ) -> None:
        self._device, self._branches, self._mode = device, branches, mode
        self._graphs: CudaGraphCache[Shape, Still] | None = None
        if recorder is not None:
            self._graphs = CudaGraphCache("image maps of", recorder, most_shapes, min_uses=sightings)

    def __len__(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def maps(self, picture: Tensor, grid: Grid) -> Tensor:
        """Of a picture uint8 [height, width, 3]."""
        colour = to_working_size(picture, self._mode)
        shape = Shape((colour.shape[1], colour.shape[2]), grid)
        if self._graphs is None:
            return image_maps(channels(colour, self._mode), grid, mode=self._mode)
        found = self._graphs.get(shape)
        if found is not None:
            return found(colour)
        if not self._graphs.is_due(shape):
            return image_maps(channels(colour, self._mode), grid, mode=self._mode)
        return self._capture(shape, colour, self._graphs)

    @cached_property
    def _pixels(self) -> Tensor:
        return torch.zeros(3 * LONGEST * LONGEST, device=self._device)

    @cached_property
    def _streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Always the same ones: memory that a branch used is free for that stream's next branches alone."""
        if self._device.type != "cuda" or not self._branches:
            return ()
        return tuple(torch.cuda.Stream(self._device) for _ in IMAGE_MAP_NAMES)  # type: ignore[no-untyped-call]

    def _capture(self, shape: Shape, colour: Tensor, graphs: CudaGraphCache[Shape, Still]) -> Tensor:
        try:
            made = Still(shape, self._pixels, self._streams, self._mode)
            maps = made(colour)  # compiles and allocates, which must not happen during the capture
            made.replay = graphs.record(made.run)
        except Exception as error:  # of any kind: the uncaptured call raises it if it fails too
            graphs.fail(shape, error)
            return image_maps(channels(colour, self._mode), shape.grid, mode=self._mode)
        graphs.put(shape, made)
        return maps

    def check(self) -> None:
        """Raise unless the bounds hold."""
        if self._graphs is not None:
            self._graphs.check()


def captured_stills(device: torch.device, *, graphs: bool, mode: KernelMode = DEFAULT_MODE) -> Stills:
    """As the device has it; on a CPU the twin, which captures whatever comes."""
    if not graphs:
        return Stills(device, None, mode=mode)
    if device.type == "cuda":
        return Stills(device, CudaRecorder(device), mode=mode)
    return Stills(device, PlainRecorder(), sightings=1, mode=mode)
