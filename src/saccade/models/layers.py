"""What networks are made of, and what the engine sees of a finished one.

Every module takes a `Place` and makes its parameters there, empty: never elsewhere first. Inputs are
explicit; nothing is read from the surroundings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.attention.metadata import FixedRows, Rows
from saccade.kernels.attention.paged import paged_attention
from saccade.kernels.attention.quantized_kv import Compact
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.kernels.gemm.skinny import (
    Norm,
    skinny_linear,
    skinny_linear_gated,
    skinny_linear_left,
    skinny_linear_normed,
)
from saccade.kernels.norm_rope.activation import silu_mul
from saccade.kernels.norm_rope.add_norm import add_layer_norm, add_rms_norm
from saccade.kernels.norm_rope.qk_norm_rope import HeadNorm, qkv_finish
from saccade.kernels.norm_rope.rope import apply_rotary
from saccade.kv_cache.groups import KVCacheGroup
from saccade.kv_cache.pages import FixedPaged, Paged


class Place(NamedTuple):
    """Where parameters live, and as what."""

    device: torch.device
    dtype: torch.dtype
    mode: KernelMode = DEFAULT_MODE

    def parameter(self, *shape: int) -> nn.Parameter:
        empty = torch.empty(shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(empty, requires_grad=False)


@dataclass(frozen=True)
class DeepVisual:
    """Features of visual tokens that join the stream again after the first decoder layers (DeepStack)."""

    index: Tensor  # [Tv] int64, each once: which of the step's tokens are visual
    levels: Tensor  # [D, Tv, hidden]


class Watch:
    """Hidden states to be handed out on the way through a decoder: of some tokens, behind some layers."""

    def __init__(self, wanted: Mapping[int, Tensor], into: Mapping[int, Tensor] | None = None) -> None:
        self.wanted = wanted  # by layers passed: [n] int64, which of the step's tokens
        self.seen: dict[int, Tensor] = {}  # the same: [n, hidden]
        self._into = into  # the same: where those are written

    def note(self, layers: int, x: Tensor) -> None:
        """The stream behind so many layers is x."""
        tokens = self.wanted.get(layers)
        if tokens is not None:
            out = None if self._into is None else self._into[layers]
            self.seen[layers] = torch.index_select(x, 0, tokens, out=out)


PatchGrid = tuple[int, int]  # rows, columns of patches


@dataclass(frozen=True)
class Layout:
    """The views of one call of a vision tower: their grids, and the tables it reads about them."""

    grids: tuple[PatchGrid, ...]
    tables: tuple[tuple[Tensor, ...], ...]  # table by table: a part for each view, or one for all, [P, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Patches of each view."""
        return tuple(rows * columns for rows, columns in self.grids)

    def table(self, number: int) -> Tensor:
        """[P, ...] of all views."""
        parts = self.tables[number]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_(self, given: "Layout") -> None:
        """The tables of a layout of as many patches into these, which are one part each. A launch a table."""
        for (own,), parts in zip(self.tables, given.tables, strict=True):
            torch.cat(parts, out=own)


