"""Idefics3, SmolVLM and SmolVLM2: a SigLIP vision tower over tiles, pixel shuffle and a Llama decoder."""

from torch import Tensor

from saccade.models.config import Config, inner_config, positive_int
from saccade.models.decoder import NAMES, Decoder
from saccade.models.interface import LanguageModel
from saccade.models.layers import ModelBuilder
from saccade.models.llava import read_llama
from saccade.models.plain_vit import PLAIN_VIT_NAMES, PlainVit, PlainVitDims, read_plain_vit
from saccade.models.registry import WeightMap

WEIGHTS = WeightMap(
    modules={
        **NAMES,
        **PLAIN_VIT_NAMES,
        "vision.connector": ("model.connector.modality_projection.proj",),
    },
    roots={"text": ("model.text_model",), "vision": ("model.vision_model",)},
    ignored=("lm_head.weight", "position_ids", "rotary_emb.inv_freq"),
)


class Idefics3Vision(PlainVit):
    """Pixel shuffle is the reshape of patches in merge order; one linear layer follows."""

    def __init__(self, dims: PlainVitDims, out_dim: int, builder: ModelBuilder) -> None:
        super().__init__(dims, out_dim, builder)
        self.connector = builder.linear("connector", dims.merged, (out_dim,))

    def project(self, merged: Tensor) -> Tensor:
        return self.connector.forward(merged, self.mode)


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    merge = positive_int(config, "scale_factor", 2)
    vision = inner_config(config, "vision_config")
    dims = read_plain_vit(vision, merge=merge, class_token=False, post_norm=True)
    decoder = read_llama(config)
    return Decoder(decoder, builder, Idefics3Vision(dims, decoder.hidden, builder.child("vision")))
