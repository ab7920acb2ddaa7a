"""Mistral 7B to Mistral Small (text): a Llama decoder, in its first version with a window over all layers."""

from saccade.models.config import Config, positive_int, read_decoder
from saccade.models.decoder import NAMES, Decoder
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.registry import WeightMap

WEIGHTS = WeightMap(NAMES, roots={"text": ("model",)}, ignored=("lm_head.weight",))


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    if config.get("layer_types") is None:  # a window means all layers
        kind = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
        config = {**config, "layer_types": [kind] * positive_int(config, "num_hidden_layers")}
    dims = read_decoder(
        config,
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=False,
        default_head_dim=None,
        default_theta=10000.0,
    )
    return Decoder(dims, builder)
