"""Qwen2-VL: the decoder of Qwen2.5-VL, beside a tower of layer norms and full attention."""

from saccade.errors import CheckpointError
from saccade.models.config import Config, inner_config, positive_float, positive_int
from saccade.models.decoder import NAMES
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.qwen2_5_vl import ROOTS, VISION_NAMES, build_qwen2
from saccade.models.qwen2_vit import Qwen2VisionDims, channels
from saccade.models.registry import WeightMap

WEIGHTS = WeightMap(
    modules={
        **NAMES,
        **VISION_NAMES,
        "vision.layers.*.mlp.up": ("{vision}.blocks.*.mlp.fc1",),
        "vision.layers.*.mlp.down": ("{vision}.blocks.*.mlp.fc2",),
    },
    roots=ROOTS,
    ignored=("lm_head.weight",),
)


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    vision = inner_config(config, "vision_config")
    activation = vision.get("hidden_act", "quick_gelu")
    if activation != "quick_gelu":
        raise CheckpointError(
            f"config.json: the vision 'hidden_act' {activation!r} is not supported; quick_gelu is"
        )
    hidden = positive_int(vision, "embed_dim")
    dims = Qwen2VisionDims(
        depth=positive_int(vision, "depth"),
        hidden=hidden,
        inner=int(hidden * positive_float(vision, "mlp_ratio", 4)),
        heads=positive_int(vision, "num_heads"),
        channels=channels(vision),
        patch=positive_int(vision, "patch_size"),
        frames=positive_int(vision, "temporal_patch_size", 2),
        merge=positive_int(vision, "spatial_merge_size"),
        out=positive_int(vision, "hidden_size"),  # the decoder's width, despite its name
        window=None,
        full=frozenset(),
        theta=positive_float(vision.get("rope_parameters") or {}, "rope_theta", 10000.0),
        modern=False,
    )
    return build_qwen2(config, dims, builder)
