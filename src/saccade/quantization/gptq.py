"""GPTQ, of version 1 (zeros stored minus one) and 2, and what auto-round writes in its layout.

W = (q - z) s, packed along K. With `desc_act` the columns of a group lie anywhere: `g_idx` names the group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.models.linear import LinearScheme, LinearSpec, TensorError
from saccade.models.registry import Projection
from saccade.quantization import awq
from saccade.quantization.linear import TensorReader, expect, finite, scheme_of
from saccade.quantization.packed import Groups, group_index, grouped_weight, unpack
from saccade.quantization.weights import QuantizedWeight

BITS = (4, 8)


def build_scheme(
    config: Mapping[str, Any], projections: Callable[[str], Sequence[Projection]]
) -> LinearScheme:
    if "awq" in str(config.get("packing_format", "")):  # auto-round
        return awq.build_scheme(config, projections)
    bits, layout = config.get("bits", 4), config.get("checkpoint_format") or "gptq"
    if bits not in BITS or layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"config.json: GPTQ with {bits!r} bits in the layout {layout!r} is not supported, only with 4 "
            "or 8 bits in the layouts 'gptq' and 'gptq_v2'; use one of those, or compressed-tensors"
        )
    group = awq.read_group_size(config.get("group_size", 128))
    mixed = bool(config.get("dynamic") or config.get("extra_config"))  # settings of single layers
    ordered = bool(config.get("desc_act", False))

    def reader(spec: LinearSpec, projection: Projection) -> TensorReader | None:
        if not projection.tensors & {"qweight", "scales", "qzeros"}:
            return None
        index = ["g_idx"] if ordered or "g_idx" in projection.tensors else []
        names = ("qweight", "qzeros", "scales", *index)
        return GptqReader(None if mixed else (bits, group), 0 if layout == "gptq_v2" else 1, names)

    return scheme_of(projections, reader)


@dataclass(frozen=True)
class GptqReader:
    setting: tuple[int, int] | None  # bits and columns of a group, -1: all; None: as the tensors say
    missing: int  # what is added to the stored zeros
    names: tuple[str, ...]

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        bits, group = self.setting or _setting(tensors, columns)
        size = columns if group == -1 else group
        groups, source = -(-columns // size), f"'group_size' {group} of config.json"
        words, width = -(-columns * bits // 32), f"'bits' {bits} of config.json"
        packed = expect(tensors, "qweight", words, rows, dtype=torch.int32, source=width)
        expect(tensors, "scales", groups, rows, source=source)
        zeros = expect(tensors, "qzeros", groups, -(-rows * bits // 32), dtype=torch.int32, source=source)
        zero = (unpack(zeros, bits, 1)[:, :rows] + self.missing) & (1 << bits) - 1
        middle = bool((zero == 1 << bits - 1).all())
        index = group_index(tensors, "g_idx", columns, size, groups)
        q = unpack(packed, bits, 0)[:columns].t()
        return grouped_weight(
            q, Groups(finite(tensors, "scales"), None if middle else zero, size, index), bits, dtype
        )


def _setting(tensors: Mapping[str, Tensor], columns: int) -> tuple[int, int]:
    words, groups = tensors["qweight"].shape[0], max(1, tensors["scales"].shape[0])
    bits = words * 32 // columns
    if bits not in BITS:
        raise TensorError("qweight", f"has {bits} bits for each weight; only 4 and 8 are supported")
    return bits, -(-columns // groups)
