"""Qwen3-VL: the Qwen3 decoder with three-axis positions, beside a vision tower with DeepStack."""

from dataclasses import replace

from saccade.errors import CheckpointError
from saccade.models.config import Config, ExpertDims, inner_config, read_decoder, read_vision
from saccade.models.decoder import NAMES, Decoder
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.registry import WeightMap
from saccade.models.vit import ACTIVATIONS, QwenVision

WEIGHTS = WeightMap(
    modules={
        **NAMES,
        "vision.patch_embedding": ("{vision}.patch_embed.proj",),
        "vision.positions": ("{vision}.pos_embed",),
        "vision.layers.*.attention_norm": ("{vision}.blocks.*.norm1",),
        "vision.layers.*.attention.qkv": ("{vision}.blocks.*.attn.qkv",),
        "vision.layers.*.attention.out": ("{vision}.blocks.*.attn.proj",),
        "vision.layers.*.mlp_norm": ("{vision}.blocks.*.norm2",),
        "vision.layers.*.up": ("{vision}.blocks.*.mlp.linear_fc1",),
        "vision.layers.*.down": ("{vision}.blocks.*.mlp.linear_fc2",),
        "vision.merger.norm": ("{vision}.merger.norm",),
        "vision.merger.up": ("{vision}.merger.linear_fc1",),
        "vision.merger.down": ("{vision}.merger.linear_fc2",),
        "vision.deep_mergers.*.norm": ("{vision}.deepstack_merger_list.*.norm",),
        "vision.deep_mergers.*.up": ("{vision}.deepstack_merger_list.*.linear_fc1",),
        "vision.deep_mergers.*.down": ("{vision}.deepstack_merger_list.*.linear_fc2",),
    },
    # The names of today's checkpoints, then those of the first ones.
    roots={"text": ("model.language_model", "model"), "vision": ("model.visual", "visual")},
    ignored=("lm_head.weight",),
)
SECTIONS = (24, 20, 20)  # frequencies of (time, row, column) where the configuration leaves them out


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    return build_qwen3_vl(config, None, builder)


def build_qwen3_vl(config: Config, experts: ExpertDims | None, builder: ModelBuilder) -> LanguageModel:
    """The decoder, with a mixture of experts or without, and the tower beside it."""
    text = inner_config(config, "text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    dims = read_decoder(
        text,
        tied=bool(tied),
        qk_norm=True,
        default_head_dim=128,
        default_theta=500000.0,
        default_sections=SECTIONS,
    )
    vision = read_vision(inner_config(config, "vision_config"), tuple(ACTIVATIONS))
    if vision.out != dims.hidden:
        raise CheckpointError(
            f"config.json: vision features of {vision.out} channels ('out_hidden_size') cannot join a "
            f"decoder of {dims.hidden} ('hidden_size')"
        )
    if len(vision.deep) > dims.layers:
        raise CheckpointError(
            f"config.json: {len(vision.deep)} DeepStack levels need as many decoder layers, not {dims.layers}"
        )
    dims = replace(dims, experts=experts)
    return Decoder(dims, builder, QwenVision(vision, builder.child("vision")))
