"""Qwen2 and Qwen2.5: a text decoder with biased queries, keys and values."""

from saccade.models.config import Config, read_decoder
from saccade.models.decoder import NAMES, Decoder
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.registry import WeightMap

WEIGHTS = WeightMap(NAMES, roots={"text": ("model",)}, ignored=("lm_head.weight",))


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    dims = read_decoder(
        config,
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=False,
        default_head_dim=None,
        default_theta=10000.0,
        qkv_bias=True,
    )
    return Decoder(dims, builder)
