"""Quantises a model block by block: a block's inputs are recorded, its weights rounded and put back, so that
the blocks after it are calibrated on what they will get."""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.interface import LanguageModel
from saccade.quantization.stages import stage_of
from saccade.quantization.weights import BLOCK
from saccade.tools.quantize.calibration import Calibration
from saccade.tools.quantize.folding import ScaleSource, norm_source, scale_source
from saccade.tools.quantize.linear import CalibratedLinear, InputStatistics
from saccade.tools.quantize.methods import (
    ErrorCompensation,
    awq_scale,
    clipped_scales,
    output_error,
    round_to_nearest,
    smooth_scale,
)
from saccade.tools.quantize.options import Method, QuantizeOptions
from saccade.tools.quantize.schemes import Scheme

_BLOCK = re.compile(r"(.*?\.\d+)\.(.+)")
CONVOLUTIONS = ("vision.patch_embedding",)  # linear layers of ours that are none in a checkpoint


class Block(NamedTuple):
    """Layers that are quantised together."""

    path: str  # of the module, e.g. layers.3
    stage: str
    layer: int | None  # of the stage, that runs it; None: what follows the layers
    layers: dict[str, CalibratedLinear]  # by their path in the block


class QuantizedProjection(NamedTuple):
    """One projection of a fused layer, in the checkpoint's format."""

    path: str  # of the layer
    partition: int
    scheme: Scheme
    tensors: dict[str, Tensor]


class LayerError(NamedTuple):
    """Of a layer's output on the calibration data, relative to the output: mean squares."""

    path: str
    error: float
    nearest: float  # of rounding to nearest


def find_blocks(model: LanguageModel) -> list[Block]:
    """In the order in which data passes them."""
    blocks: dict[str, Block] = {}
    for path, module in model.named_modules():
        tied = isinstance(module, CalibratedLinear) and module.spec.tied is not None
        if isinstance(module, CalibratedLinear) and path not in CONVOLUTIONS and not tied:
            found = _BLOCK.match(path)
            parent, _, last = path.rpartition(".")
            name, inner = (found[1], found[2]) if found else (parent or path, last)
            if name not in blocks:
                blocks[name] = Block(name, stage_of(path), _layer_of(model, name), {})
            blocks[name].layers[inner] = module
    order = {"vision": 0, "decoder": 1, "head": 2}
    return sorted(
        blocks.values(),
        key=lambda block: (order[block.stage], math.inf if block.layer is None else block.layer),
    )


def _layer_of(model: LanguageModel, block: str) -> int | None:
    """A DeepStack merger runs with the layer it branches off from."""
    *_, kind, number = ("", *block.split("."))
    if not number.isdecimal():
        return None
    if kind == "deep_mergers" and model.vision is not None:
        return model.vision.deep[int(number)]
    return int(number)


