"""The vision tower of Qwen3-VL.

A view's patches come in merge order: the merge * merge patches of one token are neighbours, tokens row by
row. Views are packed one after another; each attends to itself alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.host.allocator import copy_to_own_mapping
from saccade.kernels.attention.paged import sdpa_any_shape, sdpa_recurring_shape
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.norm_rope.rope import apply_rotary
from saccade.models.config import VisionDims
from saccade.models.interface import Layout, PatchGrid, VisionTower
from saccade.models.layers import Embedding, LayerNorm, ModelBuilder, Rotary

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}
EPS = 1e-6
# From this size on a cuDNN plan pays the first time: 27 layers of attention over 16,384 patches take 0.15 s
# by flash and 0.09 s by cuDNN (at 229 and 360 TFLOP/s), the plan 0.06 s.
PLANNED_PATCHES = 16384
# Patches of grids whose tables are cached: 40 MB at 72 channels a head. On a CPU making one is cheap.
KEPT_PATCHES = {"cuda": 1 << 16, "cpu": 1 << 13}


class ViewRun(NamedTuple):
    """Neighbouring views of equal size: one batch of attention."""

    start: int  # first patch
    views: int
    size: int  # patches per view


class GridTable(NamedTuple):
    """What depends on a view's grid, in merge order."""

    corners: Tensor  # [P, 4] int64 into the learned positions
    weights: Tensor  # [P, 4] float32
    cos: Tensor  # [P, head_dim] float32, as `Rotary` has it
    sin: Tensor


CORNERS, WEIGHTS, COS, SIN = range(4)


class VisionAttention(nn.Module):
    """Full attention inside each view."""

    def __init__(self, dims: VisionDims, builder: ModelBuilder) -> None:
        super().__init__()
        self.heads = dims.heads
        self.qkv = builder.linear("qkv", dims.hidden, (3 * dims.hidden,), bias=True)
        self.out = builder.linear("out", dims.hidden, (dims.hidden,), bias=True)

    def forward(self, x: Tensor, rotary: Rotary, runs: Sequence[ViewRun], mode: KernelMode) -> Tensor:
        patches, width = x.shape
        qkv = self.qkv.forward(x, mode).view(patches, 3 * self.heads, width // self.heads)
        qk = apply_rotary(qkv[:, : 2 * self.heads], rotary.cos, rotary.sin, mode)
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, 2 * self.heads :]
        seen = [self._attend(q, k, v, run) for run in runs]
        return self.out.forward(seen[0] if len(seen) == 1 else torch.cat(seen), mode)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, run: ViewRun) -> Tensor:
        stop = run.start + run.views * run.size
        shape = (run.views, run.size, self.heads, -1)
        q, k, v = (part[run.start : stop].reshape(shape).transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v)  # [views, heads, size, head_dim]
        return seen.transpose(1, 2).reshape(run.views * run.size, -1)


class VisionLayer(nn.Module):
    def __init__(self, dims: VisionDims, builder: ModelBuilder) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(dims.hidden, EPS, builder)
        self.attention = VisionAttention(dims, builder.child("attention"))
        self.mlp_norm = LayerNorm(dims.hidden, EPS, builder)
        self.up = builder.linear("up", dims.hidden, (dims.inner,), bias=True)
        self.down = builder.linear("down", dims.inner, (dims.hidden,), bias=True)
        self._activation = ACTIVATIONS[dims.activation]

    def forward(
        self, x: Tensor, delta: Tensor | None, rotary: Rotary, runs: Sequence[ViewRun], mode: KernelMode
    ) -> tuple[Tensor, Tensor]:
        """Takes and gives the residual x and a delta that the next norm adds to it."""
        if delta is None:
            normed = self.attention_norm.forward(x, mode)
        else:
            normed, x = self.attention_norm.add(delta, x, mode)
        normed, x = self.mlp_norm.add(self.attention.forward(normed, rotary, runs, mode), x, mode)
        return x, self.down.forward(self._activation(self.up.forward(normed, mode)), mode)


class Merger(nn.Module):
    """The merge * merge patches of a token become one vector of the decoder's width."""

    def __init__(self, dims: VisionDims, builder: ModelBuilder, *, norm_merged: bool) -> None:
        super().__init__()
        self.merged = dims.hidden * dims.merge**2
        self.norm = LayerNorm(self.merged if norm_merged else dims.hidden, EPS, builder)
        self.norm_merged = norm_merged
        self.up = builder.linear("up", self.merged, (self.merged,), bias=True)
        self.down = builder.linear("down", self.merged, (dims.out,), bias=True)

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        if self.norm_merged:
            x = self.norm.forward(x.reshape(-1, self.merged), mode)
        else:
            x = self.norm.forward(x, mode).reshape(-1, self.merged)
        return self.down.forward(F.gelu(self.up.forward(x, mode)), mode)


