"""A product between the kernel that multiplied and the one that adds up its shares of K."""

from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """A product whose shares of K are not added up yet: y = cast(sums[0] + sums[1] + ... + bias)."""

    sums: Tensor  # [splits, M, N] float32
    bias: Tensor | None
    dtype: torch.dtype  # of y

    @property
    def shape(self) -> torch.Size:
        return self.sums.shape[1:]

    def added(self) -> Tensor:
        total = self.sums[0]
        for part in self.sums[1:]:
            total = total + part
        return (total if self.bias is None else total + self.bias.float()).to(self.dtype)