class VisionTower(nn.Module):
    """Turns the patches of views into features: one vector for the prompt and one per DeepStack level.

    What its pieces do with a view depends on the number of its patches, and on its grid through `tables`
    alone: a captured call then serves all grids of a size. A family that reads the grid otherwise, to attend
    in windows say, sets `by_grid`: its captured calls serve one grid each.
    """

    by_grid = False
    patch_dim: int  # channels * frames * patch * patch
    merge: int  # patches per token along each side
    depth: int  # layers
    hidden_dim: int  # width of the stream between layers
    deep: tuple[int, ...]  # layers behind which a level branches off
    depth_levels: int  # D: how many those are
    out_dim: int
    mode: KernelMode = DEFAULT_MODE

    def forward(self, patches: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """[P, patch_dim] in merge order, views packed; gives [tokens, (1 + D) * out_dim]."""
        layout = self.layout(grids)
        stream, levels = self.carry(self.begin(patches, layout), layout, 0, self.depth)
        return self.finish(stream, levels)

    def layout(self, grids: Sequence[PatchGrid]) -> Layout:
        """Of a call with views of these grids, packed in this order."""
        return Layout(tuple(grids), tuple(zip(*(self.tables(grid) for grid in grids), strict=True)))

    def tables(self, grid: PatchGrid) -> tuple[Tensor, ...]:
        """What the pieces below read about a view's grid, [patches, ...] each, on the device."""
        return ()

    # The same in pieces; nothing but the stream and the levels passes from one to the next.

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        """The stream before the first layer: [P, hidden_dim]."""
        raise NotImplementedError

    def carry(
        self, stream: Tensor, layout: Layout, first: int, stop: int, *, recurring: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Through layers `first` .. `stop`; gives the stream and those deep levels [tokens, out_dim] that
        branch off on the way. `recurring`: views of these sizes will come again, so plans made for them
        pay."""
        raise NotImplementedError

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        """The features, of the stream behind the last layer and all D levels in order; with no levels given,
        the first out_dim columns alone."""
        raise NotImplementedError


class LanguageModel(nn.Module):
    """A causal language model over paged keys and values."""

    kv_cache_groups: tuple[KVCacheGroup, ...]
    vocab_size: int
    hidden_size: int
    max_positions: int
    vision: VisionTower | None
    mode: KernelMode = DEFAULT_MODE

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] ids to [T, hidden]."""
        raise NotImplementedError

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        paged: Paged | FixedPaged,
        deep: DeepVisual | None,
        watch: Watch | None = None,
        stop: int | None = None,
        mode: KernelMode | None = None,
    ) -> Tensor:
        """[T, hidden] at positions [3, T] float32; gives the normalised last hidden states [T, hidden]. Ends
        behind `stop` layers where that is given: for what is watched alone. `mode` replaces
        the model's."""
        raise NotImplementedError

    def queries(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        """What a layer's attention asks for tokens whose stream before it is `states` [n, hidden], at
        positions [3, n]: [n, heads, head_dim], normalised and rotated as the keys in the pages are."""
        raise NotImplementedError

    def raw_logits(self, hidden: Tensor, mode: KernelMode | None = None) -> Tensor:
        """[S, hidden] to [S, vocab] of the weights' dtype."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to [S, vocab] float32."""
        return self.raw_logits(hidden).float()


class Linear(nn.Module):
    """y = x W^T + b. `parts` are the output rows of the projections fused into one."""

    def __init__(self, inputs: int, parts: tuple[int, ...], place: Place, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = place.parameter(sum(parts), inputs)
        self.bias = place.parameter(sum(parts)) if bias else None

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        return skinny_linear(x, self.weight, self.bias, mode)

    def normed(self, x: Tensor, stream: Tensor, norm: "RMSNorm", mode: KernelMode) -> tuple[Tensor, Tensor]:
        """The norm of stream + y, and that sum: one product with its residual and the norm that follows."""
        if self.bias is not None:
            return norm.add(self.forward(x, mode), stream, mode)
        return skinny_linear_normed(x, self.weight, stream, Norm(norm.weight, norm.eps), mode)


class Embedding(nn.Module):
    def __init__(self, count: int, width: int, place: Place) -> None:
        super().__init__()
        self.weight = place.parameter(count, width)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, place: Place) -> None:
        super().__init__()
        self.weight = place.parameter(width)
        self.eps = eps

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        return self.add(None, x, mode)[0]

    def add(self, delta: Tensor | None, x: Tensor, mode: KernelMode) -> tuple[Tensor, Tensor]:
        """The norm of x + delta [T, width], and that sum."""
        if delta is None:
            return add_rms_norm(x, None, self.weight, self.eps, mode)
        return add_rms_norm(delta, x, self.weight, self.eps, mode)


class LayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, place: Place) -> None:
        super().__init__()
        self.weight = place.parameter(width)
        self.bias = place.parameter(width)
        self.eps = eps

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        return add_layer_norm(x, None, self.weight, self.bias, self.eps, mode)[0]

    def add(self, delta: Tensor, x: Tensor, mode: KernelMode) -> tuple[Tensor, Tensor]:
        """The norm of x + delta [T, width], and that sum."""
        return add_layer_norm(delta, x, self.weight, self.bias, self.eps, mode)


class GatedMLP(nn.Module):
    """y = down(silu(gate(x)) * up(x)), gate and up as one projection."""

    def __init__(self, width: int, inner: int, place: Place, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(width, (inner, inner), place, bias)
        self.down = Linear(inner, (width,), place, bias)

    def inner(self, x: Tensor, mode: KernelMode) -> Tensor:
        """Everything before `down`."""
        if self.gate_up.bias is None:
            return skinny_linear_gated(x, self.gate_up.weight, mode)
        return silu_mul(self.gate_up.forward(x, mode), mode)


class Turn(NamedTuple):
    """The rotation of a step's tokens: [T, head_dim] each, as `apply_rotary` takes them."""

    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    """Causal attention with grouped kv heads: project, normalise and rotate q and k, write, read; `out`
    is the projection that follows."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        place: Place,
        *,
        bias: bool,
        norm_eps: float | None,  # None: q and k are not normalised
        window: int | None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window = window
        self.scale = head_dim**-0.5
        inner = heads * head_dim
        kv_inner = kv_heads * head_dim
        self.qkv = Linear(width, (inner, kv_inner, kv_inner), place, bias)
        self.out = Linear(inner, (width,), place, bias)
        self.q_norm = RMSNorm(head_dim, norm_eps, place) if norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, norm_eps, place) if norm_eps is not None else None

    def forward(
        self,
        x: Tensor,
        turn: Turn,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
        rows: Rows | FixedRows,
        compact: Compact | None,  # the layer's blocks in 8 bits, where there are any
        mode: KernelMode,
    ) -> Tensor:
        """What the heads saw, [T, heads * head_dim]: what `out` takes."""
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = skinny_linear_left(x, self.qkv.weight, self.qkv.bias, mode)
        q = qkv_finish(qkv, self.heads, norm, turn.cos, turn.sin, slots, k_pages, v_pages, compact, mode)
        seen = paged_attention(q, k_pages, v_pages, rows, self.scale, self.window, compact, mode)
        return seen.flatten(1)

    def queries(self, x: Tensor, turn: Turn, mode: KernelMode) -> Tensor:
        """The queries alone, [n, heads, head_dim]."""
        inner = self.heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[:inner]
        q = F.linear(x, self.qkv.weight[:inner], bias).view(-1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm.forward(q, mode)
        return apply_rotary(q.view(-1, self.heads, self.head_dim), turn.cos, turn.sin, mode)
