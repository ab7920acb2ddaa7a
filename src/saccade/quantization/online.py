"""Quantises a 16-bit checkpoint while it is loaded (`--quantization`), each stage by a scheme of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.gemm.quantize import LARGEST, to_eight_bits
from saccade.models.linear import LinearMethod, LinearScheme, LinearSpec, UnquantizedLinear
from saccade.quantization.linear import QuantizedLinear
from saccade.quantization.stages import NONE, STAGES, stage_of
from saccade.quantization.weights import EightBitWeight, FourBitWeight, QuantizedWeight

INT4_GROUP = 128


def stage_schemes(model: nn.Module) -> dict[str, str]:
    """How the linear layers of each stage are quantised: "fp8", "none", or "fp8+none" if they differ."""
    found: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for path, module in model.named_modules():
        if isinstance(module, LinearMethod):
            found[stage_of(path)] |= module.schemes if isinstance(module, QuantizedLinear) else {NONE}
    return {stage: "+".join(sorted(names)) or NONE for stage, names in found.items()}


def online_scheme(stages: Mapping[str, str]) -> LinearScheme:
    def choose(spec: LinearSpec) -> LinearMethod:
        scheme = stages[stage_of(spec.path)]
        if scheme == NONE:
            return UnquantizedLinear(spec)
        return (QuantizedLinear if spec.tied is None else QuantizedCopy)(spec, RoundToNearest(scheme))

    return choose


class QuantizedCopy(QuantizedLinear):
    """Of the parameter its spec is tied to, which stays as it is: a tied head beside the embedding."""

    def checkpoint_tensors(self, partition: int) -> tuple[str, ...]:
        return ()

    def finish_loading(self) -> None:
        if self.spec.tied is not None:
            self.load("weight", 0, self.spec.tied)

    def fill_randomly(self, generator: torch.Generator) -> None:
        self.finish_loading()


@dataclass(frozen=True)
class RoundToNearest:
    """Rounds a 16-bit weight: fp8 and int8 with a scale per row, int4 per group of 128 columns."""

    scheme: str

    @property
    def names(self) -> tuple[str, ...]:
        return ("weight",)

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        weight = tensors["weight"].to(dtype)
        return self.quantize(weight.flatten(1) if weight.dim() > 2 else weight)

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        if self.scheme == "int4":
            return quantize_int4(weight, INT4_GROUP)
        dtype = torch.int8 if self.scheme == "int8" else torch.float8_e4m3fn
        scale = (weight.abs().amax(1).float() / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)
        return EightBitWeight(
            to_eight_bits(weight.float() / scale[:, None], dtype), scale, "token", weight.dtype
        )


def quantize_int4(weight: Tensor, group: int) -> FourBitWeight:
    """Symmetric, -8 to 7 times a scale per group of columns."""
    rows, columns = weight.shape
    groups = F.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    scale = (groups.abs().amax(2, keepdim=True) / 7.5).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale.to(weight.dtype).float()
    q = (groups / scale).round().clamp(-8, 7).view(rows, -1)[:, :columns] + 8
    return FourBitWeight.pack(q, scale.squeeze(2).t().to(weight.dtype), None, group)
