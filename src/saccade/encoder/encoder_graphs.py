"""CUDA graphs of the vision tower, by shape.

A shape is a number of patches per view and a number of views, a power of two; the last views may be padding.
It has one graph for the patch embedding, one for each segment of layers and one for the merger, so that
slices of a view that end at a segment boundary (`Limits.encode_unit`) are replays too. Layers of a partial
segment run eagerly. A shape is captured when it has been used `MIN_USES` times, at most one graph per call,
which spreads the cost of capture over several steps. A shape whose capture fails runs eagerly from then on.

Grids are an input: the graphs read the tower's tables from a static buffer, into which a call copies the
tables of its grids unless they are there from the call before.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.encoder.partial_views import segment_layers
from saccade.kernels.cuda_graph import CudaGraphCache, CudaRecorder, PlainRecorder, Recorder, Replay
from saccade.models.interface import Layout, PatchGrid, VisionTower

MAX_SHAPES = 96  # about 300 kernels each: 10 MB of device memory
MAX_PATCHES = 8192  # of a shape; longer kernels hide their launches
PACKED_PATCHES = 4096  # views share a call up to here; larger calls gain nothing
# A small call takes as long as its kernels take to launch (1.9 ms on an H200 for 64 patches as for 256). Up
# to here padding views that make one call of two pay: 22% more requests at 12% of the tokens, 2% at 25%.
PADDED_PATCHES = 1024
MIN_USES = 3


class TowerShape(NamedTuple):
    size: int  # patches of a view
    views: int
    grid: PatchGrid | None = None  # for towers whose kernels depend on the grid (`by_grid`)

    @property
    def patches(self) -> int:
        return self.size * self.views


class EncoderBuffers:
    """The static buffers of the graphs; every shape uses the beginning of each."""

    def __init__(self, tower: VisionTower, device: torch.device, dtype: torch.dtype, patches: int) -> None:
        width = (1 + tower.depth_levels) * tower.out_dim
        self.patches = torch.zeros(patches, tower.patch_dim, device=device, dtype=dtype)
        rows = patches * (1 + tower.extra_rows)  # views of one patch have the most
        self.stream = torch.zeros(rows, tower.hidden_dim, device=device, dtype=dtype)
        self.features = torch.zeros(patches // tower.merge**2 * width, device=device, dtype=dtype)
        smallest = tower.tables((tower.merge, tower.merge))
        self._tables = [one.new_zeros((patches, *one.shape[1:])) for one in smallest]
        self._grids: tuple[PatchGrid, ...] = ()  # whose tables are in the buffer

    def layout(self, grids: tuple[PatchGrid, ...]) -> Layout:
        """A layout for views of these sizes whose tables are the buffer's."""
        count = sum(rows * columns for rows, columns in grids)
        return Layout(grids, tuple((table[:count],) for table in self._tables))

    def put(self, own: Layout, given: Layout) -> None:
        """Copy the tables of a call into a layout of ours, unless they are there. Copies and replays share a
        stream, so launched work has read what the copy overwrites."""
        if given.grids == self._grids:
            return
        self._grids = ()  # in case the copy fails
        own.copy_(given)
        self._grids = given.grids

    def check(self, tower: VisionTower) -> None:
        """Raise unless the tables in the buffer are those of their grids."""
        own, right = self.layout(self._grids), tower.layout(self._grids)
        if not all(torch.equal(own.table(n), right.table(n)) for n in range(len(right.tables))):
            raise RuntimeError(f"the static tables are not those of the grids {self._grids}")

    @staticmethod
    def nbytes(tower: VisionTower, dtype: torch.dtype, patches: int = MAX_PATCHES) -> int:
        features = (1 + tower.depth_levels) * tower.out_dim // tower.merge**2
        tables = sum(one.nbytes for one in tower.tables((tower.merge, tower.merge))) // tower.merge**2
        rows = (1 + tower.extra_rows) * tower.hidden_dim
        return patches * ((tower.patch_dim + rows + features) * dtype.itemsize + tables)


