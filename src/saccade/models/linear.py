"""Linear layers: `LinearMethod` is how one stores its weights and multiplies by them.

A quantisation scheme is another `LinearMethod` in a file of its own and a line in `models.registry.SCHEMES`.
Nothing outside a method reads its parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import QuantizedRows, quantize_rows
from saccade.kernels.gemm.skinny import (
    skinny_linear,
    skinny_linear_gated,
    skinny_linear_normed,
    skinny_linear_partials,
)
from saccade.kernels.gemm.split_k import Norm, SplitKPartials
from saccade.kernels.norm_rope.elementwise import add_norm, add_norm_quantized, silu_mul, silu_mul_quantized

DUMMY_STD = 0.02

Activations = Tensor | QuantizedRows


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer of a model: y [T, sum(partitions)] = x [T, in_features] W^T + b."""

    path: str  # of the module in the model, e.g. layers.0.attention.qkv
    in_features: int
    partitions: tuple[int, ...]  # output features of each projection fused into the layer
    bias: bool
    device: torch.device
    dtype: torch.dtype  # of x and y
    # The parameter of another layer that these weights are, e.g. the embedding's of a tied head.
    tied: nn.Parameter | None = field(default=None, compare=False, repr=False)

    def offset(self, partition: int) -> int:
        """The first output feature of a partition."""
        return sum(self.partitions[:partition])


class TensorError(ValueError):
    """A checkpoint's tensor cannot be used; `last` is its last name, the text completes "the tensor ..."."""

    def __init__(self, last: str, problem: str) -> None:
        super().__init__(problem)
        self.last = last


class LinearMethod(nn.Module):
    """A linear layer. The constructor allocates its parameters; `forward` is the plain product (`nn.Module`
    has another `apply`); the fused forms default to the plain one and what follows it."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec = spec

    def checkpoint_tensors(self, partition: int) -> tuple[str, ...]:
        """The last names of the checkpoint's tensors of a partition, e.g. weight, bias."""
        raise NotImplementedError

    def load(self, name: str, partition: int, tensor: Tensor) -> None:
        """Copy the checkpoint's tensor `name` of one partition to its place."""
        raise NotImplementedError

    def finish_loading(self) -> None:
        """Repack, once all tensors are loaded."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The 8 bits that the kernel before best quantises its input to; None: the model's dtype."""
        return None

    def fill_randomly(self, generator: torch.Generator) -> None:
        """Weights without a meaning, for benchmarks."""
        raise NotImplementedError

    def forward(self, x: Activations, mode: KernelMode) -> Tensor:
        """x is in `input_dtype` or the model's dtype."""
        raise NotImplementedError

    def apply_partition(self, x: Tensor, partition: int, mode: KernelMode) -> Tensor:
        """The output of one partition alone."""
        start = self.spec.offset(partition)
        return self.forward(x, mode)[:, start : start + self.spec.partitions[partition]]

    def apply_silu_mul(
        self, x: Activations, mode: KernelMode, quantized: torch.dtype | None = None
    ) -> Activations:
        """silu(gate) * up, of a layer whose partitions are gate and up; in the 8 bits asked for, if any."""
        y = self.forward(x, mode)
        return silu_mul(y, mode) if quantized is None else silu_mul_quantized(y, quantized, mode)

    def apply_add_norm(
        self, x: Activations, residual: Tensor, norm: Norm, mode: KernelMode
    ) -> tuple[Activations, Tensor]:
        """The RMS norm of residual + y, as the norm has it in 8 bits or not, and that sum."""
        normed, total = add_norm(self.forward(x, mode), residual, norm.weight, None, norm.eps, mode)
        return quantized(normed, norm, mode), total

    def apply_partials(self, x: Activations, mode: KernelMode) -> Tensor | SplitKPartials:
        """y, or its split-K partial sums where the next kernel (`qk_norm_rope`) adds them up faster."""
        return self.forward(x, mode)


LinearScheme = Callable[[LinearSpec], LinearMethod]


