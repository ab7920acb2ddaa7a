"""A linear layer with quantised weights: it reads a format's tensors and keeps a `QuantizedWeight`."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import QuantizedRows
from saccade.kernels.gemm.split_k import Epilogue, Norm, SplitKPartials
from saccade.models.linear import (
    DUMMY_STD,
    Activations,
    LinearMethod,
    LinearSpec,
    copy_partition,
    empty_parameter,
)
from saccade.quantization.weights import DenseWeight, QuantizedWeight


class TensorReader(Protocol):
    """A format: how a checkpoint stores the weights [rows, columns] of one projection."""

    @property
    def names(self) -> tuple[str, ...]:
        """The last names of its tensors, e.g. weight and weight_scale."""
        ...

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        """Raises a `TensorError` that names the tensor at fault. `dtype` is the model's."""
        ...

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """A 16-bit weight [rows, columns] in this format, for dummy weights."""
        ...


class QuantizedLinear(LinearMethod):
    """Projections are converted when the last tensor of the layer arrives, and what was read is let go: no
    more than one layer exists twice."""

    def __init__(self, spec: LinearSpec, reader: TensorReader) -> None:
        super().__init__(spec)
        self.reader = reader
        self.bias = empty_parameter(spec.device, spec.dtype, sum(spec.partitions)) if spec.bias else None
        self._read: list[dict[str, Tensor]] = [{} for _ in spec.partitions]
        self._weight: QuantizedWeight | None = None

    @property
    def weight(self) -> QuantizedWeight:
        if self._weight is None:
            raise RuntimeError(f"{self.spec.path} is used before it is loaded")
        return self._weight

    def checkpoint_tensors(self) -> tuple[str, ...]:
        return (*self.reader.names, "bias") if self.spec.bias else self.reader.names

    def load(self, name: str, partition: int, tensor: Tensor) -> None:
        if name == "bias":
            copy_partition(self.get_parameter(name), self.spec, partition, tensor)
            return
        self._read[partition][name] = tensor
        if all(len(tensors) == len(self.reader.names) for tensors in self._read):
            self._convert()

    def _convert(self) -> None:
        weights = []
        for rows, tensors in zip(self.spec.partitions, self._read, strict=True):
            here = {name: tensor.to(self.spec.device) for name, tensor in tensors.items()}
            weights.append(self.reader.read(here, rows, self.spec.in_features, self.spec.dtype))
            tensors.clear()
        self._keep(weights[0].join(weights[1:]))

    def fill_randomly(self, generator: torch.Generator) -> None:
        spec = self.spec
        shape = (sum(spec.partitions), spec.in_features)
        noise = torch.empty(shape, device=spec.device, dtype=spec.dtype)
        self._keep(self.reader.quantize(noise.normal_(0, DUMMY_STD, generator=generator)))
        if self.bias is not None:
            self.bias.zero_()

    def _keep(self, weight: QuantizedWeight) -> None:
        on_gpu = self.spec.device.type == "cuda"
        self._weight = weight if on_gpu else DenseWeight.of(weight, self.spec.dtype)
        for name, tensor in self._weight.tensors.items():
            self.register_buffer(f"quantized_{name}", tensor)

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.weight.input_dtype

    def forward(self, x: Activations, mode: KernelMode) -> Tensor:
        return self.weight.product(x, Epilogue(self.bias), mode).out

    def apply_silu_mul(self, x: Activations, mode: KernelMode) -> Tensor:
        if self.bias is not None:
            return super().apply_silu_mul(x, mode)
        return self.weight.product(x, Epilogue(gated=True), mode).out

    def apply_add_norm(
        self, x: Activations, residual: Tensor, norm: Norm, mode: KernelMode
    ) -> tuple[Activations, Tensor]:
        out, scale, total = self.weight.product(x, Epilogue(self.bias, False, residual, norm), mode)
        return out if scale is None else QuantizedRows(out, scale), total

    def apply_partials(self, x: Activations, mode: KernelMode) -> Tensor | SplitKPartials:
        return self.weight.partials(x, self.bias, mode)
