"""A linear layer with quantised weights: it reads a format's tensors and keeps a `QuantizedWeight`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import QuantizedRows
from saccade.kernels.gemm.quantized_linear import MOST_ROWS
from saccade.kernels.gemm.split_k import Epilogue, Norm, SplitKPartials
from saccade.models.linear import (
    DUMMY_STD,
    Activations,
    LinearMethod,
    LinearScheme,
    LinearSpec,
    TensorError,
    UnquantizedLinear,
    copy_partition,
    empty_parameter,
    refuse_quantized,
)
from saccade.models.registry import Projection
from saccade.quantization.cpu_int8 import OneDNNWeight, takes
from saccade.quantization.weights import DenseWeight, EightBitWeight, FourBitWeight, QuantizedWeight, fuse


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


@dataclass(frozen=True)
class PlainReader:
    """A projection that is not quantised, fused with some that are."""

    names: tuple[str, ...] = ("weight",)

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        weight = tensors["weight"]
        refuse_quantized(weight)
        expect(tensors, "weight", rows, columns)
        return DenseWeight(weight.to(dtype))


def scheme_name(reader: TensorReader, weight: QuantizedWeight) -> str:
    """Of a projection as it was read. `expanded`: to the model's dtype, as no kernel reads the format."""
    if isinstance(reader, PlainReader):
        return "none"
    if isinstance(weight, EightBitWeight):
        return "int8" if weight.values.dtype == torch.int8 else "fp8"
    return "int4" if isinstance(weight, FourBitWeight) else "expanded"


class QuantizedLinear(LinearMethod):
    """A projection is converted when the last of its tensors arrives, and what was read is let go: no more
    than one layer exists twice."""

    def __init__(self, spec: LinearSpec, *readers: TensorReader) -> None:
        """One reader for all projections, or one each."""
        super().__init__(spec)
        self.readers = readers if len(readers) > 1 else readers * len(spec.partitions)
        self.bias = empty_parameter(spec.device, spec.dtype, sum(spec.partitions)) if spec.bias else None
        self._read: list[dict[str, Tensor]] = [{} for _ in spec.partitions]
        self._converted: dict[int, QuantizedWeight] = {}  # by projection, until all are there
        self._weight: QuantizedWeight | None = None
        self.schemes: set[str] = set()  # of the projections loaded

    @property
    def weight(self) -> QuantizedWeight:
        if self._weight is None:
            raise RuntimeError(f"{self.spec.path} is used before it is loaded")
        return self._weight

    def checkpoint_tensors(self, partition: int) -> tuple[str, ...]:
        names = self.readers[partition].names
        return (*names, "bias") if self.spec.bias else names

    def load(self, name: str, partition: int, tensor: Tensor) -> None:
        if name == "bias":
            copy_partition(self.get_parameter(name), self.spec, partition, tensor)
            return
        spec, reader, tensors = self.spec, self.readers[partition], self._read[partition]
        tensors[name] = tensor
        if len(tensors) < len(reader.names):
            return
        here = {name: tensor.to(spec.device) for name, tensor in tensors.items()}
        weight = reader.read(here, spec.partitions[partition], spec.in_features, spec.dtype)
        tensors.clear()
        self.schemes.add(scheme_name(reader, weight))
        self._converted[partition] = for_device(weight, spec.device, spec.dtype)
        if len(self._converted) == len(spec.partitions):
            self._keep(fuse([self._converted[index] for index in range(len(spec.partitions))]))
            self._converted.clear()

    def fill_randomly(self, generator: torch.Generator) -> None:
        spec = self.spec
        rows, columns = sum(spec.partitions), spec.in_features
        noise = torch.empty(rows, columns, device=spec.device, dtype=spec.dtype)
        noise.normal_(0, DUMMY_STD, generator=generator)
        weight = self.readers[0].read({"weight": noise}, rows, columns, spec.dtype)
        self.schemes.add(scheme_name(self.readers[0], weight))
        self._keep(for_device(weight, spec.device, spec.dtype))
        if self.bias is not None:
            self.bias.zero_()

    def _keep(self, weight: QuantizedWeight) -> None:
        self._weight = weight
        for name, tensor in weight.tensors.items():
            self.register_buffer(f"quantized_{name}", tensor)

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.weight.input_dtype

    def forward(self, x: Activations, mode: KernelMode) -> Tensor:
        return self.weight.product(x, Epilogue(self.bias), mode).out

    def apply_silu_mul(
        self, x: Activations, mode: KernelMode, quantized: torch.dtype | None = None
    ) -> Activations:
        rows = len(x.values if isinstance(x, QuantizedRows) else x)
        if self.bias is not None or (rows > MOST_ROWS and quantized is not None):
            return super().apply_silu_mul(x, mode, quantized)
        return self.weight.product(x, Epilogue(gated=True), mode).out  # `down` quantises it

    def apply_add_norm(
        self, x: Activations, residual: Tensor, norm: Norm, mode: KernelMode
    ) -> tuple[Activations, Tensor]:
        out, scale, total = self.weight.product(x, Epilogue(self.bias, False, residual, norm), mode)
        return out if scale is None else QuantizedRows(out, scale), total

    def apply_partials(self, x: Activations, mode: KernelMode) -> Tensor | SplitKPartials:
        return self.weight.partials(x, self.bias, mode)


