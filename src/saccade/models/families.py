"""The model families by architecture, as data: no torch, so that every process and command may read it."""

from dataclasses import dataclass
from typing import Literal

Input = Literal["text", "images", "videos"]


@dataclass(frozen=True)
class FamilyEntry:
    """A family as `saccade models` and the README list it."""

    name: str  # as its authors call it
    module: str  # it offers what `Family` says
    inputs: tuple[Input, ...] = ("text",)
    lod: bool = False  # level of detail: `detail` and `visual_tokens` of a request, zoomed views
    quantized: bool = True  # whether the schemes of `registry.SCHEMES` are read for all linear layers


ALL_INPUTS: tuple[Input, ...] = ("text", "images", "videos")
FAMILIES = {  # by the first of `architectures` in config.json
    "Qwen3VLForConditionalGeneration": FamilyEntry(
        "Qwen3-VL", "saccade.models.qwen3_vl", ALL_INPUTS, lod=True
    ),
    "Qwen3VLMoeForConditionalGeneration": FamilyEntry(
        "Qwen3-VL-MoE", "saccade.models.qwen3_vl_moe", ALL_INPUTS, lod=True, quantized=False
    ),
    "Qwen2_5_VLForConditionalGeneration": FamilyEntry(
        "Qwen2.5-VL", "saccade.models.qwen2_5_vl", ALL_INPUTS, lod=True
    ),
    "Qwen2VLForConditionalGeneration": FamilyEntry(
        "Qwen2-VL", "saccade.models.qwen2_vl", ALL_INPUTS, lod=True
    ),
    "LlavaForConditionalGeneration": FamilyEntry("LLaVA-1.5", "saccade.models.llava", ("text", "images")),
    "Idefics3ForConditionalGeneration": FamilyEntry(
        "Idefics3", "saccade.models.idefics3", ("text", "images")
    ),
    "SmolVLMForConditionalGeneration": FamilyEntry("SmolVLM", "saccade.models.idefics3", ("text", "images")),
    "Qwen3ForCausalLM": FamilyEntry("Qwen3", "saccade.models.qwen3"),
    "Qwen3MoeForCausalLM": FamilyEntry("Qwen3-MoE", "saccade.models.qwen3_moe", quantized=False),
    "Qwen2ForCausalLM": FamilyEntry("Qwen2, Qwen2.5", "saccade.models.qwen2"),
    "MistralForCausalLM": FamilyEntry("Mistral", "saccade.models.mistral"),
    "LlamaForCausalLM": FamilyEntry("Llama 2 to 3.3", "saccade.models.llama"),
    "Gemma3ForCausalLM": FamilyEntry("Gemma 3 (text)", "saccade.models.gemma3"),
}
