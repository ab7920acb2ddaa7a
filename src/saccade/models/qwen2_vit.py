"""The vision tower of Qwen2-VL and Qwen2.5-VL: rotary positions alone; in Qwen2.5-VL most layers attend
within windows.

Patches come in merge order, as in `vit.py`. Inside the tower the tokens of a view stand window by window,
windows of equal size next to each other, so that one batch of attention serves them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.errors import CheckpointError
from saccade.host.allocator import copy_to_own_mapping
from saccade.kernels.attention.paged import sdpa_any_shape, sdpa_recurring_shape
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.norm_rope.rope import apply_rotary
from saccade.models.config import Config, positive_int
from saccade.models.interface import Layout, PatchGrid, VisionTower
from saccade.models.layers import GatedMLP, LayerNorm, ModelBuilder, RMSNorm, Rotary
from saccade.models.vit import EPS, KEPT_PATCHES, PLANNED_PATCHES, axial_rotary, merge_order

ORDER, INVERSE, COS, SIN = range(4)


@dataclass(frozen=True)
class Qwen2VisionDims:
    depth: int
    hidden: int
    inner: int
    heads: int
    channels: int
    patch: int
    frames: int  # temporal patch size
    merge: int
    out: int
    window: int | None  # tokens along each side; None: no windows
    full: frozenset[int]  # layers without windows
    theta: float
    modern: bool  # RMS norms and gated MLPs (Qwen2.5-VL), or layer norms and quick GELU


class WindowRun(NamedTuple):
    """Windows of equal size inside a view, next to each other."""

    start: int  # first patch
    windows: int
    size: int  # patches per window


class GridRun(NamedTuple):
    """Neighbouring views of one grid."""

    start: int  # first patch
    views: int
    size: int  # patches per view
    windows: tuple[WindowRun, ...]


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class PlainMLP(nn.Module):
    def __init__(
        self, width: int, inner: int, activation: Callable[[Tensor], Tensor], builder: ModelBuilder
    ) -> None:
        super().__init__()
        self.up = builder.linear("up", width, (inner,), bias=True)
        self.down = builder.linear("down", inner, (width,), bias=True)
        self._activation = activation

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        """What `down` takes."""
        return self._activation(self.up.forward(x, mode))


class WindowAttention(nn.Module):
    """Attention inside each view, or inside each of its windows."""

    def __init__(self, dims: Qwen2VisionDims, builder: ModelBuilder) -> None:
        super().__init__()
        self.heads = dims.heads
        self.qkv = builder.linear("qkv", dims.hidden, (3 * dims.hidden,), bias=True)
        self.out = builder.linear("out", dims.hidden, (dims.hidden,), bias=True)

    def forward(
        self, x: Tensor, rotary: Rotary, runs: Sequence[GridRun], windowed: bool, mode: KernelMode
    ) -> Tensor:
        patches, width = x.shape
        qkv = self.qkv.forward(x, mode).view(patches, 3 * self.heads, width // self.heads)
        qk = apply_rotary(qkv[:, : 2 * self.heads], rotary.cos, rotary.sin, mode)
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, 2 * self.heads :]
        seen = torch.empty_like(x)
        for run in runs:
            stop = run.start + run.views * run.size
            into = seen[run.start : stop].view(run.views, run.size, self.heads, -1)
            parts = [part[run.start : stop].view(run.views, run.size, self.heads, -1) for part in (q, k, v)]
            for window in run.windows if windowed else (WindowRun(0, 1, run.size),):
                end = window.start + window.windows * window.size
                shape = (run.views * window.windows, window.size, self.heads, -1)
                queries, keys, values = (part[:, window.start : end].reshape(shape) for part in parts)
                found = F.scaled_dot_product_attention(
                    queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
                ).transpose(1, 2)
                into[:, window.start : end] = found.reshape(run.views, end - window.start, self.heads, -1)
        return self.out.forward(seen, mode)


class Qwen2VisionLayer(nn.Module):
    def __init__(self, dims: Qwen2VisionDims, builder: ModelBuilder) -> None:
        super().__init__()
        norm = RMSNorm if dims.modern else LayerNorm
        self.attention_norm = norm(dims.hidden, EPS, builder)
        self.attention = WindowAttention(dims, builder.child("attention"))
        self.mlp_norm = norm(dims.hidden, EPS, builder)
        child = builder.child("mlp")
        if dims.modern:
            self.mlp: GatedMLP | PlainMLP = GatedMLP(dims.hidden, dims.inner, child, bias=True)
        else:
            self.mlp = PlainMLP(dims.hidden, dims.inner, quick_gelu, child)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotary: Rotary,
        runs: Sequence[GridRun],
        windowed: bool,
        mode: KernelMode,
    ) -> tuple[Tensor, Tensor]:
        """Takes and gives the residual x and a delta that the next norm adds to it."""
        if delta is None:
            normed = self.attention_norm.forward(x, mode)
        else:
            normed, x = self.attention_norm.add(delta, x, mode)
        normed, x = self.mlp_norm.add(self.attention.forward(normed, rotary, runs, windowed, mode), x, mode)
        return x, self.mlp.down.forward(self.mlp.forward(normed, mode), mode)


class Qwen2Merger(nn.Module):
    """The merge * merge patches of a token become one vector of the decoder's width."""

    def __init__(self, dims: Qwen2VisionDims, builder: ModelBuilder) -> None:
        super().__init__()
        self.merged = dims.hidden * dims.merge**2
        self.norm = (RMSNorm if dims.modern else LayerNorm)(dims.hidden, EPS, builder)
        self.up = builder.linear("up", self.merged, (self.merged,), bias=True)
        self.down = builder.linear("down", self.merged, (dims.out,), bias=True)

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        x = self.norm.forward(x, mode).reshape(-1, self.merged)
        return self.down.forward(F.gelu(self.up.forward(x, mode)), mode)


