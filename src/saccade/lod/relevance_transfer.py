"""Looks on their way from the device to the host.

takes   what questions made of the views they look at, and what pictures say by themselves, on the device
gives   `RelevanceMaps`s, once they are there
owns    nothing: what a picture says by itself is the lookout's to keep
never   sends twice what a picture says by itself; waits, but where something is taken
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.lod.scorers import unpack_image_maps
from saccade.lod.types import Grid, ImageMaps, RelevanceMaps


class Sent:
    """Numbers on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        """On their way behind all that was launched before; what they lie in may be overwritten by whatever
        is launched after."""
        self._done: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._numbers = numbers.clone()
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    @property
    def there(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def take(self) -> NDArray[np.float32]:
        if self._done is not None:
            self._done.synchronize()
        return self._numbers.numpy()


class ByItself:
    """What a picture says without a question, in one view: on its way to the host, or there."""

    def __init__(self, content: bytes, grid: Grid, maps: Tensor) -> None:
        """`maps`: [STILL_MAPS, rows, columns] on the device."""
        self.content = content  # of which picture
        self.tokens = grid[0] * grid[1]  # of the view
        self._grid = grid
        self._maps: Sent | ImageMaps = Sent(maps.reshape(-1))

    @property
    def there(self) -> bool:
        return isinstance(self._maps, ImageMaps) or self._maps.there

    def take(self) -> ImageMaps:
        if not isinstance(self._maps, ImageMaps):
            self._maps = unpack_image_maps(self._maps.take(), self._grid)
        return self._maps


class Seen(NamedTuple):
    """A look among numbers on their way."""

    grid: Grid
    image_maps: ByItself
    share: int  # where the participatory map begins
    strength: int  # where that is

    def take(self, numbers: NDArray[np.float32]) -> RelevanceMaps:
        share = numbers[self.share : self.share + self.grid[0] * self.grid[1]].reshape(self.grid)
        return RelevanceMaps(
            image_maps=self.image_maps.take(), participatory=share, strength=float(numbers[self.strength])
        )


class HostLooks:
    """Of the rows of a step that look."""

    def __init__(self, numbers: Sent, looks: tuple[tuple[Seen, ...], ...]) -> None:
        self._numbers = numbers
        self._looks = looks  # of each row with sights
        self._taken: tuple[tuple[RelevanceMaps, ...], ...] | None = None

    @property
    def there(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._numbers.there and all(one.image_maps.there for looks in self._looks for one in looks)

    def wait(self) -> tuple[tuple[RelevanceMaps, ...], ...]:
        if self._taken is None:
            numbers = self._numbers.take()
            self._taken = tuple(tuple(one.take(numbers) for one in looks) for looks in self._looks)
        return self._taken


def look_now(maps: Tensor, grid: Grid, share: Tensor, strength: Tensor) -> RelevanceMaps:
    """One by itself, waited for: what `lod.relevance.still` gave, then what a coupling did."""
    numbers = torch.cat((share.reshape(-1), strength.reshape(-1)))
    seen = Seen(grid, ByItself(b"", grid, maps), 0, share.numel())
    return HostLooks(Sent(numbers), ((seen,),)).wait()[0][0]
