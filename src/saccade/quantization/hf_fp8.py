"""Hugging Face's block-wise FP8 (`quant_method: fp8`): e4m3 weights, a scale per block of 128 x 128.

`weight_scale_inv` multiplies, despite its name. On a CPU activations stay as they are, as in transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.models.linear import LinearScheme, LinearSpec
from saccade.models.registry import Projection
from saccade.quantization.linear import TensorReader, expect, finite, scheme_of
from saccade.quantization.weights import BLOCK, Activation, DenseWeight, EightBitWeight, QuantizedWeight

FP8 = torch.float8_e4m3fn
SCALE = "weight_scale_inv"


def build_scheme(
    config: Mapping[str, Any], projections: Callable[[str], Sequence[Projection]]
) -> LinearScheme:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"config.json: FP8 weights are e4m3, not {config['fmt']!r} ('fmt')")
    block = read_block(config.get("weight_block_size"), "weight_block_size")

    def reader(spec: LinearSpec, projection: Projection) -> TensorReader | None:
        if SCALE not in projection.tensors:
            return None
        return BlockFp8Reader(block, "none" if spec.device.type == "cpu" else "group")

    return scheme_of(projections, reader)


def read_block(value: object, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block of a weight; None: all of it."""
    if value is None:
        return None
    numbers = value if isinstance(value, list | tuple) else ()
    if len(numbers) != 2 or not all(type(number) is int and number > 0 for number in numbers):
        raise CheckpointError(f"config.json: {key!r} is {value!r}, not the rows and columns of a block")
    return numbers[0], numbers[1]


@dataclass(frozen=True)
class BlockFp8Reader:
    block: tuple[int, int] | None
    activation: Activation
    names: tuple[str, ...] = ("weight", SCALE)

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        values = expect(tensors, "weight", rows, columns, dtype=FP8)
        scale = finite(tensors, SCALE)
        if self.block is None and scale.numel() == 1:
            return EightBitWeight(values, scale.float().flatten().repeat(rows), self.activation, dtype)
        expect_blocks(tensors, SCALE, rows, columns, self.block or (rows, columns))
        return blocked_weight(values, scale.float(), self.block or (rows, columns), self.activation, dtype)


def expect_blocks(
    tensors: Mapping[str, Tensor], name: str, rows: int, columns: int, block: tuple[int, int]
) -> None:
    shape = -(-rows // block[0]), -(-columns // block[1])
    expect(tensors, name, *shape, source=f"a block of {block[0]} x {block[1]} in config.json")


def blocked_weight(
    values: Tensor, scale: Tensor, block: tuple[int, int], activation: Activation, dtype: torch.dtype
) -> QuantizedWeight:
    """Blocks that no kernel reads are expanded."""
    if block == (BLOCK, BLOCK):
        return EightBitWeight(values, scale, activation, dtype)
    rows, columns = values.shape
    scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return DenseWeight((values.float() * scale).to(dtype), activation, values.dtype)