class Qwen2Vision(VisionTower):
    deep = ()
    depth_levels = 0

    def __init__(self, dims: Qwen2VisionDims, builder: ModelBuilder) -> None:
        super().__init__()
        self.by_grid = dims.window is not None
        self.patch_dim = dims.channels * dims.frames * dims.patch**2
        self.merge, self.mode, self.depth = dims.merge, builder.mode, dims.depth
        self.hidden_dim, self.out_dim = dims.hidden, dims.out
        self.patch_embedding = builder.linear("patch_embedding", self.patch_dim, (dims.hidden,))
        self.layers = nn.ModuleList(
            Qwen2VisionLayer(dims, builder.child(f"layers.{i}")) for i in range(dims.depth)
        )
        self.merger = Qwen2Merger(dims, builder.child("merger"))
        self._dims, self._device, self._dtype = dims, builder.device, builder.dtype
        self._tables: OrderedDict[PatchGrid, tuple[Tensor, ...]] = OrderedDict()
        self._kept = 0  # patches in _tables

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        total = sum(layout.sizes)
        if not total or patches.shape != (total, self.patch_dim):
            raise ValueError(
                f"the grids {list(layout.grids)} need patches [{total}, {self.patch_dim}], "
                f"not {tuple(patches.shape)}"
            )
        x = self.patch_embedding.forward(patches.to(self._dtype), self.mode)
        return self._reorder(x, layout, ORDER)

    def carry(
        self, stream: Tensor, layout: Layout, first: int, stop: int, *, recurring: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        rotary, runs = Rotary(layout.table(COS), layout.table(SIN)), self._runs(layout.grids)
        planned = recurring or max(run.size for run in runs) >= PLANNED_PATCHES
        delta: Tensor | None = None
        with (sdpa_recurring_shape if planned else sdpa_any_shape)(stream.device):
            for index in range(first, stop):
                windowed = self._dims.window is not None and index not in self._dims.full
                stream, delta = self.layers[index](stream, delta, rotary, runs, windowed, self.mode)
        stream = stream if delta is None else stream + delta
        return (self._reorder(stream, layout, INVERSE) if stop == self.depth else stream), []

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        return self.merger.forward(stream, self.mode)

    def tables(self, grid: PatchGrid) -> tuple[Tensor, ...]:
        """From the cache, or made anew. The least recently used are evicted first."""
        found = self._tables.get(grid)
        if found is not None:
            self._tables.move_to_end(grid)
            return found
        made = self._make_tables(grid)
        self._tables[grid] = made
        self._kept += grid[0] * grid[1]
        while self._kept > KEPT_PATCHES.get(self._device.type, 0) and len(self._tables) > 1:
            (height, width), _ = self._tables.popitem(last=False)
            self._kept -= height * width
        return made

    def _make_tables(self, grid: PatchGrid) -> tuple[Tensor, ...]:
        """The order of the patches in the tower, its inverse, cos and sin in that order."""
        merge, dims = self.merge, self._dims
        if min(grid) < 1 or grid[0] % merge or grid[1] % merge:
            raise ValueError(f"a grid of {grid[0]} x {grid[1]} patches does not divide by {merge}")
        tokens = window_order((grid[0] // merge, grid[1] // merge), dims.window).to(self._device)
        order = (tokens[:, None] * merge**2 + torch.arange(merge**2, device=self._device)).flatten()
        row, column = merge_order(grid, merge, self._device)
        cos, sin = axial_rotary(row[order], column[order], dims.hidden // dims.heads, dims.theta)
        return tuple(copy_to_own_mapping(table) for table in (order, order.argsort(), cos, sin))

    def _runs(self, grids: Sequence[PatchGrid]) -> tuple[GridRun, ...]:
        unit = self.merge**2
        runs = []
        start = 0
        for (rows, columns), group in groupby(grids):
            tokens = (rows // self.merge, columns // self.merge)
            windows = tuple(
                WindowRun(at * unit, count, size * unit)
                for at, count, size in window_runs(tokens, self._dims.window)
            )
            views = len(list(group))
            runs.append(GridRun(start, views, rows * columns, windows))
            start += views * rows * columns
        return tuple(runs)

    def _reorder(self, x: Tensor, layout: Layout, number: int) -> Tensor:
        """The patches of each view in the order of a table. All views of a run share its first table."""
        if self._dims.window is None:
            return x
        order = layout.table(number)
        parts = []
        for run in self._runs(layout.grids):
            views = x[run.start : run.start + run.views * run.size].view(run.views, run.size, -1)
            parts.append(views.index_select(1, order[run.start : run.start + run.size]).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blocks(grid: tuple[int, int], window: int) -> Iterator[tuple[slice, slice, int, int]]:
    """The parts of a token grid whose windows have one size: rows, columns, and the size."""
    rows, columns = grid
    down, across = rows - rows % window, columns - columns % window
    for top, bottom, height in ((0, down, window), (down, rows, rows % window)):
        for left, right, width in ((0, across, window), (across, columns, columns % window)):
            if top < bottom and left < right:
                yield slice(top, bottom), slice(left, right), height, width


def window_order(grid: tuple[int, int], window: int | None) -> Tensor:
    """The tokens of a grid, window by window."""
    index = torch.arange(grid[0] * grid[1]).view(grid)
    if window is None:
        return index.flatten()
    parts = []
    for rows, columns, height, width in _blocks(grid, window):
        part = index[rows, columns]
        cut = part.reshape(part.shape[0] // height, height, part.shape[1] // width, width)
        parts.append(cut.transpose(1, 2).flatten())
    return torch.cat(parts)


def window_runs(grid: tuple[int, int], window: int | None) -> Iterator[tuple[int, int, int]]:
    """Windows of equal size in that order: the first token, the number of windows, tokens of each."""
    if window is None:
        yield 0, 1, grid[0] * grid[1]
        return
    start = 0
    for rows, columns, height, width in _blocks(grid, window):
        tokens = (rows.stop - rows.start) * (columns.stop - columns.start)
        yield start, tokens // (height * width), height * width
        start += tokens


def check_vision(vision: Qwen2VisionDims, decoder_width: int) -> None:
    """CheckpointError for dims that do not fit together."""
    if vision.hidden % vision.heads or vision.hidden // vision.heads % 4:
        raise CheckpointError(
            f"config.json: a vision width of {vision.hidden} over {vision.heads} heads leaves no multiple of "
            "4 per head, which 2-D rotary positions need"
        )
    if vision.out != decoder_width:
        raise CheckpointError(
            f"config.json: vision features of {vision.out} channels cannot join a decoder of {decoder_width} "
            "('hidden_size')"
        )


def channels(config: Config) -> int:
    """Under its present or its first name."""
    return positive_int(config, "in_channels", positive_int(config, "in_chans", 3))
