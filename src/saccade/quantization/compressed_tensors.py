"""compressed-tensors: FP8 and INT8 with 8-bit activations, and packed integers of 4 or 8 bits without.

A projection is quantised if the checkpoint has scales for it, whatever the `ignore` list says; the config
group that names it says what its tensors mean.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.models.linear import LinearScheme, LinearSpec, TensorError
from saccade.models.registry import Projection
from saccade.quantization.hf_fp8 import blocked_weight, expect_blocks, read_block
from saccade.quantization.linear import TensorReader, expect, finite, scheme_of
from saccade.quantization.packed import Groups, group_index, grouped_weight, unpack
from saccade.quantization.weights import Activation, EightBitWeight, QuantizedWeight

log = logging.getLogger(__name__)

DTYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}
ACTIVATION_GROUP = 128
REMEDY = "use a checkpoint quantised by FP8, W8A8 or W4A16, or the unquantised one"


class ConfigGroup(NamedTuple):
    """One entry of `config_groups`."""

    targets: tuple[str, ...]
    bits: int
    kind: Literal["float", "int"]
    strategy: str  # tensor, channel, group or block
    size: int  # columns of a group; -1: all
    block: tuple[int, int] | None
    symmetric: bool
    activation: Activation


def build_scheme(
    config: Mapping[str, Any], projections: Callable[[str], Sequence[Projection]]
) -> LinearScheme:
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense" or config.get("transform_config"):
        raise CheckpointError(f"config.json: sparse or rotated weights are not supported; {REMEDY}")
    if config.get("kv_cache_scheme"):
        log.warning(
            "config.json asks for an 8-bit KV cache ('kv_cache_scheme'): its scales are not used, and K "
            "and V keep the model's dtype unless --kv-cache-dtype fp8 or int8 is given"
        )
    named = config.get("config_groups") or {}
    if not isinstance(named, dict) or not all(isinstance(group, dict) for group in named.values()):
        raise CheckpointError(f"config.json: 'config_groups' is {named!r}, not groups by name; correct it")
    groups = [_read_group(name, group) for name, group in named.items()]

    def reader(spec: LinearSpec, projection: Projection) -> TensorReader | None:
        present = projection.tensors
        if not present & {"weight_packed", "weight_scale"}:
            return None
        group = _find_group(groups, projection.name)
        if group.bits == 4 or "weight_packed" in present:
            names = ["weight_packed", "weight_scale"]
            names += [] if group.symmetric else ["weight_zero_point"]
            names += [name for name in ("weight_shape", "weight_g_idx") if name in present]
            return PackedReader(group, tuple(names))
        return EightBitReader(group, ("weight", "weight_scale", *_static(group)))

    return scheme_of(projections, reader)


def _static(group: ConfigGroup) -> tuple[str, ...]:
    return ("input_scale",) if group.activation == "static" else ()


def _find_group(groups: Sequence[ConfigGroup], name: str) -> ConfigGroup:
    """The group that names the projection, else the one of all linear layers."""
    for matches in (_names, _any_linear):
        for group in groups:
            if any(matches(target, name) for target in group.targets):
                return group
    if len(groups) == 1:  # the checkpoint's names have another prefix than the targets
        return groups[0]
    raise CheckpointError(
        f"the checkpoint has scales for {name}, but no config group of 'quantization_config' targets it; "
        "correct 'config_groups' of config.json"
    )


def _names(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


def _any_linear(target: str, name: str) -> bool:
    return target == "Linear"


def _read_group(name: str, raw: Mapping[str, Any]) -> ConfigGroup:
    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"config.json: the config group {name!r} has {what}: not supported; {REMEDY}")

    weights: Mapping[str, Any] = raw.get("weights") or {}
    bits: int = weights.get("num_bits") or 0
    kind: Literal["float", "int"] = weights.get("type") or "int"
    symmetric, size = weights.get("symmetric", True), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if (kind, bits) not in (("float", 8), ("int", 8), ("int", 4)):
        raise refuse(f"weights of {bits!r} bits of the type {kind!r}")
    if strategy not in ("tensor", "channel", "group", "block") or raw.get("output_activations"):
        raise refuse(f"weights scaled by {strategy!r} or quantised outputs")
    if strategy == "group" and (type(size) is not int or size < 1):
        raise refuse(f"a 'group_size' of {size!r}")
    structure = weights.get("block_structure")
    if isinstance(structure, str):
        structure = [int(n) for n in structure.split("x") if n.isdigit()]
    block = read_block(structure, "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise refuse("blocks without a 'block_structure'")
    activation = _read_activation(raw.get("input_activations"), kind)
    if activation is None or (activation != "none" and bits == 4):
        raise refuse(f"input activations of {raw['input_activations']}")
    columns = size if strategy == "group" and size else -1
    targets = tuple(raw.get("targets") or ())
    return ConfigGroup(targets, bits, kind, strategy, columns, block, bool(symmetric), activation)


def _read_activation(inputs: Mapping[str, Any] | None, kind: str) -> Activation | None:
    """None: not supported."""
    if not inputs:
        return "none"
    if (inputs.get("num_bits"), inputs.get("type"), inputs.get("symmetric", True)) != (8, kind, True):
        return None
    strategy = inputs.get("strategy") or "tensor"
    if inputs.get("dynamic") is True:
        if strategy == "group" and inputs.get("group_size") == ACTIVATION_GROUP:
            return "group"
        return "token" if strategy == "token" else None
    return "static" if strategy == "tensor" and not inputs.get("dynamic") else None


@dataclass(frozen=True)
class EightBitReader:
    """float-quantized and int-quantized."""

    group: ConfigGroup
    names: tuple[str, ...]

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        group = self.group
        values = expect(tensors, "weight", rows, columns, dtype=DTYPES[group.kind])
        scale = finite(tensors, "weight_scale").float()
        if group.block is not None:
            expect_blocks(tensors, "weight_scale", rows, columns, group.block)
            return blocked_weight(values, scale, group.block, group.activation, dtype)
        if group.strategy == "tensor" and scale.numel() == 1:
            scale = scale.flatten().repeat(rows)
        elif scale.shape != (rows,):
            source = f"the strategy {group.strategy!r} of config.json"
            scale = expect({"weight_scale": scale}, "weight_scale", rows, 1, source=source).flatten()
        given = None
        if group.activation == "static":
            given = finite(tensors, "input_scale").float().flatten()
            if given.numel() != 1:
                raise TensorError(
                    "input_scale", f"has {given.numel()} values, but one scales the whole input"
                )
        return EightBitWeight(values, scale, group.activation, dtype, given)


@dataclass(frozen=True)
class PackedReader:
    """pack-quantized: integers stored plus half their range, zeros packed along N."""

    group: ConfigGroup
    names: tuple[str, ...]

    def read(
        self, tensors: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        bits, size = self.group.bits, columns if self.group.size == -1 else self.group.size
        groups, source = -(-columns // size), f"'group_size' {self.group.size} of config.json"
        packed = expect(
            tensors, "weight_packed", rows, -(-columns * bits // 32), dtype=torch.int32,
            source=f"'num_bits' {bits} of config.json",
        )  # fmt: skip
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [rows, columns]:
            raise TensorError(
                "weight_shape",
                f"says {tensors['weight_shape'].tolist()}, but config.json makes it {[rows, columns]}",
            )
        scale = finite(tensors, "weight_scale")
        if self.group.strategy == "tensor" and scale.numel() == 1:
            scale = scale.flatten()[:, None].repeat(rows, 1)
        expect({"weight_scale": scale}, "weight_scale", rows, groups, source=source)
        zero = None
        if not self.group.symmetric:
            words = expect(
                tensors, "weight_zero_point", -(-rows * bits // 32), groups, dtype=torch.int32, source=source
            )
            zero = unpack(words, bits, 0)[:rows].t()
        index = group_index(tensors, "weight_g_idx", columns, size, groups)
        q = unpack(packed, bits, 1)[:, :columns]
        return grouped_weight(q, Groups(scale.t(), zero, size, index), bits, dtype)
