"""The size of a model from its config.json, without building it. No torch: the planner sizes any model."""

from collections.abc import Mapping
from typing import Any

from saccade.models.config import positive_int
from saccade.scheduler.cost_prior import ModelSize

Config = Mapping[str, Any]


def read_model_size(config: Config, value_bytes: int, *, small: bool = False) -> ModelSize:
    """`value_bytes`: of a weight, and of a K or V value unless these are in 8 bits (`small`)."""
    inner = config.get("text_config")
    text: Config = inner if isinstance(inner, Mapping) else config
    hidden, heads, layers = (
        positive_int(text, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = positive_int(text, "num_key_value_heads", heads)
    head_dim = positive_int(text, "head_dim", max(hidden // heads, 1))
    vocab = positive_int(text, "vocab_size")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)  # q, k, v and output
    mlp = 3 * hidden * positive_int(text, "intermediate_size")
    vision = config.get("vision_config")
    tower: Config = vision if isinstance(vision, Mapping) else {}
    return ModelSize(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab=vocab,
        parameters=layers * (attention + mlp) + vocab * hidden,
        value_bytes=value_bytes,
        vision_depth=positive_int(tower, "depth") if tower else 0,
        vision_hidden=positive_int(tower, "hidden_size") if tower else 0,
        vision_parameters=_tower_parameters(tower) if tower else 0,
        quantized_kv=small,
    )


def _tower_parameters(tower: Config) -> int:
    hidden, merge = positive_int(tower, "hidden_size"), positive_int(tower, "spatial_merge_size", 2)
    layer = 4 * hidden * hidden + 2 * hidden * positive_int(tower, "intermediate_size", 4 * hidden)
    merged = hidden * merge * merge
    merger = merged * merged + merged * positive_int(tower, "out_hidden_size", hidden)
    mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
    # A merger sees one token per merge * merge patches; counted per patch, as the layers are.
    return positive_int(tower, "depth") * layer + mergers * merger // (merge * merge)
