"""Qwen2.5-VL: the Qwen2 decoder with three-axis positions, beside a vision tower with window attention."""

from saccade.errors import CheckpointError
from saccade.models.config import Config, inner_config, positive_float, positive_int, read_decoder
from saccade.models.decoder import NAMES, Decoder
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.qwen2_vit import Qwen2Vision, Qwen2VisionDims, channels, check_vision
from saccade.models.registry import WeightMap

VISION_NAMES: dict[str, tuple[str, ...]] = {
    "vision.patch_embedding": ("{vision}.patch_embed.proj",),
    "vision.layers.*.attention_norm": ("{vision}.blocks.*.norm1",),
    "vision.layers.*.attention.qkv": ("{vision}.blocks.*.attn.qkv",),
    "vision.layers.*.attention.out": ("{vision}.blocks.*.attn.proj",),
    "vision.layers.*.mlp_norm": ("{vision}.blocks.*.norm2",),
    "vision.merger.norm": ("{vision}.merger.ln_q",),
    "vision.merger.up": ("{vision}.merger.mlp.0",),
    "vision.merger.down": ("{vision}.merger.mlp.2",),
}
# The names of today's checkpoints, then those of the first ones.
ROOTS = {"text": ("model.language_model", "model"), "vision": ("model.visual", "visual")}
WEIGHTS = WeightMap(
    modules={
        **NAMES,
        **VISION_NAMES,
        "vision.layers.*.mlp.gate_up": ("{vision}.blocks.*.mlp.gate_proj", "{vision}.blocks.*.mlp.up_proj"),
        "vision.layers.*.mlp.down": ("{vision}.blocks.*.mlp.down_proj",),
    },
    roots=ROOTS,
    ignored=("lm_head.weight",),
)
SECTIONS = (16, 24, 24)  # frequencies of (time, row, column) where the configuration leaves them out


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    return build_qwen2(config, read_tower(inner_config(config, "vision_config")), builder)


def build_qwen2(config: Config, vision: Qwen2VisionDims, builder: ModelBuilder) -> LanguageModel:
    """The decoder, also of Qwen2-VL, and the tower beside it."""
    # The first checkpoints have the decoder's part at the top.
    text = inner_config(config, "text_config") if "text_config" in config else config
    dims = read_decoder(
        text,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        qk_norm=False,
        default_head_dim=None,
        default_theta=1000000.0,
        default_sections=SECTIONS,
        interleaved=False,
        qkv_bias=True,
    )
    check_vision(vision, dims.hidden)
    return Decoder(dims, builder, Qwen2Vision(vision, builder.child("vision")))


def read_tower(config: Config) -> Qwen2VisionDims:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(
            f"config.json: the vision 'hidden_act' {activation!r} is not supported; silu is"
        )
    depth, patch = positive_int(config, "depth"), positive_int(config, "patch_size")
    merge, window = positive_int(config, "spatial_merge_size"), positive_int(config, "window_size", 112)
    if window < merge * patch:
        raise CheckpointError(
            f"config.json: 'window_size' is {window} pixels, less than the {merge * patch} of one token"
        )
    full = config.get("fullatt_block_indexes", (7, 15, 23, 31))
    if not isinstance(full, list | tuple) or any(
        not isinstance(layer, int) or not 0 <= layer < depth for layer in full
    ):
        raise CheckpointError(
            f"config.json: 'fullatt_block_indexes' is {full!r}; it must name layers of {depth}"
        )
    return Qwen2VisionDims(
        depth=depth,
        hidden=positive_int(config, "hidden_size"),
        inner=positive_int(config, "intermediate_size"),
        heads=positive_int(config, "num_heads"),
        channels=channels(config),
        patch=patch,
        frames=positive_int(config, "temporal_patch_size", 2),
        merge=merge,
        out=positive_int(config, "out_hidden_size"),
        window=window // merge // patch,
        full=frozenset(full),
        theta=positive_float(config.get("rope_parameters") or {}, "rope_theta", 10000.0),
        modern=True,
    )
