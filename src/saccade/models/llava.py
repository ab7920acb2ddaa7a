"""LLaVA-1.5: a CLIP vision tower, a projector of two layers and a Llama decoder."""

from torch import Tensor

from saccade.errors import CheckpointError
from saccade.models.config import LLAMA_DEFAULTS, Config, DecoderDims, inner_config, read_decoder
from saccade.models.decoder import NAMES, Decoder
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.plain_vit import (
    PLAIN_VIT_NAMES,
    MLPProjector,
    PlainVit,
    PlainVitDims,
    read_plain_vit,
)
from saccade.models.registry import WeightMap

WEIGHTS = WeightMap(
    modules={
        **NAMES,
        **PLAIN_VIT_NAMES,
        "head": ("{head}",),
        "vision.projector.up": ("{projector}.linear_1",),
        "vision.projector.down": ("{projector}.linear_2",),
    },
    # The names of the hub's checkpoints, then those of transformers' modules.
    roots={
        "text": ("language_model.model", "model.language_model"),
        "head": ("language_model.lm_head", "lm_head"),
        "vision": ("vision_tower.vision_model", "vision_tower", "model.vision_tower"),
        "projector": ("multi_modal_projector", "model.multi_modal_projector"),
    },
    ignored=("lm_head.weight", "position_ids", "rotary_emb.inv_freq"),
)
DECODERS = ("llama",)


class LlavaVision(PlainVit):
    def __init__(self, dims: PlainVitDims, out_dim: int, config: Config, builder: ModelBuilder) -> None:
        super().__init__(dims, out_dim, builder)
        self.projector = MLPProjector(
            dims.merged,
            out_dim,
            config.get("projector_hidden_act", "gelu"),
            builder.child("projector"),
            bias=bool(config.get("multimodal_projector_bias", True)),
        )

    def project(self, merged: Tensor) -> Tensor:
        return self.projector.forward(merged, self.mode)


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    vision = inner_config(config, "vision_config")
    kind = vision.get("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        raise CheckpointError(
            f"config.json: the vision tower is a {kind!r}; of LLaVA, 'clip_vision_model' is supported"
        )
    layer, strategy = (
        config.get("vision_feature_layer", -2),
        config.get("vision_feature_select_strategy", "default"),
    )
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise CheckpointError(
            f"config.json: 'vision_feature_layer' is {layer!r}; the features of one layer are supported"
        )
    if strategy != "default":
        raise CheckpointError(
            f"config.json: 'vision_feature_select_strategy' {strategy!r} is not supported; 'default' is"
        )
    dims = read_plain_vit(vision, feature_layer=layer, class_token=True, post_norm=False)
    decoder = read_llama(config)
    return Decoder(decoder, builder, LlavaVision(dims, decoder.hidden, config, builder.child("vision")))


def read_llama(config: Config) -> DecoderDims:
    """The decoder of `text_config`, with the defaults of a Llama for what it leaves out."""
    text = inner_config(config, "text_config")
    kind = text.get("model_type", "llama")
    if kind not in DECODERS:
        raise CheckpointError(
            f"config.json: the decoder is a {kind!r}; behind this vision tower {', '.join(DECODERS)} is"
            " supported"
        )
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return read_decoder(
        {**LLAMA_DEFAULTS, **text},
        tied=bool(tied),
        qk_norm=False,
        default_head_dim=None,
        default_theta=10000.0,
    )
