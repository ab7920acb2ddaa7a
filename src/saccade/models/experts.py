"""Mixture of experts: a router picks some of many gated MLPs for each token.

All shapes depend on the number of tokens alone, not on the choice, so that a step can be captured. The
products are torch's grouped ones; there is no Triton kernel yet.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.errors import CheckpointError, ConfigError
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.split_k import Norm
from saccade.kernels.norm_rope.elementwise import add_norm, silu_mul
from saccade.models.config import Config, ExpertDims, positive_int
from saccade.models.layers import ModelBuilder
from saccade.models.linear import (
    Activations,
    LinearMethod,
    UnquantizedLinear,
    plain,
    quantized,
    refuse_quantized,
)

NAMES: dict[str, tuple[str, ...]] = {
    "layers.*.mlp.router": ("{text}.layers.*.mlp.gate",),
    "layers.*.mlp.experts": ("{text}.layers.*.mlp.experts",),
}


def read_experts(config: Config, *, normalized: bool, stacked: bool) -> ExpertDims:
    """`normalized` and `stacked` are the family's (`ExpertDims`)."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    count, chosen = positive_int(config, key), positive_int(config, "num_experts_per_tok")
    if chosen > count:
        raise CheckpointError(
            f"config.json: 'num_experts_per_tok' is {chosen}; there are {count} experts ({key!r})"
        )
    dense = config.get("mlp_only_layers") or ()
    step = positive_int(config, "decoder_sparse_step", 1)
    layers = range(positive_int(config, "num_hidden_layers"))
    return ExpertDims(
        count=count,
        chosen=chosen,
        inner=positive_int(config, "moe_intermediate_size"),
        normalized=normalized,
        stacked=stacked,
        layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
    )


class Experts(nn.Module):
    """The weights of all experts of a layer."""

    def __init__(self, width: int, dims: ExpertDims, builder: ModelBuilder) -> None:
        super().__init__()
        self.gate_up = builder.parameter(dims.count, 2 * dims.inner, width)
        self.down = builder.parameter(dims.count, width, dims.inner)
        self._stacked = dims.stacked

    def checkpoint_tensors(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """The last names of the checkpoint's tensors, and what copies each to its place."""
        if self._stacked:
            yield "gate_up_proj", partial(_copy_stacked, self.gate_up)
            yield "down_proj", partial(_copy_stacked, self.down)
            return
        inner = self.down.shape[2]
        for number in range(len(self.down)):
            yield f"{number}.gate_proj.weight", partial(_copy, self.gate_up[number, :inner])
            yield f"{number}.up_proj.weight", partial(_copy, self.gate_up[number, inner:])
            yield f"{number}.down_proj.weight", partial(_copy, self.down[number])

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, mode: KernelMode) -> Tensor:
        """[T, width] of x [T, width], the experts of each token [T, k] and their weights [T, k]:

        y[t] = sum over j of weights[t, j] * down(silu(gate(x[t])) * up(x[t])) of expert chosen[t, j]
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # rows of one expert become neighbours
        numbers = torch.arange(len(self.down), device=x.device)
        ends = torch.searchsorted(flat[order], numbers, right=True).to(torch.int32)
        rows = x[order // chosen.shape[1]]
        inner = silu_mul(F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends), mode)
        found = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        back = torch.empty_like(found).index_copy_(0, order, found)
        return (back.view(*chosen.shape, -1) * weights[:, :, None]).sum(1)


class ExpertMLP(nn.Module):
    """What `GatedMLP` is in a dense layer."""

    def __init__(self, width: int, dims: ExpertDims, builder: ModelBuilder) -> None:
        super().__init__()
        if builder.mode.deterministic:
            raise ConfigError(
                "deterministic mode is not implemented for experts, whose products depend on the other "
                "tokens of a step; leave it off"
            )
        # A router in 8 bits would change which experts a token takes.
        self.router = replace(builder, scheme=UnquantizedLinear).linear("router", width, (dims.count,))
        self.experts = Experts(width, dims, builder)
        self._chosen, self._normalized = dims.chosen, dims.normalized

    @property
    def first(self) -> LinearMethod:
        return self.router

    def forward(self, x: Activations, mode: KernelMode) -> Tensor:
        x = plain(x)
        shares = self.router.forward(x, mode).softmax(-1, dtype=torch.float32)
        weights, chosen = shares.topk(self._chosen, dim=-1)
        if self._normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.experts.forward(x, chosen, weights.to(x.dtype), mode)

    def add(self, found: Activations, x: Tensor, mode: KernelMode) -> Tensor:
        return x + plain(found)

    def add_norm(
        self, found: Activations, x: Tensor, norm: Norm, mode: KernelMode
    ) -> tuple[Activations, Tensor]:
        normed, total = add_norm(plain(found), x, norm.weight, None, norm.eps, mode)
        return quantized(normed, norm, mode), total


def _copy(parameter: Tensor, tensor: Tensor) -> None:
    refuse_quantized(tensor)
    if tensor.shape != parameter.shape:
        raise ValueError(f"is {list(tensor.shape)}, but config.json makes it {list(parameter.shape)}")
    parameter.copy_(tensor)


def _copy_stacked(parameter: Tensor, tensor: Tensor) -> None:
    """As transformers 5 saves it, or with the last two dimensions swapped, as on the hub."""
    swapped = parameter.transpose(1, 2)
    if tensor.shape == swapped.shape != parameter.shape:
        _copy(swapped, tensor)
    elif parameter.shape[1] == parameter.shape[2]:
        raise ValueError(f"is {list(tensor.shape)}, which does not tell inputs from outputs")
    else:
        _copy(parameter, tensor)