class TowerGraph:
    """The graphs of one shape, with the stages of `VisionTower`. Returned streams and levels are its buffers,
    valid until the next call."""

    def __init__(
        self, tower: VisionTower, shape: TowerShape, buffers: EncoderBuffers, owner: "EncoderGraphs"
    ) -> None:
        self._tower, self._shape, self._buffers, self._owner = tower, shape, buffers, owner
        self._layout = buffers.layout(some_grids(shape, tower.merge))
        count, tokens = shape.patches, shape.patches // tower.merge**2
        width = (1 + tower.depth_levels) * tower.out_dim
        rows = count + shape.views * tower.extra_rows
        self._patches, self._stream = buffers.patches[:count], buffers.stream[:rows]
        self._features = buffers.features[: tokens * width].view(tokens, width)
        self._replays: dict[str, Replay] = {}

    @cached_property
    def _levels(self) -> list[Tensor]:
        size = self._tower.out_dim
        return [self._features[:, i * size : (i + 1) * size] for i in range(1, 1 + self._tower.depth_levels)]

    @property
    def views(self) -> int:
        """Views of a call. With fewer, the rest of the buffer is computed as padding."""
        return self._shape.views

    @property
    def complete(self) -> bool:
        """Whether every stage is captured."""
        return len(self._replays) == 2 + -(-self._tower.depth // segment_layers(self._tower.depth))

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        self._put_tables(layout)
        if len(patches) % self._shape.size:  # otherwise a view would end in old contents of the buffer
            raise RuntimeError(f"{len(patches)} patches were given to the graphs of {self._shape}")
        self._patches[: len(patches)].copy_(patches)
        self._run("begin", self._begin)
        return self._stream

    def carry(self, stream: Tensor, layout: Layout, first: int, stop: int) -> tuple[Tensor, list[Tensor]]:
        self._put_tables(layout)  # other views may have run since `begin`
        _copy(self._stream, stream)
        step, layer = segment_layers(self._tower.depth), first
        while layer < stop:
            end = min(layer - layer % step + step, self._tower.depth)
            if layer % step == 0 and end <= stop:
                self._run(f"{layer}..{end}", partial(self._carry, layer, end))
            else:
                end = min(end, stop)
                self._carry(layer, end)
            layer = end
        return self._stream, [self._levels[level] for level in self._deep_between(first, stop)]

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        _copy(self._stream, stream)
        for own, level in zip(self._levels, levels, strict=True):
            _copy(own, level)
        self._run("finish", self._finish)
        return self._features.clone()

    def _put_tables(self, layout: Layout) -> None:
        if layout.sizes != self._layout.sizes or (self._shape.grid and layout.grids != self._layout.grids):
            raise RuntimeError(f"views of the grids {layout.grids} were given to the graphs of {self._shape}")
        self._buffers.put(self._layout, layout)

    def _deep_between(self, first: int, stop: int) -> list[int]:
        return [level for level, layer in enumerate(self._tower.deep) if first <= layer < stop]

    def _run(self, name: str, stage: Replay) -> None:
        replay = self._replays.get(name)
        if replay is not None:
            replay()
            return
        stage()
        if recorded := self._owner.record(self._shape, stage):
            self._replays[name] = recorded

    # The captured stages

    def _begin(self) -> None:
        self._stream.copy_(self._tower.begin(self._patches, self._layout))

    def _carry(self, first: int, stop: int) -> None:
        stream, levels = self._tower.carry(self._stream, self._layout, first, stop, recurring=True)
        self._stream.copy_(stream)
        for own, level in zip(self._deep_between(first, stop), levels, strict=True):
            self._levels[own].copy_(level)

    def _finish(self) -> None:
        end = self._tower.finish(self._stream, [])
        self._features[:, : self._tower.out_dim].copy_(end)


class EncoderGraphs:
    """The graphs of the tower, by shape."""

    def __init__(
        self,
        tower: VisionTower,
        recorder: Recorder,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_shapes: int = MAX_SHAPES,
        max_patches: int = MAX_PATCHES,
        min_uses: int = MIN_USES,
    ) -> None:
        self._tower, self._device, self._dtype = tower, device, dtype
        self._max_patches = max_patches
        self._graphs: CudaGraphCache[TowerShape, TowerGraph] = CudaGraphCache(
            "views of", recorder, max_shapes, min_uses=min_uses
        )
        self._captures_left = 0  # in this call

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def shapes(self) -> tuple[TowerShape, ...]:
        return self._graphs.keys

    @cached_property
    def _buffers(self) -> EncoderBuffers:
        return EncoderBuffers(self._tower, self._device, self._dtype, self._max_patches)

    def views_per_call(self, size: int, views: int, *, padding: bool = True) -> int:
        """How many of `views` views of `size` patches the next call takes: a power of two, so that few shapes
        serve all. With `padding`, more than there are where the excess costs nothing."""
        above = 1 << (views - 1).bit_length()
        if padding and above * size <= PADDED_PATCHES:
            return above
        most = max(PACKED_PATCHES // size, 1)
        return 1 << (min(views, most).bit_length() - 1)

    def shape_for(self, grid: PatchGrid, views: int) -> TowerShape:
        return TowerShape(grid[0] * grid[1], views, grid if self._tower.by_grid else None)

    def find(self, shape: TowerShape, *, now: bool = False) -> TowerGraph | None:
        """The graphs of a frequent shape, or of any with `now`; None: it runs eagerly."""
        self._captures_left = 1 << 30 if now else 1
        found = self._graphs.get(shape)
        if found is not None:
            return found
        if shape.patches > self._max_patches or not self._graphs.is_due(shape, now=now):
            return None
        try:
            made = TowerGraph(self._tower, shape, self._buffers, self)
        except torch.OutOfMemoryError as error:
            self._graphs.fail(shape, error)
            return None
        self._graphs.put(shape, made)
        return made

    def find_fewer_views(self, shape: TowerShape) -> tuple[TowerShape, TowerGraph] | None:
        """For a shape without graphs: complete graphs of half or a quarter of its views. Their replays cost
        the host less than the launches of one eager call."""
        for views in (shape.views // 2, shape.views // 4):
            part = shape._replace(views=views)
            found = self._graphs.get(part)
            if found is not None and found.complete:
                return part, found
        return None

    def capture(self, shape: TowerShape, *, spare: int = 0) -> bool:
        """Capture all stages of a shape on blank patches, if that leaves room for `spare` more shapes; gives
        whether it was tried."""
        graphs = self._graphs
        found = graphs.get(shape)
        full = found is None and not graphs.has_room(spare)
        done = found is not None and found.complete
        if full or done or graphs.has_failed(shape) or shape.patches > self._max_patches:
            return False
        try:
            found = self.find(shape, now=True)
            if found is not None:
                blank = torch.zeros(
                    shape.patches, self._tower.patch_dim, device=self._device, dtype=self._dtype
                )
                layout = self._tower.layout(some_grids(shape, self._tower.merge))
                stream, levels = found.carry(found.begin(blank, layout), layout, 0, self._tower.depth)
                found.finish(stream, levels)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            graphs.fail(shape, error)
        return True

    def record(self, shape: TowerShape, stage: Replay) -> Replay | None:
        """For `TowerGraph`: capture a stage that has just run; None if it is not due, or fails."""
        if not self._captures_left or shape not in self._graphs:
            return None
        self._captures_left -= 1
        try:
            return self._graphs.record(stage)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._graphs.fail(shape, error)
            return None

    def check(self) -> None:
        """Raise unless the bounds hold and the static tables are right."""
        self._graphs.check()
        if any(shape.patches > self._max_patches for shape in self._graphs.keys):
            raise RuntimeError(f"a captured shape has more than {self._max_patches} patches")
        if len(self._graphs):
            self._buffers.check(self._tower)


def some_grids(shape: TowerShape, merge: int) -> tuple[PatchGrid, ...]:
    """Grids of views of a shape; where any grid of the size serves, a row of tokens."""
    return (shape.grid or (merge, shape.size // merge),) * shape.views


def build_encoder_graphs(tower: VisionTower, device: torch.device, dtype: torch.dtype) -> EncoderGraphs:
    """On a CPU, where a replay is a call, every shape is captured at once."""
    if device.type == "cuda":
        return EncoderGraphs(tower, CudaRecorder(device), device, dtype)
    return EncoderGraphs(tower, PlainRecorder(), device, dtype, min_uses=1)


def _copy(own: Tensor, given: Tensor) -> None:
    if given.data_ptr() != own.data_ptr():
        own.copy_(given)