def for_device(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> QuantizedWeight:
    """The weight as the device multiplies by it best. Raises a CheckpointError where it cannot."""
    if isinstance(weight, DenseWeight):
        return weight
    if device.type == "cpu" and isinstance(weight, EightBitWeight) and takes(weight):
        return OneDNNWeight.pack(weight)
    if device.type != "cuda" or (isinstance(weight, EightBitWeight) and weight.activation == "none"):
        return DenseWeight.of(weight, dtype)
    check_capability(weight, torch.cuda.get_device_capability(device))
    return weight


def check_capability(weight: QuantizedWeight, capability: tuple[int, int]) -> None:
    """Whether a GPU of this compute capability has the kernels."""
    kind, needed = "4-bit", (8, 0)
    if isinstance(weight, EightBitWeight):
        kind, needed = ("INT8", (8, 0)) if weight.values.dtype == torch.int8 else ("FP8", (8, 9))
    if capability < needed:
        has, needs = (".".join(map(str, version)) for version in (capability, needed))
        raise CheckpointError(
            f"{kind} weights need a GPU of compute capability {needs}, this one has {has}; use the 16-bit "
            "checkpoint or a newer GPU"
        )


def scheme_of(
    projections: Callable[[str], Sequence[Projection]],
    reader: Callable[[LinearSpec, Projection], TensorReader | None],
) -> LinearScheme:
    """A layer is quantised if the format has a reader for any of its projections."""

    def choose(spec: LinearSpec) -> LinearMethod:
        readers = [reader(spec, projection) for projection in projections(spec.path)]
        if all(one is None for one in readers):
            return UnquantizedLinear(spec)
        return QuantizedLinear(spec, *(one or PlainReader() for one in readers))

    return choose


def expect(
    tensors: Mapping[str, Tensor],
    name: str,
    *shape: int,
    dtype: torch.dtype | None = None,
    source: str = "config.json",
) -> Tensor:
    """The tensor, which must have this shape and dtype; `source` says so."""
    tensor = tensors[name]
    if tensor.shape != shape:
        raise TensorError(
            name,
            f"is {list(tensor.shape)}, but {source} makes it {list(shape)}; correct config.json or download "
            "the checkpoint again",
        )
    if dtype is not None and tensor.dtype != dtype:
        found, wanted = (str(one).removeprefix("torch.") for one in (tensor.dtype, dtype))
        raise TensorError(name, f"is {found}, but the format has {wanted}; correct 'quantization_config'")
    return tensor


def finite(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The scales, in their dtype; all must be numbers."""
    scale = tensors[name]
    if not scale.is_floating_point():
        raise TensorError(name, f"is {str(scale.dtype).removeprefix('torch.')}, but scales are floats")
    if not scale.float().isfinite().all():
        raise TensorError(name, "has scales that are not finite; download it again or quantise it anew")
    return scale
