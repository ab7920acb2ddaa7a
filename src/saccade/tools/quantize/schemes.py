"""The schemes that `saccade quantize` writes: how each rounds, and how compressed-tensors stores it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.gemm.quantize import FP8, LARGEST, to_eight_bits
from saccade.quantization.weights import BLOCK

INT4_LARGEST = 7.5  # scale = maximum / 7.5, as compressed-tensors has it
NIBBLES = 8  # of an int32
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class Scheme:
    """W[n, k] = values[n, k] * scale: a scale per row, per group of columns or per block of 128 x 128."""

    name: str
    group: int = 0  # columns that share a scale, of int4

    @property
    def largest(self) -> float:
        if self.name == "int4":
            return INT4_LARGEST
        return LARGEST[torch.int8 if self.name == "int8" else FP8]

    def scales(self, weight: Tensor, stored: torch.dtype) -> Tensor:
        """That take in the largest weights: [N, 1], [N, K / group] or [ceil(N / 128), ceil(K / 128)]; rounded
        to the dtype they are stored in."""
        rows, columns = weight.shape
        size = weight.abs()
        if self.name == "int4":
            largest = size.view(rows, -1, self.group).amax(2)
        elif self.name == "fp8-block":
            padded = torch.nn.functional.pad(size, (0, -columns % BLOCK, 0, -rows % BLOCK))
            blocks = (padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
            largest = padded.view(blocks).amax((1, 3))
        else:
            largest = size.amax(1, keepdim=True)
        return self.stored_scale(largest / self.largest, stored)

    def stored_scale(self, scale: Tensor, stored: torch.dtype) -> Tensor:
        return scale.clamp_min(SMALLEST_SCALE).to(stored).float()

    def expand(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """The scale of each weight, [N, K] or what broadcasts to it."""
        if self.name == "int4":
            return scale.repeat_interleave(self.group, 1)
        if self.name == "fp8-block":
            return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
        return scale

    def round(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The values, as float32; `scale` is expanded."""
        if self.name == "int4":
            return (weight / scale).round().clamp(-8, 7)
        return to_eight_bits(weight / scale, torch.int8 if self.name == "int8" else FP8).float()

    def tensors(self, values: Tensor, scale: Tensor, stored: torch.dtype) -> dict[str, Tensor]:
        """Of one projection, by the last part of their names."""
        tensors = {"weight_scale": scale.to(stored)}
        if self.name != "int4":
            return {"weight": values.to(torch.int8 if self.name == "int8" else FP8), **tensors}
        shifts = torch.arange(0, 4 * NIBBLES, 4, device=values.device)
        words = ((values.long() + 8).view(len(values), -1, NIBBLES) << shifts).sum(2)
        packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        return {"weight_packed": packed, **tensors, "weight_shape": torch.tensor(values.shape)}

    def config(self, targets: list[str]) -> dict[str, Any]:
        """The group of `config_groups`."""
        number = {"num_bits": 4 if self.name == "int4" else 8, "type": "int", "symmetric": True}
        if self.name.startswith("fp8"):
            number["type"] = "float"
        weights: dict[str, Any] = {**number, "dynamic": False, "strategy": "channel"}
        activations: dict[str, Any] | None = {**number, "dynamic": True, "strategy": "token"}
        if self.name == "int4":
            weights |= {"strategy": "group", "group_size": self.group}
            activations = None
        elif self.name == "fp8-block":
            weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
            activations = {**number, "dynamic": True, "strategy": "group", "group_size": BLOCK}
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": self.format,
        }

    @property
    def format(self) -> str:
        formats = {"int4": "pack-quantized", "int8": "int-quantized"}
        return formats.get(self.name, "float-quantized")
