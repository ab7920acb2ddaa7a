"""What the engine sees of a model: the language model and its vision tower."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.kv_cache.groups import KVCacheGroup
from saccade.kv_cache.pages import Paged

PatchGrid = tuple[int, int]  # rows, columns of patches


@dataclass(frozen=True)
class DeepStackFeatures:
    """Features of visual tokens that are added to the hidden states after the first decoder layers."""

    index: Tensor  # [Tv] int64, distinct: which of the step's tokens are visual
    levels: Tensor  # [D, Tv, hidden]


class HiddenStateTap:
    """Reads hidden states of some tokens in front of some decoder layers, during a forward pass."""

    def __init__(self, tokens: Mapping[int, Tensor], out: Mapping[int, Tensor] | None = None) -> None:
        self.tokens = tokens  # by number of layers passed: [n] int64, which of the step's tokens
        self.states: dict[int, Tensor] = {}  # by the same: [n, hidden]
        self._out = out  # by the same: buffers to write to

    def record(self, layers: int, hidden: Tensor) -> None:
        """`hidden` are the states after so many layers."""
        tokens = self.tokens.get(layers)
        if tokens is not None:
            out = None if self._out is None else self._out[layers]
            self.states[layers] = torch.index_select(hidden, 0, tokens, out=out)


@dataclass(frozen=True)
class Layout:
    """The views of one call of a vision tower: their patch grids, and the tables it reads about them."""

    grids: tuple[PatchGrid, ...]
    tables: tuple[tuple[Tensor, ...], ...]  # of each table: a part per view, or one for all, [P, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Patches of each view."""
        return tuple(rows * columns for rows, columns in self.grids)

    def table(self, number: int) -> Tensor:
        """[P, ...] of all views."""
        parts = self.tables[number]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_(self, given: "Layout") -> None:
        """Copy the tables of a layout of as many patches into these, which have one part each: one launch a
        table."""
        for (own,), parts in zip(self.tables, given.tables, strict=True):
            torch.cat(parts, out=own)


class VisionTower(nn.Module):
    """Turns the patches of views into features: one vector per token for the prompt and one per DeepStack
    level.

    A captured call serves all grids with the same number of patches, because a grid is read through `tables`
    alone. A family that reads it otherwise, e.g. for window attention, sets `by_grid`: then a captured call
    serves one grid.
    """

    by_grid = False
    grid: PatchGrid | None = None  # of every view, if the tower takes no other
    extra_rows = 0  # of a view's hidden states beside its patches: class tokens
    patch_dim: int  # channels * frames * patch * patch
    merge: int  # patches per token along each side
    depth: int  # layers
    hidden_dim: int
    deep: tuple[int, ...]  # layers after which a DeepStack level branches off
    depth_levels: int  # D: their number
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
        """What the stages below read about a view's grid, [patches, ...] each, on the device."""
        return ()

    # The stages of `forward`; only the hidden states and the levels pass from one to the next.

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        """The hidden states in front of the first layer: [P, hidden_dim]."""
        raise NotImplementedError

    def carry(
        self, stream: Tensor, layout: Layout, first: int, stop: int, *, recurring: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Run layers `first` .. `stop`; gives the hidden states and the DeepStack levels [tokens, out_dim]
        that branch off. `recurring`: views of these sizes come again, so it pays to plan for them."""
        raise NotImplementedError

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        """The features, from the last hidden states and all D levels; without levels, the first out_dim
        columns alone."""
        raise NotImplementedError


class LanguageModel(nn.Module):
    """A causal language model over a paged KV cache."""

    kv_cache_groups: tuple[KVCacheGroup, ...]
    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: torch.dtype  # of hidden states
    vision: VisionTower | None
    mode: KernelMode = DEFAULT_MODE

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] ids to [T, hidden]."""
        raise NotImplementedError

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        paged: Paged,
        deep: DeepStackFeatures | None,
        tap: HiddenStateTap | None = None,
        stop: int | None = None,
        mode: KernelMode | None = None,
    ) -> Tensor:
        """[T, hidden] at positions [3, T] float32; gives the normalised last hidden states [T, hidden]. Runs
        the first `stop` layers only, if given (for the tap). `mode` replaces the model's own."""
        raise NotImplementedError

    def queries(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        """The attention queries of a layer for the hidden states in front of it [n, hidden] at positions
        [3, n]: [n, heads, head_dim], normalised and rotated as the keys in the pages are."""
        raise NotImplementedError

    def raw_logits(self, hidden: Tensor, mode: KernelMode | None = None) -> Tensor:
        """[S, hidden] to [S, vocab] of the model's dtype."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to [S, vocab] float32."""
        return self.raw_logits(hidden).float()
