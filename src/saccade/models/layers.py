"""The layers networks are made of. Each takes a `ModelBuilder`, which allocates its parameters, empty."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.attention.paged import paged_attention
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.kernels.gemm.split_k import Norm
from saccade.kernels.norm_rope.elementwise import add_norm
from saccade.kernels.norm_rope.qk_norm_rope import HeadNorm, qk_norm_rope
from saccade.kernels.norm_rope.rope import apply_rotary
from saccade.kv_cache.pages import Paged
from saccade.models.config import DecoderDims
from saccade.models.linear import (
    Activations,
    LinearMethod,
    LinearScheme,
    LinearSpec,
    UnquantizedLinear,
    empty_parameter,
)


@dataclass(frozen=True)
class ModelBuilder:
    """Where and how the layers of a model are made."""

    device: torch.device
    dtype: torch.dtype
    mode: KernelMode = DEFAULT_MODE
    scheme: LinearScheme = UnquantizedLinear
    path: str = ""  # of the module being built

    def child(self, name: str) -> "ModelBuilder":
        return replace(self, path=f"{self.path}.{name}".lstrip("."))

    def parameter(self, *shape: int) -> nn.Parameter:
        return empty_parameter(self.device, self.dtype, *shape)

    def linear(
        self,
        name: str,
        in_features: int,
        partitions: tuple[int, ...],
        bias: bool = False,
        tied: nn.Parameter | None = None,
    ) -> LinearMethod:
        path = self.child(name).path
        return self.scheme(LinearSpec(path, in_features, partitions, bias, self.device, self.dtype, tied))


class Embedding(nn.Module):
    def __init__(self, count: int, width: int, builder: ModelBuilder) -> None:
        super().__init__()
        self.weight = builder.parameter(count, width)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, builder: ModelBuilder) -> None:
        super().__init__()
        self.weight = builder.parameter(width)
        self.eps = eps

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        return add_norm(x, None, self.weight, None, self.eps, mode)[0]

    def add(self, delta: Tensor, x: Tensor, mode: KernelMode) -> tuple[Tensor, Tensor]:
        """The norm of x + delta [T, width], and that sum."""
        return add_norm(delta, x, self.weight, None, self.eps, mode)

    def before(self, linear: LinearMethod | None) -> Norm:
        """As a product's epilogue takes it, in the 8 bits that the next layer wants, if any."""
        return Norm(self.weight, self.eps, None if linear is None else linear.input_dtype)


class OffsetRMSNorm(RMSNorm):
    """Multiplies by 1 + the checkpoint's weight, added once after loading."""

    def finish_loading(self) -> None:
        self.weight.add_(1)


class LayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, builder: ModelBuilder) -> None:
        super().__init__()
        self.weight = builder.parameter(width)
        self.bias = builder.parameter(width)
        self.eps = eps

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        return add_norm(x, None, self.weight, self.bias, self.eps, mode)[0]

    def add(self, delta: Tensor, x: Tensor, mode: KernelMode) -> tuple[Tensor, Tensor]:
        """The norm of x + delta [T, width], and that sum."""
        return add_norm(delta, x, self.weight, self.bias, self.eps, mode)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one projection. The caller applies `down`, fused with the
    norm that follows."""

    def __init__(self, width: int, inner: int, builder: ModelBuilder, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = builder.linear("gate_up", width, (inner, inner), bias)
        self.down = builder.linear("down", inner, (width,), bias)

    def forward(self, x: Activations, mode: KernelMode) -> Activations:
        """What `down` takes."""
        return self.gate_up.apply_silu_mul(x, mode, self.down.input_dtype)

    @property
    def first(self) -> LinearMethod:
        """The projection that takes the normed rows."""
        return self.gate_up

    def add(self, inner: Activations, x: Tensor, mode: KernelMode) -> Tensor:
        """x + down(inner)."""
        return x + self.down.forward(inner, mode)

    def add_norm(
        self, inner: Activations, x: Tensor, norm: Norm, mode: KernelMode
    ) -> tuple[Activations, Tensor]:
        """The norm of x + down(inner), and that sum."""
        return self.down.apply_add_norm(inner, x, norm, mode)


class Rotary(NamedTuple):
    """The rotary embedding of a step's tokens: [T, head_dim] each, as `apply_rotary` takes them."""

    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    """Causal attention with grouped kv heads: qkv projection, q/k norm, rotary embedding, KV write, paged
    attention. The caller applies `out`, fused with the norm that follows."""

    def __init__(
        self, dims: DecoderDims, layer: int, builder: ModelBuilder, norm: type[RMSNorm] = RMSNorm
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self._layer = dims.heads, dims.head_dim, layer
        self.window = dims.windows[layer]
        self.scale = dims.head_dim**-0.5
        inner, kv_inner = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        self.qkv = builder.linear("qkv", dims.hidden, (inner, kv_inner, kv_inner), dims.attention_bias)
        self.out = builder.linear("out", inner, (dims.hidden,), dims.out_bias)
        self.q_norm = norm(dims.head_dim, dims.eps, builder) if dims.qk_norm else None
        self.k_norm = norm(dims.head_dim, dims.eps, builder) if dims.qk_norm else None

    def forward(self, x: Activations, rotary: Rotary, paged: Paged, mode: KernelMode) -> Tensor:
        """[T, heads * head_dim]: what `out` takes."""
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        pages, layer = paged.pages, self._layer
        k, v, compact = pages.k[layer], pages.v[layer], pages.layer(layer)
        qkv = self.qkv.apply_partials(x, mode)
        q = qk_norm_rope(qkv, self.heads, norm, rotary.cos, rotary.sin, paged.slots, k, v, compact, mode)
        return paged_attention(q, k, v, paged.rows, self.scale, self.window, compact, mode).flatten(1)

    def queries(self, x: Tensor, rotary: Rotary, mode: KernelMode) -> Tensor:
        """The queries alone, [n, heads, head_dim]."""
        q = self.qkv.apply_partition(x, 0, mode).reshape(-1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm.forward(q, mode)
        return apply_rotary(q.view(-1, self.heads, self.head_dim), rotary.cos, rotary.sin, mode)
