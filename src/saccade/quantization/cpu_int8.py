"""INT8 weights on a CPU, multiplied by oneDNN with activations rounded to 8 bits, row by row.

oneDNN is fast for unsigned activations and signed weights alone (signed ones take 1,000 times as long), so
the rounded activations are shifted by 128; oneDNN takes the shift out of its integer sums again. These are
exact: a row of y does not depend on the other rows of x.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import LARGEST
from saccade.kernels.gemm.split_k import Epilogue, Reduced
from saccade.models.linear import Activations, plain
from saccade.quantization.weights import EightBitWeight, QuantizedWeight, apply_epilogue

ZERO = 128  # the unsigned value that stands for 0
SHIFT = 1.5 * 2**23 + ZERO  # float32 holds no fraction there, and the value + ZERO is its lowest byte


@dataclass(frozen=True)
class OneDNNWeight:
    """W[n, k] = packed[k, n] * scale[n]; y = (x_rounded W^T) * scale of the row of x."""

    packed: Tensor  # [K, N] int8 in oneDNN's own layout
    scale: Tensor  # [N] float32
    zeros: Tensor  # [N] int32

    @classmethod
    def pack(cls, weight: EightBitWeight) -> Self:
        packed = torch.ops.onednn.qlinear_prepack.default(weight.values, None)
        return cls(packed, weight.scale, torch.zeros(weight.shape[0], dtype=torch.int32))

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"packed": self.packed, "scale": self.scale, "zeros": self.zeros}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.packed.to_dense().t().float() * self.scale[:, None]).to(dtype)

    def joins(self, others: Sequence[QuantizedWeight]) -> bool:
        return all(isinstance(other, OneDNNWeight) for other in others)

    def join(self, others: Sequence[Self]) -> Self:
        weights = [
            EightBitWeight(w.packed.to_dense().t(), w.scale, "token", w.scale.dtype) for w in (self, *others)
        ]
        return self.pack(weights[0].join(weights[1:]))

    @property
    def input_dtype(self) -> torch.dtype | None:
        return None

    def product(self, x: Activations, epilogue: Epilogue, mode: KernelMode) -> Reduced:
        return apply_epilogue(self.partials(x, None, mode), epilogue, mode)

    def partials(self, x: Activations, bias: Tensor | None, mode: KernelMode) -> Tensor:
        rows = plain(x)
        if not rows.shape[0]:
            return rows.new_empty(0, self.shape[0])
        values, scale = quantize_rows_unsigned(rows)
        y = _multiply(values, self.packed, self.scale, self.zeros).mul_(scale)
        return (y if bias is None else y.add_(bias)).to(rows.dtype)


def quantize_rows_unsigned(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[m, k] = (values[m, k] - 128) * scale[m, 0]: the values and scales of `quantize_rows_reference`, but
    that a row of zeros has any values and the scale 0."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True).div_(LARGEST[torch.int8])
    # Torch rounds, shifts and converts floats to bytes 3 times slower.
    return (x / scale).clamp_max_(127).add_(SHIFT).view(torch.int32).to(torch.uint8), scale


def takes(weight: EightBitWeight) -> bool:
    """Whether oneDNN multiplies such weights here."""
    by_row = weight.activation == "token" and weight.input_scale is None and not weight.by_block
    return by_row and weight.values.dtype == torch.int8 and has_exact_int8()


@cache
def has_exact_int8() -> bool:
    """Whether oneDNN is there and adds products without overflow: without VNNI instructions it adds pairs
    of them in 16 bits."""
    values = torch.full((2, 64), 255, dtype=torch.uint8)
    weight = torch.full((16, 64), 127, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack.default(weight, None)
        y = _multiply(values, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return bool((y == 64 * 127 * 127).all())


def _multiply(values: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """(values - ZERO) W^T, float32."""
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        values, 1.0, ZERO, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product
