"""AWQ in the layout `gemm`: W = (q - z) s, packed along N with the columns of a word interleaved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.models.linear import LinearScheme, LinearSpec
from saccade.models.registry import Projection
from saccade.quantization.linear import TensorReader, expect, finite, scheme_of
from saccade.quantization.packed import Groups, grouped_weight, unpack
from saccade.quantization.weights import QuantizedWeight

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's columns among its nibbles


def build_scheme(
    config: Mapping[str, Any], projections: Callable[[str], Sequence[Projection]]
) -> LinearScheme:
    bits, version = config.get("bits", config.get("w_bit", BITS)), str(config.get("version", "gemm")).lower()
    if bits != BITS or version != "gemm":
        raise CheckpointError(
            f"config.json: AWQ with {bits!r} bits in the layout {version!r} is not supported, only with "
            f"{BITS} bits in the layout 'gemm'; use such a checkpoint, or a compressed-tensors one"
        )
    group = read_group_size(config.get("group_size", config.get("q_group_size", 128)))
    zero = bool(config.get("zero_point", True))

    def reader(spec: LinearSpec, projection: Projection) -> TensorReader | None:
        quantized = projection.tensors & {"qweight", "scales", "qzeros"}
        if not quantized:
            return None
        return AwqReader(group, ("qweight", "scales", *(["qzeros"] if zero or "qzeros" in quantized else [])))

    return scheme_of(projections, reader)


def read_group_size(value: object) -> int:
    if type(value) is not int or (value < 1 and value != -1):
        raise CheckpointError(
            f"config.json: 'group_size' is {value!r}, neither a number of columns nor -1 (all)"
        )
    return value


@dataclass(frozen=True)
class AwqReader:
    group: int  # columns; -1: all
    names: tuple[str, ...]

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        size = columns if self.group == -1 else self.group
        groups, words, source = (
            -(-columns // size),
            -(-rows // 8),
            f"'group_size' {self.group} of config.json",
        )
        packed = expect(tensors, "qweight", columns, words, dtype=torch.int32)
        expect(tensors, "scales", groups, rows, source=source)
        zero = None
        if "qzeros" in tensors:
            zero = _columns(expect(tensors, "qzeros", groups, words, dtype=torch.int32, source=source), rows)
        q = _columns(packed, rows).t()
        return grouped_weight(q, Groups(finite(tensors, "scales"), zero, size, None), BITS, dtype)


def _columns(words: Tensor, count: int) -> Tensor:
    """int32 [., words] to [., count] values from 0 to 15."""
    nibbles = unpack(words, BITS, 1).view(len(words), -1, 8)
    return nibbles[:, :, list(PLACES)].flatten(1)[:, :count]
