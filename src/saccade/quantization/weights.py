"""Quantised weights as the kernels read them, whatever format a checkpoint has.

`EightBitWeight` holds FP8 or INT8 values, `FourBitWeight` packed nibbles. Both say what they mean by
`dequantize`, and multiply by `linear`; a format's file only turns its tensors into one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.dispatch import KernelMode, use_triton
from saccade.kernels.gemm.quantize import (
    QuantizedRows,
    quantize_rows,
    quantize_rows_reference,
    to_eight_bits,
)
from saccade.kernels.gemm.quantized_linear import (
    MOST_ROWS,
    EightBit,
    FourBit,
    eight_bit_partials,
    eight_bit_product,
    four_bit_partials,
    four_bit_product,
    scaled_matmul,
)
from saccade.kernels.gemm.skinny import skinny_linear
from saccade.kernels.gemm.split_k import Epilogue, Reduced, SplitKPartials
from saccade.kernels.norm_rope.elementwise import add_norm, add_norm_quantized, silu_mul
from saccade.models.linear import Activations, plain

BLOCK = 128  # rows and columns of one scale of a block-quantised weight
SLICE = 128  # int16 values in a run of a `FourBitWeight`, each of 4 columns

FOUR_BIT_ROWS = 128  # beyond them the weights are expanded for the library's product

# What x is rounded to before the product: nothing, or 8 bits with one scale per row, per 128 columns of a
# row, or for all of x. The reference does exactly that; the kernels scale by row in all three cases.
Activation = Literal["none", "token", "group", "static"]


class QuantizedWeight(Protocol):
    """The weights [N, K] of one or several fused projections."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it keeps on the device."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor: ...

    def joins(self, others: "Sequence[QuantizedWeight]") -> bool:
        """Whether `join` can make one weight of them."""
        ...

    def join(self, others: Sequence[Self]) -> Self:
        """This weight with others of its kind below it, along N."""
        ...

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The 8 bits x is quantised to, if it is."""
        ...

    def product(self, x: Activations, epilogue: Epilogue, mode: KernelMode) -> Reduced:
        """x W^T with what follows it."""
        ...

    def partials(self, x: Activations, bias: Tensor | None, mode: KernelMode) -> Tensor | SplitKPartials:
        """x W^T + bias, or its split-K partial sums."""
        ...


@dataclass(frozen=True)
class EightBitWeight:
    """W[n, k] = values[n, k] * scale: per row of W, or per block of 128 x 128."""

    values: Tensor  # [N, K], FP8 (e4m3) or int8
    scale: Tensor  # float32: [N], or [ceil(N / 128), ceil(K / 128)]
    activation: Activation
    dtype: torch.dtype  # of y
    input_scale: Tensor | None = None  # float32 [1], of "static"

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values, "scale": self.scale}

    @property
    def by_block(self) -> bool:
        return self.scale.dim() == 2

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        scale = self.scale[:, None]
        if self.by_block:
            rows, columns = self.shape
            scale = self.scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return (self.values.float() * scale).to(dtype)

    def joins(self, others: "Sequence[QuantizedWeight]") -> bool:
        above: QuantizedWeight = self
        for other in others:
            if not isinstance(other, EightBitWeight) or (self.by_block and above.shape[0] % BLOCK):
                return False  # a block of 128 rows would belong to two projections
            kinds = [(w.values.dtype, w.by_block, w.activation) for w in (self, other)]
            if kinds[0] != kinds[1] or not _same(self.input_scale, other.input_scale):
                return False
            above = other
        return True

    def join(self, others: Sequence[Self]) -> Self:
        every = [self, *others]
        return replace(
            self,
            values=torch.cat([weight.values for weight in every]),
            scale=torch.cat([weight.scale for weight in every]),
        )

    @property
    def input_dtype(self) -> torch.dtype | None:
        return None if self.activation == "none" else self.values.dtype

    def product(self, x: Activations, epilogue: Epilogue, mode: KernelMode) -> Reduced:
        if isinstance(x, Tensor) and not use_triton("quantized_linear", x, mode):
            return DenseWeight.of(self, x.dtype).product(x, epilogue, mode)
        rows = self._rows(x, mode)
        if self._by_kernel(rows, mode):
            return eight_bit_product(rows, self.kernel_weight, self.dtype, epilogue, mode)
        y = scaled_matmul(rows, self.kernel_weight, epilogue.bias, self.dtype)
        return apply_epilogue(y, epilogue._replace(bias=None), mode)

    def partials(self, x: Activations, bias: Tensor | None, mode: KernelMode) -> Tensor | SplitKPartials:
        if isinstance(x, Tensor) and not use_triton("quantized_linear", x, mode):
            return DenseWeight.of(self, x.dtype).partials(x, bias, mode)
        rows = self._rows(x, mode)
        if self._by_kernel(rows, mode):
            return eight_bit_partials(rows, self.kernel_weight, bias, self.dtype, mode)
        return scaled_matmul(rows, self.kernel_weight, bias, self.dtype)

    @property
    def kernel_weight(self) -> EightBit:
        return EightBit(self.values, self.scale)

    def _rows(self, x: Activations, mode: KernelMode) -> QuantizedRows:
        return x if isinstance(x, QuantizedRows) else quantize_rows(x, self.values.dtype, mode)

    def _by_kernel(self, rows: QuantizedRows, mode: KernelMode) -> bool:
        return 0 < len(rows.values) <= MOST_ROWS or self.by_block or mode.deterministic


@dataclass(frozen=True)
class FourBitWeight:
    """W[n, k] = (q[n, k] - zero[g, n]) * scale[g, n], g = k // group, q from 0 to 15.

    `packed` holds four columns in each int16: in each run of SLICE values, nibble i of value j is column
    i * SLICE + j of the run's 4 * SLICE columns: the i-th nibbles of a tile are a tile of W.
    K' is K rounded up to whole runs; what lies beyond K is never used, as x is 0 there.
    """

    packed: Tensor  # [N, K' / 4] int16
    scale: Tensor  # [ceil(K / group), N], in the dtype of the checkpoint's scales
    zero: Tensor | None  # [ceil(K / group), N] uint8; None: 8
    group: int  # columns that share a scale
    columns: int  # K
    order: Tensor | None = None  # [K]: column k of W belongs to column order[k] of x (`desc_act`)

    @classmethod
    def pack(
        cls, q: Tensor, scale: Tensor, zero: Tensor | None, group: int, order: Tensor | None = None
    ) -> Self:
        """q [N, K] from 0 to 15; scale and zero [ceil(K / group), N]."""
        rows, columns = q.shape
        run = 4 * SLICE
        padded = F.pad(q.to(torch.int32), (0, -columns % run)).view(rows, -1, 4, SLICE)
        shifts = torch.arange(0, 16, 4, device=q.device, dtype=torch.int32).view(1, 1, 4, 1)
        words = (padded << shifts).sum(2, dtype=torch.int32)
        packed = torch.where(words > 32767, words - 65536, words).to(torch.int16).reshape(rows, -1)
        return cls(packed, scale.contiguous(), zero, group, columns, order)

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.columns

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {"packed": self.packed, "scale": self.scale, "zero": self.zero, "order": self.order}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def quantized(self) -> Tensor:
        """q [N, K]."""
        shifts = torch.arange(0, 16, 4, device=self.packed.device, dtype=torch.int32).view(1, 1, 4, 1)
        runs = self.packed.to(torch.int32).view(self.shape[0], -1, 1, SLICE)
        return ((runs >> shifts) & 15).reshape(self.shape[0], -1)[:, : self.columns]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """In the order of x's columns."""
        weight = self._expanded(dtype)
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _expanded(self, dtype: torch.dtype) -> Tensor:
        """In the order of W's columns."""
        q = self.quantized().float()
        scale = self.scale.t().float().repeat_interleave(self.group, 1)[:, : self.columns]
        zero: Tensor | float = 8.0
        if self.zero is not None:
            zero = self.zero.t().float().repeat_interleave(self.group, 1)[:, : self.columns]
        return ((q - zero) * scale).to(dtype)

    def joins(self, others: "Sequence[QuantizedWeight]") -> bool:
        return all(
            isinstance(other, FourBitWeight)
            and (self.group, self.zero is None) == (other.group, other.zero is None)
            and _same(self.order, other.order)
            for other in others
        )

    def join(self, others: Sequence[Self]) -> Self:
        every = [self, *others]
        zeros = [w.zero for w in every if w.zero is not None]
        return replace(
            self,
            packed=torch.cat([w.packed for w in every]),
            scale=torch.cat([w.scale for w in every], 1),
            zero=torch.cat(zeros, 1) if zeros else None,
        )

    @property
    def input_dtype(self) -> torch.dtype | None:
        return None

    def product(self, x: Activations, epilogue: Epilogue, mode: KernelMode) -> Reduced:
        rows = self._ordered(plain(x))
        if self._by_kernel(rows, mode):
            return four_bit_product(rows, self.kernel_weight, epilogue, mode)
        return apply_epilogue(F.linear(rows, self._expanded(rows.dtype)), epilogue, mode)

    def partials(self, x: Activations, bias: Tensor | None, mode: KernelMode) -> Tensor | SplitKPartials:
        rows = self._ordered(plain(x))
        if self._by_kernel(rows, mode):
            return four_bit_partials(rows, self.kernel_weight, bias, mode)
        return F.linear(rows, self._expanded(rows.dtype), bias)

    @property
    def kernel_weight(self) -> FourBit:
        return FourBit(self.packed, self.scale, self.zero, self.group, self.columns)

    def _by_kernel(self, x: Tensor, mode: KernelMode) -> bool:
        few = 0 < len(x) <= FOUR_BIT_ROWS or mode.deterministic
        return few and use_triton("quantized_linear", x, mode)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(1, self.order)


