"""Which module builds an architecture, and which one reads a quantisation scheme.

A new model or scheme is one line here and one file.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from saccade.errors import CheckpointError
from saccade.models.config import Config
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.linear import LinearScheme

FAMILIES = {
    "Qwen3VLForConditionalGeneration": "saccade.models.qwen3_vl",
    "Qwen3ForCausalLM": "saccade.models.qwen3",
    "LlamaForCausalLM": "saccade.models.llama",
    "LlavaForConditionalGeneration": "saccade.models.llava",
    "Idefics3ForConditionalGeneration": "saccade.models.idefics3",
    "SmolVLMForConditionalGeneration": "saccade.models.idefics3",
}
SCHEMES = {  # by `quant_method` of `quantization_config`
    "fp8": "saccade.quantization.hf_fp8",
    "compressed-tensors": "saccade.quantization.compressed_tensors",
    "awq": "saccade.quantization.awq",
    "gptq": "saccade.quantization.gptq",
    "auto-round": "saccade.quantization.gptq",
    "auto_round": "saccade.quantization.gptq",
    "intel/auto-round": "saccade.quantization.gptq",
}

_NUMBER = r"(?<=\.)\d+(?=\.|$)"


@dataclass(frozen=True)
class WeightMap:
    """Where our modules' tensors are in a checkpoint, as data.

    `modules` maps one of our modules to the checkpoint's modules it is made of, in order: several where
    projections are fused. `*` stands for a layer's number, `{root}` for any of the spellings of that root.
    """

    modules: Mapping[str, tuple[str, ...]]
    roots: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()  # endings of tensors that a model does not need

    def names(self, module: str) -> list[tuple[str, ...]]:
        """For each partition of one of our modules, the names it may have in a checkpoint."""
        numbers = re.findall(_NUMBER, module)
        parts = self.modules.get(re.sub(_NUMBER, "*", module))
        if parts is None:
            raise ValueError(f"the weight map does not say where {module!r} is in a checkpoint")
        return [tuple(self._spellings(part, numbers)) for part in parts]

    def _spellings(self, part: str, numbers: Sequence[str]) -> Iterator[str]:
        for number in numbers:
            part = part.replace("*", number, 1)
        found = re.match(r"\{(\w+)\}", part)
        if found is None:
            yield part
            return
        for root in self.roots[found[1]]:
            yield root + part[found.end() :]


class Family(Protocol):
    """What a family's module offers."""

    WEIGHTS: WeightMap

    def build(self, config: Config, builder: ModelBuilder) -> LanguageModel: ...


class Projection(NamedTuple):
    """One of the projections fused into a linear layer, as a checkpoint has it."""

    name: str  # e.g. model.layers.0.self_attn.q_proj
    tensors: frozenset[str]  # their last names, e.g. weight and weight_scale


class Quantization(Protocol):
    """What a quantisation scheme's module offers."""

    def build_scheme(
        self, config: Mapping[str, Any], projections: Callable[[str], Sequence[Projection]]
    ) -> LinearScheme:
        """`config` is `quantization_config`; `projections(path)` are what the checkpoint has for a linear
        layer: their tensors tell whether they are quantised."""
        ...


def find_family(architecture: str) -> Family:
    module = FAMILIES.get(architecture)
    if module is None:
        raise CheckpointError(
            f"the architecture {architecture!r} is not known; known are {', '.join(sorted(FAMILIES))}"
        )
    return cast(Family, import_module(module))


def find_quantization(method: str) -> Quantization:
    module = SCHEMES.get(method)
    if module is None:
        raise CheckpointError(
            f"the checkpoint is quantised by {method!r} ('quant_method' of config.json), which is not "
            f"supported; use its unquantised version or one quantised by {', '.join(sorted(SCHEMES))}"
        )
    return cast(Quantization, import_module(module))