class QwenVision(VisionTower):
    def __init__(self, dims: VisionDims, builder: ModelBuilder) -> None:
        super().__init__()
        self.patch_dim = dims.channels * dims.frames * dims.patch**2
        self.merge, self.mode = dims.merge, builder.mode
        self.depth = dims.depth
        self.hidden_dim = dims.hidden
        self.depth_levels = len(dims.deep)
        self.out_dim = dims.out
        self.patch_embedding = builder.linear("patch_embedding", self.patch_dim, (dims.hidden,), bias=True)
        self.positions = Embedding(dims.positions**2, dims.hidden, builder)
        self.layers = nn.ModuleList(
            VisionLayer(dims, builder.child(f"layers.{i}")) for i in range(dims.depth)
        )
        self.merger = Merger(dims, builder.child("merger"), norm_merged=False)
        self.deep_mergers = nn.ModuleList(
            Merger(dims, builder.child(f"deep_mergers.{i}"), norm_merged=True) for i in range(len(dims.deep))
        )
        self.deep = dims.deep
        self._side = dims.positions
        self._head_dim = dims.hidden // dims.heads
        self._theta = dims.theta
        self._device, self._dtype = builder.device, builder.dtype
        self._tables: OrderedDict[PatchGrid, GridTable] = OrderedDict()
        self._kept = 0  # patches in _tables

    def layout(self, grids: Sequence[PatchGrid]) -> Layout:
        for height, width in grids:
            if height < 1 or width < 1 or height % self.merge or width % self.merge:
                raise ValueError(f"a grid of {height} x {width} patches does not divide by {self.merge}")
        return super().layout(grids)

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        total = sum(layout.sizes)
        if not total or patches.shape != (total, self.patch_dim):
            raise ValueError(
                f"the grids {list(layout.grids)} need patches [{total}, {self.patch_dim}], "
                f"not {tuple(patches.shape)}"
            )
        x = self.patch_embedding.forward(patches.to(self._dtype), self.mode)
        return x + self._learned_positions(layout).to(x.dtype)

    def carry(
        self, stream: Tensor, layout: Layout, first: int, stop: int, *, recurring: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        rotary, runs = Rotary(layout.table(COS), layout.table(SIN)), _runs(layout.sizes)
        planned = recurring or max(run.size for run in runs) >= PLANNED_PATCHES
        levels: list[Tensor] = []
        delta: Tensor | None = None
        with (sdpa_recurring_shape if planned else sdpa_any_shape)(stream.device):
            for index in range(first, stop):
                stream, delta = self.layers[index](stream, delta, rotary, runs, self.mode)
                if index in self.deep:
                    stream, delta = stream + delta, None
                    levels.append(self.deep_mergers[self.deep.index(index)](stream, self.mode))
        return stream if delta is None else stream + delta, levels

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.merger.forward(stream, self.mode), *levels], dim=-1)

    def _learned_positions(self, layout: Layout) -> Tensor:
        """Bilinear between the four nearest learned positions; [P, hidden] float32."""
        corners, weights = (layout.table(number).t().contiguous() for number in (CORNERS, WEIGHTS))  # [4, P]
        total = self.positions.forward(corners[0]) * weights[0, :, None]
        for corner in range(1, 4):  # one at a time: a quarter of the memory
            total += self.positions.forward(corners[corner]) * weights[corner, :, None]
        return total

    def tables(self, grid: PatchGrid) -> GridTable:
        """From the cache, or made anew. The least recently used are evicted first."""
        found = self._tables.get(grid)
        if found is not None:
            self._tables.move_to_end(grid)
            return found
        made = make_table(grid, self.merge, self._side, self._head_dim, self._theta, self._device)
        self._tables[grid] = made
        self._kept += grid[0] * grid[1]
        while self._kept > KEPT_PATCHES.get(self._device.type, 0) and len(self._tables) > 1:
            (height, width), _ = self._tables.popitem(last=False)
            self._kept -= height * width
        return made


def _runs(sizes: Sequence[int]) -> tuple[ViewRun, ...]:
    runs = []
    start = 0
    for size, group in groupby(sizes):
        views = len(list(group))
        runs.append(ViewRun(start, views, size))
        start += views * size
    return tuple(runs)


def make_table(
    grid: PatchGrid, merge: int, side: int, head_dim: int, theta: float, device: torch.device
) -> GridTable:
    height, width = grid
    row, column = merge_order(grid, merge, device)
    top, bottom, down = _between(row, height, side)
    left, right, across = _between(column, width, side)
    corners = torch.stack(
        (top * side + left, top * side + right, bottom * side + left, bottom * side + right), dim=1
    )
    weights = torch.stack(
        ((1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across), dim=1
    )
    cos, sin = axial_rotary(row, column, head_dim, theta)
    return GridTable(*(copy_to_own_mapping(table) for table in (corners, weights, cos, sin)))


def merge_order(grid: PatchGrid, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, in merge order: [token row, token column, row inside, column inside]."""
    height, width = grid
    patches = torch.arange(height * width, device=device).view(height // merge, merge, width // merge, merge)
    patches = patches.transpose(1, 2).flatten()
    return patches // width, patches % width


def axial_rotary(row: Tensor, column: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [P, head_dim]: a quarter of the head rotates with the row, a quarter with the column; both
    repeat for the other half."""
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=row.device) / (head_dim // 2)
    frequencies = 1.0 / (theta**exponents)
    angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _between(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where `index` of `size` falls among `side` learned positions (ends match): before, after, fraction."""
    exact = index.float() * (side - 1) / max(size - 1, 1)
    before = exact.floor()
    low = before.long().clamp(0, side - 1)
    return low, (low + 1).clamp(max=side - 1), exact - before
