"""The vision tower as captured stretches of layers, one set for each shape that comes often.

takes   the tower; streams of views that have as many patches each, whatever their grids
gives   what the tower gives, in a dozen launches instead of some hundreds
owns    the captured stretches (least recently used shapes go), and the static buffers all of them share
never   lets a capture that fails end a request: the shape then takes the ordinary way, for good

A shape is a number of patches and how many views of it go together: a power of two, the last of them perhaps
blank. Its graphs are one for the patches, one for each stretch of layers, one for the end, so that slices of
a view that end where a stretch ends (`Limits.encode_unit`) are replays too. Layers of a stretch that is not
passed whole run one by one. A shape is captured when it has come `SIGHTINGS` times, a stretch per call at
most: what capturing costs is spread over as many steps.

Grids are an input: the graphs read the tower's tables from a static buffer, and what a call's grids have in
them is copied there before, unless it lies there from the last call.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.encoder.partial_views import segment_layers
from saccade.kernels.cuda_graph import CudaRecorder, PlainRecorder, Recorder, Replay
from saccade.models.layers import Layout, PatchGrid, VisionTower

log = logging.getLogger(__name__)

MOST_SHAPES = 96  # some 300 kernels each: about 10 MB of the device
MOST_PATCHES = 8192  # of a shape; beyond, kernels are long enough to hide their launches
PACKED_PATCHES = 4096  # views go together up to here; more at a time gain nothing
# A call of few patches takes as long as its kernels take to start (1.9 ms on an H200 for 64 as for 256). Up
# to here blank views that make one call of two pay: 22% more requests at 12% of the tokens, 2% at 25%.
BLANK_PATCHES = 1024
SIGHTINGS = 3
NEVER = -1  # sightings of a shape that cannot be captured


class TowerStages(Protocol):
    """The tower in pieces, as `VisionTower` has them."""

    def begin(self, patches: Tensor, layout: Layout) -> Tensor: ...
    def carry(self, stream: Tensor, layout: Layout, first: int, stop: int) -> tuple[Tensor, list[Tensor]]: ...
    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor: ...


class TowerShape(NamedTuple):
    size: int  # patches of a view
    views: int
    grid: PatchGrid | None = None  # where the tower's pieces are `by_grid`

    @property
    def patches(self) -> int:
        return self.size * self.views


class EncoderBuffers:
    """What captured stretches read and write; every shape uses the beginning of each."""

    def __init__(self, tower: VisionTower, device: torch.device, dtype: torch.dtype, patches: int) -> None:
        width = (1 + tower.depth_levels) * tower.out_dim
        self.patches = torch.zeros(patches, tower.patch_dim, device=device, dtype=dtype)
        self.stream = torch.zeros(patches, tower.hidden_dim, device=device, dtype=dtype)
        self.features = torch.zeros(patches // tower.merge**2 * width, device=device, dtype=dtype)
        least = tower.tables((tower.merge, tower.merge))
        self._tables = [one.new_zeros((patches, *one.shape[1:])) for one in least]
        self._grids: tuple[PatchGrid, ...] = ()  # whose tables lie there

    def layout(self, grids: tuple[PatchGrid, ...]) -> Layout:
        """Of a call with views of these sizes, its tables here: those of whatever grids are put in."""
        count = sum(rows * columns for rows, columns in grids)
        return Layout(grids, tuple((table[:count],) for table in self._tables))

    def put(self, own: Layout, given: Layout) -> None:
        """The tables of a call into a layout of ours, if others lie there. Nobody waits: copies and replays
        are on one stream, so what was launched before has read what it overwrites."""
        if given.grids == self._grids:
            return
        self._grids = ()  # if copying fails half way
        own.copy_(given)
        self._grids = given.grids

    def check(self, tower: VisionTower) -> None:
        """Raise unless the tables that lie there are those of their grids."""
        own, right = self.layout(self._grids), tower.layout(self._grids)
        if not all(torch.equal(own.table(n), right.table(n)) for n in range(len(right.tables))):
            raise RuntimeError(f"the tables of captured views are not those of the grids {self._grids}")

    @staticmethod
    def nbytes(tower: VisionTower, dtype: torch.dtype, patches: int = MOST_PATCHES) -> int:
        features = (1 + tower.depth_levels) * tower.out_dim // tower.merge**2
        tables = sum(one.nbytes for one in tower.tables((tower.merge, tower.merge))) // tower.merge**2
        return patches * ((tower.patch_dim + tower.hidden_dim + features) * dtype.itemsize + tables)


class TowerGraph:
    """One shape. Streams and levels it gives are its buffers: copy what is to outlive the next call."""

    def __init__(
        self, tower: VisionTower, shape: TowerShape, buffers: EncoderBuffers, owner: "EncoderGraphs"
    ) -> None:
        self._tower, self._shape, self._buffers, self._owner = tower, shape, buffers, owner
        self._layout = buffers.layout(some_grids(shape, tower.merge))
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
    def views(self) -> int:
        """How many go in a call; fewer may be given, whatever lies behind them is carried along."""
        return self._shape.views

    @property
    def complete(self) -> bool:
        """Whether every piece is captured."""
        return len(self._replays) == 2 + -(-self._tower.depth // segment_layers(self._tower.depth))

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        self._put_tables(layout)
        if len(patches) % self._shape.size:  # else a view would end in what lay there before
            raise RuntimeError(f"{len(patches)} patches came to the graphs of {self._shape}")
        self._patches[: len(patches)].copy_(patches)
        self._run("begin", self._begin)
        return self._stream

    def carry(self, stream: Tensor, layout: Layout, first: int, stop: int) -> tuple[Tensor, list[Tensor]]:
        self._put_tables(layout)  # since `begin` other views may have gone
        _put(self._stream, stream)
        step, layer = segment_layers(self._tower.depth), first
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

    def _put_tables(self, layout: Layout) -> None:
        if layout.sizes != self._layout.sizes or (self._shape.grid and layout.grids != self._layout.grids):
            raise RuntimeError(f"views of the grids {layout.grids} came to the graphs of {self._shape}")
        self._buffers.put(self._layout, layout)

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
        self._stream.copy_(self._tower.begin(self._patches, self._layout))

    def _carry(self, first: int, stop: int) -> None:
        stream, levels = self._tower.carry(self._stream, self._layout, first, stop, recurring=True)
        self._stream.copy_(stream)
        passed = [place for place, at in enumerate(self._tower.deep) if first <= at < stop]
        for place, level in zip(passed, levels, strict=True):
            self._levels[place].copy_(level)

    def _finish(self) -> None:
        end = self._tower.finish(self._stream, [])
        self._features[:, : self._tower.out_dim].copy_(end)


class EncoderGraphs:
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
        self._shapes: OrderedDict[TowerShape, TowerGraph] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[TowerShape, int] = OrderedDict()  # how often shapes not captured have come
        self._retired: TowerGraph | None = None  # the last that went: a step in flight may still run it
        self._captures_left = 0  # in this call

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def shapes(self) -> tuple[TowerShape, ...]:
        return tuple(self._shapes)

    @cached_property
    def _buffers(self) -> EncoderBuffers:
        return EncoderBuffers(self._tower, *self._place, self._most_patches)

    def views_per_call(self, size: int, views: int, *, blank: bool = True) -> int:
        """How many views of `size` patches the next call for so many of them has: a power of two, for few
        shapes serve all. More than there are, `blank` ones, where those cost nothing."""
        above = 1 << (views - 1).bit_length()
        if blank and above * size <= BLANK_PATCHES:
            return above
        most = max(PACKED_PATCHES // size, 1)
        return 1 << (min(views, most).bit_length() - 1)

    def shape_for(self, grid: PatchGrid, views: int) -> TowerShape:
        """Whose graphs serve so many views of a grid."""
        return TowerShape(grid[0] * grid[1], views, grid if self._tower.by_grid else None)

    def find(self, shape: TowerShape, *, now: bool = False) -> TowerGraph | None:
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
            made = TowerGraph(self._tower, shape, self._buffers, self)
        except torch.OutOfMemoryError as error:
            self._give_up(shape, error)
            return None
        self._shapes[shape] = made
        return made

    def find_fewer_views(self, shape: TowerShape) -> tuple[TowerShape, TowerGraph] | None:
        """For a shape that has no graphs: half of its views, or a quarter, that have all of theirs. So many
        replays cost the host less than the launches of one call."""
        for views in (shape.views // 2, shape.views // 4):
            part = shape._replace(views=views)
            found = self._shapes.get(part)
            if found is not None and found.complete:
                self._shapes.move_to_end(part)
                return part, found
        return None

    def capture(self, shape: TowerShape, *, spare: int = 0) -> bool:
        """Capture all of a shape before it comes, if that leaves room for `spare` more; gives whether it was
        tried. On blank patches, which nobody sees."""
        found = self._shapes.get(shape)
        full = found is None and len(self._shapes) + spare >= self._most_shapes
        failed = self._seen.get(shape) == NEVER
        if full or failed or shape.patches > self._most_patches or (found is not None and found.complete):
            return False
        device, dtype = self._place
        try:
            found = self.find(shape, now=True)
            if found is not None:
                blank = torch.zeros(shape.patches, self._tower.patch_dim, device=device, dtype=dtype)
                layout = self._tower.layout(some_grids(shape, self._tower.merge))
                stream, levels = found.carry(found.begin(blank, layout), layout, 0, self._tower.depth)
                found.finish(stream, levels)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._retired = self._shapes.pop(shape, None)
            self._give_up(shape, error)
        return True

    def _comes_often(self, shape: TowerShape, *, now: bool) -> bool:
        seen = self._seen.get(shape, 0)
        if seen == NEVER:
            return False
        self._seen[shape] = seen + 1
        self._seen.move_to_end(shape)
        while len(self._seen) > 64 * self._most_shapes:
            self._seen.popitem(last=False)
        return now or seen + 1 >= self._sightings

    def record(self, shape: TowerShape, piece: Replay) -> Replay | None:
        """For `TowerGraph`: the piece, which has just run, as a replay; None if it is not to be, or fails."""
        if not self._captures_left or shape not in self._shapes:
            return None
        self._captures_left -= 1
        try:
            return self._recorder.record(piece)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._retired = self._shapes.pop(shape)
            self._give_up(shape, error)
            return None

    def _give_up(self, shape: TowerShape, error: Exception) -> None:
        self._seen[shape] = NEVER
        first = str(error).partition("\n")[0]
        log.warning("%d views of %d patches run uncaptured, slower: %s", shape.views, shape.size, first)

    def check(self) -> None:
        """Raise unless the bounds hold."""
        if len(self._shapes) > self._most_shapes:
            raise RuntimeError(f"{len(self._shapes)} shapes are captured; {self._most_shapes} may be")
        if any(shape.patches > self._most_patches for shape in self._shapes):
            raise RuntimeError(f"a captured shape has more than {self._most_patches} patches")
        if set(self._shapes) & set(self._seen):
            raise RuntimeError("a captured shape is still being counted")
        if self._shapes:
            self._buffers.check(self._tower)


def some_grids(shape: TowerShape, merge: int) -> tuple[PatchGrid, ...]:
    """Of views of a shape; where any of the size will do, a row of tokens."""
    return (shape.grid or (merge, shape.size // merge),) * shape.views


def build_encoder_graphs(tower: VisionTower, device: torch.device, dtype: torch.dtype) -> EncoderGraphs:
    """As the device has it; on a CPU the twin, which captures whatever comes."""
    if device.type == "cuda":
        return EncoderGraphs(tower, CudaRecorder(device), device, dtype)
    return EncoderGraphs(tower, PlainRecorder(), device, dtype, sightings=1)


def _put(own: Tensor, given: Tensor) -> None:
    if given.data_ptr() != own.data_ptr():
        own.copy_(given)
