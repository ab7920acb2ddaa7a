"""Qwen3-MoE: the Qwen3 text decoder with a mixture of experts."""

from dataclasses import replace

from saccade.models import qwen3
from saccade.models.config import Config, read_decoder
from saccade.models.decoder import Decoder
from saccade.models.experts import NAMES, read_experts
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder

WEIGHTS = replace(qwen3.WEIGHTS, modules={**qwen3.WEIGHTS.modules, **NAMES})


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    dims = read_decoder(
        config,
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=True,
        default_head_dim=128,
        default_theta=10000.0,
    )
    normalized = bool(config.get("norm_topk_prob", False))
    experts = read_experts(config, normalized=normalized, stacked=False)
    return Decoder(replace(dims, experts=experts), builder)