@dataclass(frozen=True)
class DenseWeight:
    """The reference: weights dequantised once, activations rounded as the scheme says. Used on CPUs, and for
    weights that no kernel reads."""

    weight: Tensor
    activation: Activation = "none"
    eight_bits: torch.dtype = torch.int8  # of the activations
    input_scale: Tensor | None = None

    @classmethod
    def of(cls, weight: "QuantizedWeight", dtype: torch.dtype) -> Self:
        dense = weight.dequantize(dtype)
        if isinstance(weight, EightBitWeight):
            return cls(dense, weight.activation, weight.values.dtype, weight.input_scale)
        return cls(dense)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def joins(self, others: "Sequence[QuantizedWeight]") -> bool:
        return all(
            isinstance(other, DenseWeight)
            and (self.activation, self.eight_bits) == (other.activation, other.eight_bits)
            and _same(self.input_scale, other.input_scale)
            for other in others
        )

    def join(self, others: Sequence[Self]) -> Self:
        return replace(self, weight=torch.cat([self.weight, *(w.weight for w in others)]))

    @property
    def input_dtype(self) -> torch.dtype | None:
        return None

    def product(self, x: Activations, epilogue: Epilogue, mode: KernelMode) -> Reduced:
        return apply_epilogue(self.partials(x, epilogue.bias, mode), epilogue._replace(bias=None), mode)

    def partials(self, x: Activations, bias: Tensor | None, mode: KernelMode) -> Tensor:
        return skinny_linear(self._rounded(plain(x)), self.weight, bias, mode)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.activation == "none":
            return x
        if self.input_scale is not None:
            values = to_eight_bits(x.float() / self.input_scale, self.eight_bits)
            return (values.float() * self.input_scale).to(x.dtype)
        if self.activation == "token":
            return quantize_rows_reference(x, self.eight_bits).dequantize(x.dtype)
        groups = F.pad(x, (0, -x.shape[1] % BLOCK)).view(-1, BLOCK)
        rounded = quantize_rows_reference(groups, self.eight_bits).dequantize(x.dtype)
        return rounded.view(len(x), -1)[:, : x.shape[1]]