class Quantizer:
    def __init__(
        self,
        model: LanguageModel,
        options: QuantizeOptions,
        stored: torch.dtype,
        calibrate: Callable[[], Calibration],
    ) -> None:
        """`stored` is the dtype of the checkpoint's norms and scales. `calibrate` is called if a method needs
        it."""
        self._model, self._options, self._stored = model, options, stored
        self.blocks = [block for block in find_blocks(model) if block.stage in options.stages]
        self.schemes = {name: Scheme(name, options.group_size) for name in set(options.stages.values())}
        self.errors: list[LayerError] = []
        self._check()
        methods = {options.method_of(self.scheme_of(block).name) for block in self.blocks}
        self._calibration = calibrate() if methods - {"rtn"} else None

    def scheme_of(self, block: Block) -> Scheme:
        return self.schemes[self._options.stages[block.stage]]

    def _check(self) -> None:
        missing = set(self._options.stages) - {block.stage for block in self.blocks}
        if missing and "=" in self._options.scheme:
            raise ConfigError(
                f"--scheme {self._options.scheme}: the checkpoint has no linear layers in the stage"
                f" {', '.join(sorted(missing))} (a head tied to the embedding is none); leave it out"
            )
        for block in self.blocks:
            scheme = self.scheme_of(block)
            for inner, linear in block.layers.items():
                columns = linear.spec.in_features
                width = {"int4": scheme.group, "fp8-block": BLOCK}.get(scheme.name, 1)
                if columns % width:
                    remedy = "another --group-size" if scheme.name == "int4" else "fp8"
                    raise ConfigError(
                        f"{block.path}.{inner} has {columns} columns, which groups of {width} do not divide;"
                        f" use {remedy}, or leave out the stage {block.stage}"
                    )

    @torch.inference_mode()
    def run(self) -> Iterator[list[QuantizedProjection]]:
        """The projections of one block after the other."""
        for block in self.blocks:
            scheme = self.scheme_of(block)
            method = self._options.method_of(scheme.name)
            inputs = {} if method == "rtn" else self._record(block, with_gram=method != "smoothquant")
            grams = self._scale_inputs(block, scheme, method, inputs)
            yield [
                projection
                for inner, linear in block.layers.items()
                for projection in self._round(linear, scheme, method, grams.get(inner))
            ]

    def _record(self, block: Block, *, with_gram: bool) -> dict[str, InputStatistics]:
        if self._calibration is None:
            raise RuntimeError("the method needs calibration prompts")
        for linear in block.layers.values():
            spec = linear.spec
            linear.statistics = InputStatistics(spec.in_features, spec.device, with_gram=with_gram)
        if block.stage == "vision":
            self._calibration.encode(block.layer)
        else:
            for _, hidden in self._calibration.decode(None if block.layer is None else block.layer + 1):
                if block.stage == "head":
                    self._model.raw_logits(hidden)
        recorded = {}
        for inner, linear in block.layers.items():
            if linear.statistics is not None and linear.statistics.rows:
                recorded[inner] = linear.statistics
            linear.statistics = None
        return recorded

    def _scale_inputs(
        self, block: Block, scheme: Scheme, method: Method, inputs: dict[str, InputStatistics]
    ) -> dict[str, Tensor]:
        """Fold input scales into what is in front of each layer; gives the Gram matrices of the inputs after
        that."""
        module = self._model.get_submodule(block.path)
        grams: dict[str, Tensor] = {}
        for inner, linear in reversed(block.layers.items()):  # what is folded into a layer, before its own
            one = inputs.get(inner)
            if one is None:
                continue
            scale: Tensor | None = None
            if method == "smoothquant":
                if (source := norm_source(module, inner, self._stored)) is not None:
                    self._multiply(linear, source, smooth_scale(linear.weight.float(), one))
                continue
            if method == "awq" and (source := scale_source(module, inner, self._stored)) is not None:
                mean, weight = source.share(one.mean), linear.weight.float()
                scale = source.share(awq_scale(weight, mean, one.gram, scheme, self._stored))
                scale = self._multiply(linear, source, scale)
            grams[inner] = one.gram if scale is None else one.gram / (scale[:, None] * scale)
        return grams

    def _multiply(self, linear: CalibratedLinear, source: ScaleSource, scale: Tensor) -> Tensor:
        exact = source.divide(scale)
        linear.weight.copy_(linear.weight.float() * exact)
        return exact

    def _round(
        self, linear: CalibratedLinear, scheme: Scheme, method: Method, gram: Tensor | None
    ) -> Iterator[QuantizedProjection]:
        """Round the weights of a layer, each projection on its own, and put what they mean in their place."""
        path = linear.spec.path
        compensation = ErrorCompensation(gram) if gram is not None and method == "gptq" else None
        errors = [0.0, 0.0, 0.0]
        for partition in range(len(linear.spec.partitions)):
            rows = linear.rows(partition)
            weight = linear.weight[rows].float()
            scale = scheme.scales(weight, self._stored)
            if gram is not None and scheme.name == "int4":
                scale = clipped_scales(weight, gram, scheme, self._stored)
            wide = scheme.expand(scale, weight.shape)
            values = scheme.round(weight, wide)
            if compensation is not None:
                values = compensation.round(weight, wide, scheme)
            rounded = values * wide
            if gram is not None:
                nearest = round_to_nearest(weight, scheme, self._stored)
                for index, error in enumerate((rounded - weight, nearest - weight, weight)):
                    errors[index] += output_error(error, gram)
            linear.weight[rows] = rounded.to(linear.weight.dtype)
            tensors = scheme.tensors(values, scale, self._stored)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            yield QuantizedProjection(path, partition, scheme, tensors)
        if gram is not None and errors[2] > 0:
            self.errors.append(LayerError(path, errors[0] / errors[2], errors[1] / errors[2]))
