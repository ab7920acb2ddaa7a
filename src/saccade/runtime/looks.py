"""Looks on their way from the device to the host.

takes   what questions made of the views they look at, and what pictures say by themselves, on the device
gives   `Look`s, once they are there
owns    nothing: what a picture says by itself is the lookout's to keep
never   sends twice what a picture says by itself, once the host has it; waits, but in `HostLooks.wait`
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.lod.relevance import STILL_MAPS, still_maps
from saccade.lod.values import Grid, Look, StillMaps


@dataclass(eq=False)
class ByItself:
    """What a picture says without a question, in one view: on the device until the host has it."""

    content: bytes  # of which picture
    tokens: int  # of the view
    maps: Tensor | StillMaps  # [STILL_MAPS, rows, columns]


class Coming(NamedTuple):
    """A look among numbers on their way."""

    grid: Grid
    still: ByItself
    share: int  # where the participatory map begins
    strength: int  # where that is
    maps: int | None  # where what the picture says by itself begins; None: it comes before

    def take(self, numbers: NDArray[np.float32]) -> Look:
        still, tokens = self.still.maps, self.grid[0] * self.grid[1]
        if not isinstance(still, StillMaps):
            if self.maps is None:
                raise RuntimeError("a look came to the host before what its picture says by itself")
            still = still_maps(numbers[self.maps : self.maps + STILL_MAPS * tokens], self.grid)
            self.still.maps = still
        share = numbers[self.share : self.share + tokens].reshape(self.grid)
        return Look(still=still, participatory=share, strength=float(numbers[self.strength]))


@dataclass(frozen=True)
class HostLooks:
    numbers: Tensor  # of all of them, float32
    looks: tuple[tuple[Coming, ...], ...]  # of each row with sights
    done: torch.cuda.Event | None

    @property
    def there(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[tuple[Look, ...], ...]:
        if self.done is not None:
            self.done.synchronize()
        numbers = self.numbers.numpy()
        return tuple(tuple(one.take(numbers) for one in looks) for looks in self.looks)


def look_now(maps: Tensor, grid: Grid, share: Tensor, strength: Tensor) -> Look:
    """One by itself, waited for: what `lod.relevance.still` gave, then what a coupling did."""
    sending, tokens = Sending(), grid[0] * grid[1]
    coming = sending.coming(grid, ByItself(b"", tokens, maps), sending.add(share), sending.add(strength))
    return sending.to_host(((coming,),)).wait()[0][0]


class Sending:
    """Collects the numbers of looks, to send them in one copy."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._size = 0
        self._brought: list[ByItself] = []

    def add(self, numbers: Tensor) -> int:
        """Where they begin among all."""
        self._parts.append(numbers.reshape(-1))
        self._size += numbers.numel()
        return self._size - numbers.numel()

    def coming(self, grid: Grid, still: ByItself, share: int, strength: int) -> Coming:
        """A look whose other numbers have been added; what its picture says by itself goes along if need
        be."""
        maps = None
        if isinstance(still.maps, Tensor) and still not in self._brought:
            maps = self.add(still.maps)
            self._brought.append(still)
        return Coming(grid, still, share, strength, maps)

    def to_host(self, looks: tuple[tuple[Coming, ...], ...]) -> HostLooks:
        """On their way, behind all that was launched before. What was added may be overwritten by whatever
        is launched after."""
        numbers = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        if numbers.device.type != "cuda":
            return HostLooks(numbers.clone() if len(self._parts) == 1 else numbers, looks, None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return HostLooks(host, looks, done)
