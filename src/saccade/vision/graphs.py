"""The vision tower as captured stretches of layers, one set for each shape that comes often.

takes   the tower; streams of views of one grid
gives   what the tower gives, in a dozen launches instead of some hundreds
owns    the captured stretches (least recently used shapes go), and the static buffers all of them share
never   lets a capture that fails end a request: the shape then takes the ordinary way, for good

A shape is a grid and how many views of it go together. Its graphs are one for the patches, one for each
stretch of layers, one for the end, so that slices of a view that end where a stretch ends
(`Limits.encode_unit`) are replays too. Layers of a stretch that is not passed whole run one by one. A shape
is captured when it has come `SIGHTINGS` times, a stretch per call at most: what capturing costs is spread
over as many steps.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.kernels.record import CudaRecorder, PlainRecorder, Recorder, Replay
from saccade.models.layers import VisionTower
from saccade.vision.unfinished import unit

log = logging.getLogger(__name__)

Grid = tuple[int, int]

MOST_SHAPES = 96  # some 300 kernels each: about 10 MB of the device
MOST_PATCHES = 8192  # of a shape; beyond, kernels are long enough to hide their launches
PACKED_PATCHES = 4096  # views go together up to here; more at a time gain nothing
SIGHTINGS = 3
NEVER = -1  # sightings of a shape that cannot be captured


class Carrier(Protocol):
    """The tower in pieces, as `VisionTower` has them."""

    def begin(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor: ...
    def carry(
        self, stream: Tensor, grids: Sequence[Grid], first: int, stop: int
    ) -> tuple[Tensor, list[Tensor]]: ...
    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor: ...


class Shape(NamedTuple):
    grid: Grid
    views: int

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.views


class Buffers:
    """What captured stretches read and write; every shape uses the beginning of each."""

    def __init__(self, tower: VisionTower, device: torch.device, dtype: torch.dtype, patches: int) -> None:
        width = (1 + tower.depth_levels) * tower.out_dim
        self.patches = torch.zeros(patches, tower.patch_dim, device=device, dtype=dtype)
        self.stream = torch.zeros(patches, tower.hidden_dim, device=device, dtype=dtype)
        self.features = torch.zeros(patches // tower.merge**2 * width, device=device, dtype=dtype)

    @staticmethod
    def nbytes(tower: VisionTower, dtype: torch.dtype, patches: int = MOST_PATCHES) -> int:
        features = (1 + tower.depth_levels) * tower.out_dim // tower.merge**2
        return patches * (tower.patch_dim + tower.hidden_dim + features) * dtype.itemsize


class Captured:
    """One shape. Streams and levels it gives are its buffers: copy what is to outlive the next call."""

    def __init__(self, tower: VisionTower, shape: Shape, buffers: Buffers, owner: "TowerGraphs") -> None:
        self._tower, self._shape, self._owner = tower, shape, owner
        self._grids = [shape.grid] * shape.views
        self._kept = tower.tables(self._grids)  # the graphs read them
        count, tokens = shape.patches, shape.patches // tower.merge**2
        width = (1 + tower.depth_levels) * tower.out_dim
        self._patches, self._stream = buffers.patches[:count], buffers.stream[:count]
        self._features = buffers.features[: tokens * width].view(tokens, width)
        self._replays: dict[str, Replay] = {}

    @cached_property
    def _levels(self) -> list[Tensor]:
        size = self._tower.out_dim
        return [self._features[:, i * size : (i + 1) * size] for i in range(1, 1 + self._tower.depth_levels)]

    @property
    def complete(self) -> bool:
        """Whether every piece is captured."""
        return len(self._replays) == 2 + -(-self._tower.depth // unit(self._tower.depth))

    def begin(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        self._patches.copy_(patches)
        self._run("begin", self._begin)
        return self._stream

    def carry(
        self, stream: Tensor, grids: Sequence[Grid], first: int, stop: int
    ) -> tuple[Tensor, list[Tensor]]:
        _put(self._stream, stream)
        step, layer = unit(self._tower.depth), first
        while layer < stop:
            end = min(layer - layer % step + step, self._tower.depth)
            if layer % step == 0 and end <= stop:
                self._run(f"{layer}..{end}", partial(self._carry, layer, end))
            else:
                end = min(end, stop)
                self._carry(layer, end)
            layer = end
        passed = [place for place, at in enumerate(self._tower.deep) if first <= at < stop]
        return self._stream, [self._levels[place] for place in passed]

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        _put(self._stream, stream)
        for own, level in zip(self._levels, levels, strict=True):
            _put(own, level)
        self._run("finish", self._finish)
        return self._features.clone()

    def _run(self, name: str, piece: Replay) -> None:
        replay = self._replays.get(name)
        if replay is not None:
            replay()
            return
        piece()
        if recorded := self._owner.record(self._shape, piece):
            self._replays[name] = recorded

    # The pieces: what is captured

    def _begin(self) -> None:
        self._stream.copy_(self._tower.begin(self._patches, self._grids))

    def _carry(self, first: int, stop: int) -> None:
        stream, levels = self._tower.carry(self._stream, self._grids, first, stop, recurring=True)
        self._stream.copy_(stream)
        passed = [place for place, at in enumerate(self._tower.deep) if first <= at < stop]
        for place, level in zip(passed, levels, strict=True):
            self._levels[place].copy_(level)

    def _finish(self) -> None:
        end = self._tower.finish(self._stream, [])
        self._features[:, : self._tower.out_dim].copy_(end)


class TowerGraphs:
    def __init__(
        self,
        tower: VisionTower,
        recorder: Recorder,
        device: torch.device,
        dtype: torch.dtype,
        *,
        most_shapes: int = MOST_SHAPES,
        most_patches: int = MOST_PATCHES,
        sightings: int = SIGHTINGS,
    ) -> None:
        self._tower, self._recorder = tower, recorder
        self._place = device, dtype
        self._most_shapes, self._most_patches, self._sightings = most_shapes, most_patches, sightings
        self._shapes: OrderedDict[Shape, Captured] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[Shape, int] = OrderedDict()  # how often shapes not captured have come
        self._retired: Captured | None = None  # the last that went: a step in flight may still run it
        self._captures_left = 0  # in this call

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(self._shapes)

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers(self._tower, *self._place, self._most_patches)

    def together(self, grid: Grid, views: int) -> int:
        """How many of so many views of a grid go in one call: a power of two, for few shapes serve all."""
        most = max(PACKED_PATCHES // (grid[0] * grid[1]), 1)
        return 1 << (min(views, most).bit_length() - 1)

    def find(self, shape: Shape, *, now: bool = False) -> Captured | None:
        """The shape's stretches if it comes often, or `now`; None: it takes the ordinary way."""
        self._captures_left = 1 << 30 if now else 1
        found = self._shapes.get(shape)
        if found is not None:
            self._shapes.move_to_end(shape)
            return found
        if shape.patches > self._most_patches or not self._comes_often(shape, now=now):
            return None
        self._seen.pop(shape, None)
        while len(self._shapes) >= self._most_shapes:
            _, self._retired = self._shapes.popitem(last=False)
        try:
            made = Captured(self._tower, shape, self._buffers, self)
        except torch.OutOfMemoryError as error:
            self._give_up(shape, error)
            return None
        self._shapes[shape] = made
        return made

    def smaller(self, shape: Shape) -> tuple[Shape, Captured] | None:
        """For a shape that has no graphs: half of its views, or a quarter, that have all of theirs. So many
        replays cost the host less than the launches of one call."""
        for views in (shape.views // 2, shape.views // 4):
            found = self._shapes.get(Shape(shape.grid, views))
            if found is not None and found.complete:
                self._shapes.move_to_end(Shape(shape.grid, views))
                return Shape(shape.grid, views), found
        return None

    def capture(self, shape: Shape, *, spare: int = 0) -> bool:
        """Capture all of a shape before it comes, if that leaves room for `spare` more; gives whether it was
        tried. On blank patches, which nobody sees."""
        found = self._shapes.get(shape)
        full = found is None and len(self._shapes) + spare >= self._most_shapes
        failed = self._seen.get(shape) == NEVER
        if full or failed or shape.patches > self._most_patches or (found is not None and found.complete):
            return False
        grids, (device, dtype) = [shape.grid] * shape.views, self._place
        try:
            found = self.find(shape, now=True)
            if found is not None:
                blank = torch.zeros(shape.patches, self._tower.patch_dim, device=device, dtype=dtype)
                stream, levels = found.carry(found.begin(blank, grids), grids, 0, self._tower.depth)
                found.finish(stream, levels)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._retired = self._shapes.pop(shape, None)
            self._give_up(shape, error)
        return True

    def _comes_often(self, shape: Shape, *, now: bool) -> bool:
        seen = self._seen.get(shape, 0)
        if seen == NEVER:
            return False
        self._seen[shape] = seen + 1
        self._seen.move_to_end(shape)
        while len(self._seen) > 64 * self._most_shapes:
            self._seen.popitem(last=False)
        return now or seen + 1 >= self._sightings

    def record(self, shape: Shape, piece: Replay) -> Replay | None:
        """For `Captured`: the piece, which has just run, as a replay; None if it is not to be, or fails."""
        if not self._captures_left or shape not in self._shapes:
            return None
        self._captures_left -= 1
        try:
            return self._recorder.record(piece)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._retired = self._shapes.pop(shape)
            self._give_up(shape, error)
            return None

    def _give_up(self, shape: Shape, error: Exception) -> None:
        self._seen[shape] = NEVER
        first = str(error).partition("\n")[0]
        log.warning("views of %s patches run uncaptured, slower: %s", shape.grid, first)

    def check(self) -> None:
        """Raise unless the bounds hold."""
        if len(self._shapes) > self._most_shapes:
            raise RuntimeError(f"{len(self._shapes)} shapes are captured; {self._most_shapes} may be")
        if any(shape.patches > self._most_patches for shape in self._shapes):
            raise RuntimeError(f"a captured shape has more than {self._most_patches} patches")
        if set(self._shapes) & set(self._seen):
            raise RuntimeError("a captured shape is still being counted")


def tower_graphs(tower: VisionTower, device: torch.device, dtype: torch.dtype) -> TowerGraphs:
    """As the device has it; on a CPU the twin, which captures whatever comes."""
    if device.type == "cuda":
        return TowerGraphs(tower, CudaRecorder(device), device, dtype)
    return TowerGraphs(tower, PlainRecorder(), device, dtype, sightings=1)


def _put(own: Tensor, given: Tensor) -> None:
    if given.data_ptr() != own.data_ptr():
        own.copy_(given)
