"""Qwen3-VL-MoE: Qwen3-VL with a mixture of experts in its decoder layers."""

from dataclasses import replace

from saccade.models import qwen3_vl
from saccade.models.config import Config, inner_config
from saccade.models.experts import NAMES, read_experts
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder

WEIGHTS = replace(qwen3_vl.WEIGHTS, modules={**qwen3_vl.WEIGHTS.modules, **NAMES})


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    experts = read_experts(inner_config(config, "text_config"), normalized=True, stacked=True)
    return qwen3_vl.build_qwen3_vl(config, experts, builder)
