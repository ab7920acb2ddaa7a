"""Image maps (texture and the maps made of it) as CUDA graphs, one per shape that is used often.

Launched one by one, the dozens of small kernels cost the host several times what they cost the device. A
shape is the size of the texture and the token grid, so that images of one aspect ratio share it, whatever
their size.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.cuda_graph import CudaGraphCache, CudaRecorder, PlainRecorder, Recorder, Replay
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.lod.scorers import NUM_IMAGE_MAPS, image_maps
from saccade.lod.texture import LONGEST, channels, to_working_size
from saccade.lod.types import Grid

MAX_SHAPES = 32
MIN_USES = 2
# Of the device: the buffer, planes of the texture's size while a call runs (about 50 with the reference
# implementation), 3 MB per graph.
MAX_BYTES = 53 * LONGEST * LONGEST * 4 + (MAX_SHAPES << 20) * 3


class MapShape(NamedTuple):
    size: tuple[int, int]  # rows, columns of the texture
    grid: Grid


class ImageMapGraph:
    """One shape, over static buffers."""

    def __init__(self, shape: MapShape, pixels: Tensor, mode: KernelMode) -> None:
        high, wide = shape.size
        self._grid, self._mode = shape.grid, mode
        self._colour = pixels[: 3 * high * wide].view(3, high, wide)
        self._maps = pixels.new_zeros(NUM_IMAGE_MAPS, *shape.grid)
        self.replay: Replay | None = None

    def __call__(self, colour: Tensor) -> Tensor:
        self._colour.copy_(colour)
        (self.replay or self.run)()
        return self._maps.clone()

    def run(self) -> None:
        """What the graph captures."""
        self._maps.copy_(image_maps(channels(self._colour, self._mode), self._grid, self._mode))


class ImageMapRunner:
    def __init__(
        self,
        device: torch.device,
        recorder: Recorder | None,  # None: nothing is captured
        *,
        min_uses: int = MIN_USES,
        max_shapes: int = MAX_SHAPES,
        mode: KernelMode = DEFAULT_MODE,
    ) -> None:
        self._device, self._mode = device, mode
        self._graphs: CudaGraphCache[MapShape, ImageMapGraph] | None = None
        if recorder is not None:
            self._graphs = CudaGraphCache("image maps of", recorder, max_shapes, min_uses=min_uses)

    def __len__(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def maps(self, image: Tensor, grid: Grid) -> Tensor:
        """`image`: uint8 [height, width, 3]."""
        colour = to_working_size(image, self._mode)
        graphs, shape = self._graphs, MapShape((colour.shape[1], colour.shape[2]), grid)
        found = graphs.get(shape) if graphs is not None else None
        if found is not None:
            return found(colour)
        if graphs is not None and graphs.is_due(shape):
            try:
                made = ImageMapGraph(shape, self._pixels, self._mode)
                maps = made(colour)  # compiles and allocates, which must not happen during the capture
                made.replay = graphs.record(made.run)
                graphs.put(shape, made)
                return maps
            except Exception as error:  # of any kind: the uncaptured call raises it if it fails too
                graphs.fail(shape, error)
        return image_maps(channels(colour, self._mode), grid, self._mode)

    @cached_property
    def _pixels(self) -> Tensor:
        return torch.zeros(3 * LONGEST * LONGEST, device=self._device)

    def check(self) -> None:
        """Raise unless the bounds hold."""
        if self._graphs is not None:
            self._graphs.check()


def build_image_map_runner(
    device: torch.device, *, graphs: bool, mode: KernelMode = DEFAULT_MODE
) -> ImageMapRunner:
    """With CUDA graphs on a GPU, with their reference implementation on a CPU."""
    if not graphs:
        return ImageMapRunner(device, None, mode=mode)
    if device.type == "cuda":
        return ImageMapRunner(device, CudaRecorder(device), mode=mode)
    return ImageMapRunner(device, PlainRecorder(), min_uses=1, mode=mode)
