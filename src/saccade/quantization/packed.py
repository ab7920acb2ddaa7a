"""Weights of 4 or 8 bits packed into int32 words, a scale per group of columns: what GPTQ, AWQ and
compressed-tensors' pack-quantized have in common."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.models.linear import TensorError
from saccade.quantization.weights import DenseWeight, FourBitWeight, QuantizedWeight

KERNEL_GROUP = 16  # the 4-bit kernel takes groups of multiples of this


class Groups(NamedTuple):
    """q [N, K] is (q - zero) * scale, both of the group of the column."""

    scale: Tensor  # [groups, N]
    zero: Tensor | None  # [groups, N]; None: the middle, 8 of 4 bits
    size: int  # columns of a group
    of_column: Tensor | None  # [K]: the group of each column; None: one group after the other


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """The values in int32 words along `dim`, low bits first."""
    shape = [1, 1, 1]
    shape[dim + 1] = 32 // bits
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32).view(shape)
    return ((words.unsqueeze(dim + 1) >> shifts) & (1 << bits) - 1).flatten(dim, dim + 1)


def group_index(
    tensors: Mapping[str, Tensor], name: str, columns: int, size: int, groups: int
) -> Tensor | None:
    """The group of each column (`desc_act`), None if they lie one after the other."""
    index = tensors.get(name)
    if index is None:
        return None
    if index.shape != (columns,) or index.is_floating_point():
        raise TensorError(name, f"is {list(index.shape)}, not the groups of {columns} columns")
    index = index.to(torch.int64)
    first, last = int(index.min()), int(index.max())
    if first < 0 or last >= groups:
        raise TensorError(
            name, f"has the groups {first} to {last}, but there are {groups}; download it again"
        )
    counts = torch.bincount(index, minlength=groups)
    if (counts[:-1] != size).any():
        raise TensorError(
            name, f"has groups of other than {size} columns; correct 'group_size' of config.json"
        )
    in_order = torch.arange(columns, device=index.device) // size
    return None if torch.equal(index, in_order) else index


def grouped_weight(q: Tensor, groups: Groups, bits: int, dtype: torch.dtype) -> QuantizedWeight:
    """Of q [N, K]. 8 bits have no kernel and are kept in `dtype`."""
    index = groups.of_column
    if bits == 4 and groups.size % KERNEL_GROUP == 0:
        order = None if index is None else torch.argsort(index, stable=True)
        zero = None if groups.zero is None else groups.zero.to(torch.uint8).contiguous()
        return FourBitWeight.pack(q if order is None else q[:, order], groups.scale, zero, groups.size, order)
    if index is None:
        index = torch.arange(q.shape[1], device=q.device) // groups.size
    middle = float(1 << bits - 1) if groups.zero is None else groups.zero.t().float()[:, index]
    return DenseWeight(((q.float() - middle) * groups.scale.t().float()[:, index]).to(dtype))
