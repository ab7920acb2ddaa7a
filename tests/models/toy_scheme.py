"""A quantisation scheme in one file: weights as float16 with one scale per output feature."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.dispatch import KernelMode
from saccade.models.linear import (
    Activations,
    LinearMethod,
    LinearScheme,
    LinearSpec,
    UnquantizedLinear,
    copy_partition,
    empty_parameter,
    plain,
)
from saccade.models.registry import Projection


class ToyLinear(LinearMethod):
    """y = x (q * s)^T + b; the scales of two neighbouring output features are packed into one line."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        out = sum(spec.partitions)
        self.q = empty_parameter(spec.device, torch.float16, spec.in_features, out)
        self.scale = empty_parameter(spec.device, torch.float32, out // 2, 2)
        self.bias = empty_parameter(spec.device, spec.dtype, out) if spec.bias else None
        self.repacked: Tensor | None = None

    def checkpoint_tensors(self, partition: int) -> tuple[str, ...]:
        return ("q", "scale", "bias") if self.spec.bias else ("q", "scale")

    def load(self, name: str, partition: int, tensor: Tensor) -> None:
        dim, features = {"q": (1, 1), "scale": (0, 2), "bias": (0, 1)}[name]
        parameter = self.get_parameter(name)
        copy_partition(parameter, self.spec, partition, tensor, dim=dim, features=features)

    def finish_loading(self) -> None:
        self.repacked = self.q.t().to(self.spec.dtype) * self.scale.view(-1, 1).to(self.spec.dtype)

    def forward(self, x: Activations, mode: KernelMode) -> Tensor:
        if self.repacked is None:
            raise RuntimeError("the layer is used before it is loaded")
        return torch.nn.functional.linear(plain(x), self.repacked, self.bias)


def build_scheme(
    config: Mapping[str, Any], projections: Callable[[str], Sequence[Projection]]
) -> LinearScheme:
    def choose(spec: LinearSpec) -> LinearMethod:
        quantized = "scale" in projections(spec.path)[0].tensors
        return ToyLinear(spec) if quantized else UnquantizedLinear(spec)

    return choose
