"""From an architecture's name to the module that builds it. A new family is one line here and one file."""

from importlib import import_module
from typing import Protocol, cast

from saccade.errors import CheckpointError
from saccade.models.config import Config
from saccade.models.layers import LanguageModel, Place
from saccade.models.loader import WeightMap

FAMILIES = {
    "Qwen3VLForConditionalGeneration": "saccade.models.qwen3_vl",
    "Qwen3ForCausalLM": "saccade.models.qwen3",
    "LlamaForCausalLM": "saccade.models.llama",
}


class Family(Protocol):
    """What a family's module offers."""

    WEIGHTS: WeightMap

    def build(self, config: Config, place: Place) -> LanguageModel: ...


def find_family(architecture: str) -> Family:
    module = FAMILIES.get(architecture)
    if module is None:
        raise CheckpointError(
            f"the architecture {architecture!r} is not known; known are {', '.join(sorted(FAMILIES))}"
        )
    return cast(Family, import_module(module))