def norm_rows(x: Tensor, norm: Norm, mode: KernelMode) -> Activations:
    """The RMS norm of x, in 8 bits if the norm says so."""
    if norm.quantized is None:
        return add_norm(x, None, norm.weight, None, norm.eps, mode)[0]
    return add_norm_quantized(x, None, norm.weight, None, norm.eps, norm.quantized, mode)[0]


def quantized(normed: Tensor, norm: Norm, mode: KernelMode) -> Activations:
    return normed if norm.quantized is None else quantize_rows(normed, norm.quantized, mode)


class UnquantizedLinear(LinearMethod):
    """Weights [out, in] and bias [out] in the model's dtype, partitions one after the other."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        out = sum(spec.partitions)
        if spec.tied is None:
            self.weight = empty_parameter(spec.device, spec.dtype, out, spec.in_features)
        else:
            self.weight = spec.tied
        self.bias = empty_parameter(spec.device, spec.dtype, out) if spec.bias else None

    def checkpoint_tensors(self, partition: int) -> tuple[str, ...]:
        if self.spec.tied is not None:
            return ()
        return ("weight", "bias") if self.spec.bias else ("weight",)

    def load(self, name: str, partition: int, tensor: Tensor) -> None:
        copy_partition(self.get_parameter(name), self.spec, partition, tensor)

    def fill_randomly(self, generator: torch.Generator) -> None:
        if self.spec.tied is None:
            self.weight.normal_(0, DUMMY_STD, generator=generator)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Activations, mode: KernelMode) -> Tensor:
        return skinny_linear(plain(x), self.weight, self.bias, mode)

    def apply_partition(self, x: Tensor, partition: int, mode: KernelMode) -> Tensor:
        start = self.spec.offset(partition)
        rows = slice(start, start + self.spec.partitions[partition])
        return F.linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])

    def apply_silu_mul(
        self, x: Activations, mode: KernelMode, quantized: torch.dtype | None = None
    ) -> Activations:
        if self.bias is not None or quantized is not None:
            return super().apply_silu_mul(x, mode, quantized)
        return skinny_linear_gated(plain(x), self.weight, mode)

    def apply_add_norm(
        self, x: Activations, residual: Tensor, norm: Norm, mode: KernelMode
    ) -> tuple[Activations, Tensor]:
        if self.bias is not None:
            return super().apply_add_norm(x, residual, norm, mode)
        normed, total = skinny_linear_normed(plain(x), self.weight, residual, norm, mode)
        return quantized(normed, norm, mode), total

    def apply_partials(self, x: Activations, mode: KernelMode) -> Tensor | SplitKPartials:
        return skinny_linear_partials(plain(x), self.weight, self.bias, mode)


def plain(x: Activations) -> Tensor:
    """What a layer gets that did not ask for 8 bits (`input_dtype`)."""
    if isinstance(x, QuantizedRows):
        raise TypeError("the layer takes the model's dtype, not 8 bits")
    return x


def empty_parameter(device: torch.device, dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def refuse_quantized(tensor: Tensor) -> None:
    """A quantised tensor is no weight by itself: cast, it would be off by its scale."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"is {kind}, but the checkpoint has no scale for it; complete the folder")


def copy_partition(
    parameter: Tensor, spec: LinearSpec, partition: int, tensor: Tensor, *, dim: int = 0, features: int = 1
) -> None:
    """Copy a checkpoint's tensor into the partition's slice of a fused parameter. The output features lie
    along `dim`; `features` of them share one entry (packed integers, scales of blocks). Raises a ValueError
    that completes "the tensor ..."."""
    start, size = (-(-n // features) for n in (spec.offset(partition), spec.partitions[partition]))
    into = parameter.narrow(dim, start, size)
    refuse_quantized(tensor)
    # A convolution that covers its whole input once is a projection of the flattened input.
    flat = tensor.flatten(1) if tensor.dim() > 2 and into.dim() == 2 else tensor
    if flat.shape != into.shape:
        raise ValueError(f"is {list(tensor.shape)}, but config.json makes it {list(into.shape)}")
    into.copy_(flat)