@dataclass(frozen=True)
class SeparateWeights:
    """Projections that cannot be fused, one product each: they differ in format, in the order of their
    columns (`desc_act`), or share no blocks of 128 rows."""

    weights: tuple[QuantizedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(weight.shape[0] for weight in self.weights), self.weights[0].shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}_{name}": t for i, w in enumerate(self.weights) for name, t in w.tensors.items()}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([weight.dequantize(dtype) for weight in self.weights])

    def joins(self, others: "Sequence[QuantizedWeight]") -> bool:
        return False

    def join(self, others: Sequence[Self]) -> Self:
        return replace(self, weights=sum((other.weights for other in others), self.weights))

    @property
    def input_dtype(self) -> torch.dtype | None:
        dtypes = {weight.input_dtype for weight in self.weights}
        return dtypes.pop() if len(dtypes) == 1 else None

    def product(self, x: Activations, epilogue: Epilogue, mode: KernelMode) -> Reduced:
        return apply_epilogue(self.partials(x, None, mode), epilogue, mode)

    def partials(self, x: Activations, bias: Tensor | None, mode: KernelMode) -> Tensor:
        y = torch.cat([weight.product(x, Epilogue(), mode).out for weight in self.weights], 1)
        return y if bias is None else y + bias


def fuse(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of those of several projections."""
    first, *others = weights
    if not others:
        return first
    return first.join(others) if first.joins(others) else SeparateWeights(tuple(weights))


def apply_epilogue(y: Tensor, epilogue: Epilogue, mode: KernelMode) -> Reduced:
    """By kernels of their own, behind a library's product."""
    bias, gated, residual, norm = epilogue
    y = y if bias is None else y + bias
    y = silu_mul(y, mode) if gated else y
    if norm is None:
        return Reduced(y, None, y)
    if norm.quantized is None:
        normed, total = add_norm(y, residual, norm.weight, None, norm.eps, mode)
        return Reduced(normed, None, total)
    rows, total = add_norm_quantized(y, residual, norm.weight, None, norm.eps, norm.quantized, mode)
    return Reduced(*rows, total)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
