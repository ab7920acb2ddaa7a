"""Relevance and image maps on their way from the device to the host."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.lod.scorers import unpack_image_maps
from saccade.lod.types import Grid, ImageMaps, RelevanceMaps


class HostCopy:
    """An asynchronous copy of float32 numbers to the host."""

    def __init__(self, numbers: Tensor) -> None:
        """The source may be overwritten by work launched after this."""
        self._done: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._numbers = numbers.clone()
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    @property
    def ready(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> NDArray[np.float32]:
        if self._done is not None:
            self._done.synchronize()
        return self._numbers.numpy()


class ImageMapsTransfer:
    """The maps of a view that do not depend on the question."""

    def __init__(self, content: bytes, grid: Grid, maps: Tensor) -> None:
        """`maps`: [NUM_IMAGE_MAPS, rows, columns] on the device."""
        self.content = content  # hash of the image
        self.tokens = grid[0] * grid[1]  # of the view
        self._grid = grid
        self._maps: HostCopy | ImageMaps = HostCopy(maps.reshape(-1))

    @property
    def ready(self) -> bool:
        return isinstance(self._maps, ImageMaps) or self._maps.ready

    def wait(self) -> ImageMaps:
        if not isinstance(self._maps, ImageMaps):
            self._maps = unpack_image_maps(self._maps.wait(), self._grid)
        return self._maps


class RelevanceSlice(NamedTuple):
    """The relevance of one target among the numbers of a step."""

    grid: Grid
    image_maps: ImageMapsTransfer
    share: int  # offset of the participatory map
    strength: int  # offset of the strength

    def unpack(self, numbers: NDArray[np.float32]) -> RelevanceMaps:
        share = numbers[self.share : self.share + self.grid[0] * self.grid[1]].reshape(self.grid)
        return RelevanceMaps(
            image_maps=self.image_maps.wait(), participatory=share, strength=float(numbers[self.strength])
        )


class RelevanceTransfer:
    """The relevance of a step's targets."""

    def __init__(self, numbers: HostCopy, targets: tuple[tuple[RelevanceSlice, ...], ...]) -> None:
        self._numbers = numbers
        self._targets = targets  # per sequence with targets
        self._result: tuple[tuple[RelevanceMaps, ...], ...] | None = None

    @property
    def ready(self) -> bool:
        return self._numbers.ready and all(
            one.image_maps.ready for targets in self._targets for one in targets
        )

    def wait(self) -> tuple[tuple[RelevanceMaps, ...], ...]:
        if self._result is None:
            numbers = self._numbers.wait()
            self._result = tuple(tuple(one.unpack(numbers) for one in targets) for targets in self._targets)
        return self._result


def wait_relevance_maps(maps: Tensor, grid: Grid, share: Tensor, strength: Tensor) -> RelevanceMaps:
    """One target, waited for: image maps [NUM_IMAGE_MAPS, rows, columns], share and strength of a scorer."""
    numbers = torch.cat((share.reshape(-1), strength.reshape(-1)))
    one = RelevanceSlice(grid, ImageMapsTransfer(b"", grid, maps), 0, share.numel())
    return RelevanceTransfer(HostCopy(numbers), ((one,),)).wait()[0][0]
