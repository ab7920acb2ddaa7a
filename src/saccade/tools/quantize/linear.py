"""The linear layer that is quantised in place, and the statistics of its inputs."""

import torch
from torch import Tensor

from saccade.kernels.dispatch import KernelMode
from saccade.models.linear import Activations, LinearMethod, LinearSpec, UnquantizedLinear, plain


class InputStatistics:
    """Of the rows x [T, K] that a layer has multiplied."""

    def __init__(self, columns: int, device: torch.device, *, with_gram: bool) -> None:
        self.rows = 0
        self.largest = torch.zeros(columns, device=device)  # of |x|, per column
        self.total = torch.zeros(columns, device=device)  # sum of |x|, per column
        self._gram = torch.zeros(columns, columns, device=device) if with_gram else None

    @property
    def gram(self) -> Tensor:
        """[K, K]: the sum of x^T x. An error E of W makes a squared error of tr(E gram E^T) in y = x W^T."""
        if self._gram is None:
            raise RuntimeError("the statistics were taken without their Gram matrix")
        return self._gram

    @property
    def mean(self) -> Tensor:
        """Of |x|, per column."""
        return self.total / max(self.rows, 1)

    def add(self, x: Tensor) -> None:
        x = x.float()
        self.rows += len(x)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.total += x.abs().sum(0)
        if self._gram is not None:
            self._gram.addmm_(x.t(), x)


class CalibratedLinear(UnquantizedLinear):
    """Shows its inputs to `statistics` while there are some."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        self.statistics: InputStatistics | None = None

    def forward(self, x: Activations, mode: KernelMode) -> Tensor:
        if self.statistics is not None:
            self.statistics.add(plain(x))
        return super().forward(x, mode)

    # Made of `forward`, so that every input passes there.
    apply_silu_mul = LinearMethod.apply_silu_mul
    apply_add_norm = LinearMethod.apply_add_norm
    apply_partials = LinearMethod.apply_partials

    def rows(self, partition: int) -> slice:
        start = self.spec.offset(partition)
        return slice(start, start + self.spec.partitions[partition])
