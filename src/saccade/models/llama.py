"""Llama, 2 to 3.3: a text decoder, with scaled rotary frequencies from 3.1 on."""

from saccade.models.config import Config, read_decoder
from saccade.models.decoder import NAMES, Decoder
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.registry import WeightMap

# Early checkpoints carry their rotary frequencies, which the configuration implies.
WEIGHTS = WeightMap(NAMES, roots={"text": ("model",)}, ignored=("lm_head.weight", "rotary_emb.inv_freq"))


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    dims = read_decoder(
        config,
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=False,
        default_head_dim=None,
        default_theta=10000.0,
    )
    return Decoder(dims, builder)
