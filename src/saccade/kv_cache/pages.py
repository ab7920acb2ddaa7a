"""Paged KV storage: the K and V tensors of a KV cache group, and one step's view of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.metadata import AttentionMetadata, PaddedAttentionMetadata
from saccade.kernels.attention.paged import copy_block
from saccade.kernels.attention.quantized_kv import LARGEST, SCALE_BYTES, Compact
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.kv_cache.groups import KVCacheGroup

SIDE_DTYPE = torch.float32
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class BlockStorage(NamedTuple):
    """The tensors of blocks first .. first + blocks: block b is at [:, b - first]."""

    first: int
    blocks: int
    pairs: tuple[tuple[Tensor, Tensor], ...]  # K and V, [layers, at least `blocks`, ...] each
    side: Tensor | None = None  # [1, blocks, ...]: `Pages.side` of these blocks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        side = () if self.side is None else (self.side,)
        return (*(tensor for pair in self.pairs for tensor in pair), *side)


@dataclass(frozen=True)
class Pages:
    """K and V of a group's layers, [layers, blocks, block_size, kv_heads, head_dim] each.

    The blocks from `compact.first` on, where there is a `compact`, are quantized to 8 bits, in tensors of
    their own (kernels/attention/quantized_kv.py). With both kinds of block, each storage has a padding block
    behind its last.
    """

    group: KVCacheGroup
    k: Tensor
    v: Tensor
    compact: Compact | None = None
    side: Tensor | None = None  # [1, blocks, block_size, width]: a vector per token beside its K and V
    mode: KernelMode = DEFAULT_MODE

    @classmethod
    def allocate(
        cls,
        group: KVCacheGroup,
        blocks: int,
        device: torch.device | str,
        compact_blocks: int = 0,  # how many of them, the last ones, are quantized
        compact_dtype: torch.dtype | None = None,
        side_width: int = 0,  # 0: nothing beside K and V
        mode: KernelMode = DEFAULT_MODE,
    ) -> "Pages":
        layers, block_size = len(group.layers), group.block_size
        if blocks < 1 or block_size < 1:
            raise ValueError(f"pages need at least one block of one token, not {blocks} of {block_size}")
        if not 0 <= compact_blocks <= blocks or bool(compact_blocks) != (compact_dtype is not None):
            raise ValueError(f"{compact_blocks} of {blocks} blocks are to be quantized, to {compact_dtype}")

        # Zeros, not empty: a padded read may touch an unwritten slot, and 0 * NaN is NaN.
        def zeros(blocks: int, dtype: torch.dtype, *inner: int) -> Tensor:
            return torch.zeros(layers, blocks, *inner, dtype=dtype, device=device)

        plain = blocks - compact_blocks
        padding = 1 if plain and compact_blocks else 0
        inner = (block_size, group.kv_heads, group.head_dim)
        k, v = (zeros(plain + padding, DTYPES[group.dtype], *inner) for _ in "kv")
        side = None
        if side_width:
            side = torch.zeros(1, blocks, block_size, side_width, dtype=SIDE_DTYPE, device=device)
        if compact_dtype is None:
            return cls(group, k, v, None, side, mode)
        small = compact_blocks + padding
        compact = Compact(
            zeros(small, compact_dtype, *inner),
            zeros(small, compact_dtype, *inner),
            zeros(small, torch.float32, group.kv_heads, block_size),
            zeros(small, torch.float32, group.kv_heads, block_size),
            plain,
        )
        return cls(group, k, v, compact, side, mode)

    @staticmethod
    def bytes_per_block(group: KVCacheGroup, dtype: torch.dtype | None = None, side_width: int = 0) -> int:
        """Of a block in the group's dtype, or of one quantized to the 8-bit `dtype`, its scales included."""
        stored = DTYPES[group.dtype] if dtype is None else dtype
        vector = group.head_dim * stored.itemsize + (SCALE_BYTES if stored in LARGEST else 0)
        side = group.block_size * side_width * SIDE_DTYPE.itemsize
        return 2 * len(group.layers) * group.block_size * group.kv_heads * vector + side

    @property
    def blocks(self) -> int:
        if self.compact is None:
            return self.k.shape[1]
        small = self.compact.k.shape[1]
        return self.compact.first + small - (1 if self.compact.first else 0)

    @property
    def border(self) -> int:
        """The first quantized block; the number of blocks if there is none."""
        return self.blocks if self.compact is None else self.compact.first

    @property
    def block_size(self) -> int:
        return self.group.block_size

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts() for tensor in part.tensors)

    def layer(self, index: int) -> Compact | None:
        """The quantized blocks of one layer."""
        return None if self.compact is None else self.compact.layer(index)

    def parts(self) -> tuple[BlockStorage, ...]:
        """All storage of the blocks. A block is in one part; copying it means copying all tensors of that
        part."""
        border, blocks = self.border, self.blocks
        below, above = (None, None) if self.side is None else (self.side[:, :border], self.side[:, border:])
        plain = (BlockStorage(0, border, ((self.k, self.v),), below),) if border else ()
        if self.compact is None:
            return plain
        k, v, k_scale, v_scale, _ = self.compact
        # As bytes, since not every device can index 8-bit floats.
        small = (k.view(torch.uint8), v.view(torch.uint8)), (k_scale, v_scale)
        return (*plain, BlockStorage(border, blocks - border, small, above))

    def in_order(self, pairs: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
        """(source, target) pairs with those of unquantized blocks first, and how many these are."""
        border = self.border
        if any((source < border) != (target < border) for source, target in pairs):
            raise ValueError(f"a block cannot be copied between plain and compact blocks: {pairs}")
        ordered = sorted(pairs, key=lambda pair: pair[1] >= border)
        return ordered, sum(target < border for _, target in pairs)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block in every layer, to one of the same storage."""
        for part in self.parts():
            last = part.first + part.blocks
            inside = [part.first <= block < last for block in (source, target)]
            if all(inside):
                at, to = source - part.first, target - part.first
                for k, v in part.pairs:
                    copy_block(k, v, at, to, self.mode)
                if part.side is not None:
                    part.side[:, to].copy_(part.side[:, at])
            elif any(inside):
                raise ValueError(f"block {source} cannot be copied to {target}, which is of another kind")

    def copy_blocks(self, sources: Tensor, targets: Tensor, plain: int | None = None) -> None:
        """Copy blocks in every layer: [n] int64 each. Sources are read before targets are written. The first
        `plain` pairs are of unquantized blocks, the others of quantized ones, as `in_order` orders them."""
        if sources.shape != targets.shape or sources.dim() != 1:
            raise ValueError(
                f"copy_blocks pairs {tuple(sources.shape)} sources with {tuple(targets.shape)} targets"
            )
        if plain is None:
            if 0 < self.border < self.blocks:
                raise ValueError("blocks are of two kinds: give `plain`, the number of unquantized pairs")
            plain = len(sources) if self.border else 0
        for part in self.parts():
            begin = plain if part.first else 0
            end = plain if part.first + part.blocks <= self.border else len(sources)
            if begin == end:
                continue
            read, write = sources[begin:end] - part.first, targets[begin:end] - part.first
            for tensor in part.tensors:
                tensor.index_copy_(1, write, tensor.index_select(1, read))


@dataclass(frozen=True)
class Paged:
    """A step's tokens over the pages: where each is written, and what the rows (sequences) attend to."""

    pages: Pages
    slots: Tensor  # [T] int64 slot mapping: block * block_size + offset of each token; negative: padding
    rows: AttentionMetadata | PaddedAttentionMetadata

    def __post_init__(self) -> None:
        if self.slots.shape != (self.rows.num_tokens,):
            raise ValueError(
                f"rows of {self.rows.num_tokens} tokens need as many slots, not {tuple(self.slots.shape)}"
            )
