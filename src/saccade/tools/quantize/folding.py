"""Scales of a layer's inputs, folded into what computes these inputs: a norm, or rows of the layer before."""

from typing import Protocol

import torch
from torch import Tensor, nn

from saccade.models.layers import Attention, LayerNorm, RMSNorm
from saccade.tools.quantize.linear import CalibratedLinear

# The norm whose output a layer takes, by the end of the layer's path inside its block.
NORMS = {"attention.qkv": "attention_norm", "mlp.gate_up": "mlp_norm", "up": "mlp_norm"}
V, UP = 2, 1  # partitions of attention.qkv and mlp.gate_up


class ScaleSource(Protocol):
    """What computes the inputs x [T, K] of a layer."""

    def share(self, statistic: Tensor) -> Tensor:
        """A statistic [K] made equal for columns that must have the same scale."""
        ...

    def divide(self, scale: Tensor) -> Tensor:
        """Compute x / scale from now on. Gives the scale after rounding, by which W is to be multiplied."""
        ...


class NormSource:
    def __init__(self, norm: RMSNorm | LayerNorm, stored: torch.dtype) -> None:
        self._norm, self._stored = norm, stored

    def share(self, statistic: Tensor) -> Tensor:
        return statistic

    def divide(self, scale: Tensor) -> Tensor:
        before = self._norm.weight.float()
        after = (before / scale).to(self._stored).float()
        exact = torch.where(after != 0, before / after, scale)
        self._norm.weight.copy_(after)
        if isinstance(self._norm, LayerNorm):
            self._norm.bias.copy_(self._norm.bias.float() / exact)
        return exact


class RowSource:
    """Rows of the layer before; each run of `run` rows makes `repeat` runs of columns of x, as a KV head does
    for the heads that share it."""

    def __init__(self, linear: CalibratedLinear, partition: int, run: int = 1, repeat: int = 1) -> None:
        self._linear, self._rows = linear, linear.rows(partition)
        self._run, self._repeat = run, repeat

    def share(self, statistic: Tensor) -> Tensor:
        return self._spread(statistic.view(-1, self._repeat, self._run).amax(1).flatten())

    def _spread(self, rows: Tensor) -> Tensor:
        return rows.view(-1, 1, self._run).expand(-1, self._repeat, -1).flatten()

    def divide(self, scale: Tensor) -> Tensor:
        each = scale.view(-1, self._repeat, self._run)[:, 0].flatten()
        linear, rows = self._linear, self._rows
        linear.weight[rows] = (linear.weight[rows].float() / each[:, None]).to(linear.weight.dtype)
        if linear.bias is not None:
            linear.bias[rows] = (linear.bias[rows].float() / each).to(linear.bias.dtype)
        return scale


def norm_source(block: nn.Module, path: str, stored: torch.dtype) -> ScaleSource | None:
    """The norm in front of the layer at `path` in its block, if it has one."""
    norm = getattr(block, NORMS.get(path, ""), None)
    return NormSource(norm, stored) if isinstance(norm, RMSNorm | LayerNorm) else None


def scale_source(block: nn.Module, path: str, stored: torch.dtype) -> ScaleSource | None:
    """The norm, or the rows of another layer that are multiplied by nothing else: values, and `up`."""
    if path == "mlp.down":
        before = block.get_submodule("mlp.gate_up")
        return RowSource(before, UP) if isinstance(before, CalibratedLinear) else None
    if path == "attention.out":
        before = block.get_submodule("attention.qkv")
        if not isinstance(before, CalibratedLinear) or len(before.spec.partitions) != 3:
            return None
        queries, _, values = before.spec.partitions
        attention = block.get_submodule("attention")
        if not isinstance(attention, Attention):
            return None
        return RowSource(before, V, attention.head_dim, queries // values)
    return norm_source(block, path, stored)
