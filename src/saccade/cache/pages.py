"""The K and V tensors, cut into pages, and one step's view of them.

takes   a shape, a number of blocks and a device; block numbers from the pool's owner
gives   `Pages` (the storage) and `Paged` (what one step's rows read and write of it)
owns    the two tensors
never   decides which block belongs to whom; that is `cache.blocks`
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class KVShape(NamedTuple):
    """What one token leaves behind: two vectors of kv_heads * head_dim in each layer."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Pages:
    """K and V of all layers, [layers, blocks, block_size, kv_heads, head_dim] each."""

    k: Tensor
    v: Tensor

    @classmethod
    def allocate(
        cls, shape: KVShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> "Pages":
        if blocks < 1 or block_size < 1:
            raise ValueError(f"pages need at least one block of one token, not {blocks} of {block_size}")
        full = (shape.layers, blocks, block_size, shape.kv_heads, shape.head_dim)
        # Zeros, not empty: a padded read may touch a slot nobody wrote, and 0 * NaN is NaN.
        return cls(
            torch.zeros(full, dtype=dtype, device=device), torch.zeros(full, dtype=dtype, device=device)
        )

    @staticmethod
    def bytes_per_block(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
        return 2 * shape.layers * block_size * shape.kv_heads * shape.head_dim * dtype.itemsize

    @property
    def shape(self) -> KVShape:
        return KVShape(self.k.shape[0], self.k.shape[3], self.k.shape[4])

    @property
    def blocks(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in every layer: [n] int64 each. Sources are read before targets are written."""
        if sources.shape != targets.shape or sources.dim() != 1:
            raise ValueError(
                f"copy_blocks pairs {tuple(sources.shape)} sources with {tuple(targets.shape)} targets"
            )
        if sources.numel() == 0:
            return
        for tensor in (self.k, self.v):
            tensor.index_copy_(1, targets, tensor.index_select(1, sources))


@dataclass(frozen=True)
class Paged:
    """One step's rows over the pages: the explicit input that stands for a KV cache.

    Row r computes tokens offsets[r] .. offsets[r+1] of the step's T tokens, which are the last ones of a
    sequence of lengths[r] tokens, and attends to that whole sequence through tables[r].
    """

    pages: Pages
    slots: Tensor  # [T] int64: block * block_size + offset where each token's K and V go
    tables: Tensor  # [R, W] int32; the first ceil(length / block_size) entries of a row are valid
    lengths: Tensor  # [R] int32, this step's tokens included
    offsets: Tensor  # [R + 1] int32
    counts: tuple[int, ...]  # host copy of the tokens per row
    contexts: tuple[int, ...]  # host copy of lengths
    decodes: int  # the first `decodes` rows have one token each

    def __post_init__(self) -> None:
        rows = len(self.counts)
        if len(self.contexts) != rows or self.tables.shape[0] != rows or self.lengths.shape != (rows,):
            raise ValueError(
                f"{rows} counts, {len(self.contexts)} contexts, {self.tables.shape[0]} tables and "
                f"{tuple(self.lengths.shape)} lengths do not describe the same rows"
            )
        if self.offsets.shape != (rows + 1,) or self.slots.shape != (sum(self.counts),):
            raise ValueError(
                f"{rows} rows of {sum(self.counts)} tokens need offsets [{rows + 1}] and slots "
                f"[{sum(self.counts)}], not {tuple(self.offsets.shape)} and {tuple(self.slots.shape)}"
            )
        if not 0 <= self.decodes <= rows or any(count != 1 for count in self.counts[: self.decodes]):
            raise ValueError(f"the first {self.decodes} of {rows} rows must have one token each")
