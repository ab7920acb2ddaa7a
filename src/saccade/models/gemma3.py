"""Gemma 3, the text decoder: norms before and behind each part, a sliding window on most layers.

    x = x + post_attention_norm(attention(attention_norm(x)))
    x = x + post_mlp_norm(mlp(mlp_norm(x)))

Its norms multiply by 1 + weight, its MLP is gated by a GELU, and sliding layers rotate by another base.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.errors import CheckpointError
from saccade.kernels.attention.paged import sdpa_any_shape
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.split_k import Norm
from saccade.kernels.norm_rope.elementwise import add_norm
from saccade.kernels.norm_rope.rope import rotary_angles
from saccade.kv_cache.groups import full_attention
from saccade.kv_cache.pages import Paged
from saccade.models.config import Config, DecoderDims, positive_float, positive_int, read_decoder, read_rope
from saccade.models.decoder import NAMES, rotary_frequencies
from saccade.models.interface import DeepStackFeatures, HiddenStateTap, LanguageModel
from saccade.models.layers import Attention, Embedding, ModelBuilder, OffsetRMSNorm, Rotary
from saccade.models.linear import Activations
from saccade.models.registry import WeightMap

WEIGHTS = WeightMap(
    {
        **NAMES,
        "layers.*.post_attention_norm": ("{text}.layers.*.post_attention_layernorm",),
        "layers.*.mlp_norm": ("{text}.layers.*.pre_feedforward_layernorm",),
        "layers.*.post_mlp_norm": ("{text}.layers.*.post_feedforward_layernorm",),
        "layers.*.gate_up": ("{text}.layers.*.mlp.gate_proj", "{text}.layers.*.mlp.up_proj"),
        "layers.*.down": ("{text}.layers.*.mlp.down_proj",),
    },
    roots={"text": ("model",)},
    ignored=("lm_head.weight",),
)
SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
DEFAULT_PATTERN = 6  # every sixth layer has full attention, where config.json does not list them
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3Layer(nn.Module):
    def __init__(self, dims: DecoderDims, layer: int, scale: float, builder: ModelBuilder) -> None:
        super().__init__()
        self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm = (
            OffsetRMSNorm(dims.hidden, dims.eps, builder) for _ in range(4)
        )
        self.attention = Attention(dims, layer, builder.child("attention"), OffsetRMSNorm)
        self.attention.scale = scale
        self.gate_up = builder.linear("gate_up", dims.hidden, (dims.inner, dims.inner))
        self.down = builder.linear("down", dims.inner, (dims.hidden,))

    def forward(
        self, x: Tensor, normed: Activations, rotary: Rotary, paged: Paged, mode: KernelMode
    ) -> tuple[Tensor, Tensor]:
        """From x and attention_norm(x): the MLP's output behind its norm, and the residual it is added to."""
        attended = self.attention.forward(normed, rotary, paged, mode)
        update = self.post_attention_norm.forward(self.attention.out.forward(attended, mode), mode)
        normed, x = add_norm(update, x, self.mlp_norm.weight, None, self.mlp_norm.eps, mode)
        gate, up = self.gate_up.forward(normed, mode).chunk(2, dim=-1)
        inner = F.gelu(gate, approximate="tanh") * up
        return self.post_mlp_norm.forward(self.down.forward(inner, mode), mode), x


class Gemma3Decoder(LanguageModel):
    def __init__(self, dims: DecoderDims, scale: float, sliding_theta: float, builder: ModelBuilder) -> None:
        """`dims.rope` is of full attention; `scale` multiplies the attention scores."""
        super().__init__()
        dtype = str(builder.dtype).removeprefix("torch.")
        self.kv_cache_groups = full_attention(dims.layers, dims.kv_heads, dims.head_dim, dtype)
        self.vocab_size, self.hidden_size = dims.vocab, dims.hidden
        self.max_positions, self.vision = dims.max_positions, None
        self.dtype, self.mode = builder.dtype, builder.mode
        self.embedding = Embedding(dims.vocab, dims.hidden, builder)
        layers = [Gemma3Layer(dims, i, scale, builder.child(f"layers.{i}")) for i in range(dims.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = OffsetRMSNorm(dims.hidden, dims.eps, builder)
        tied = self.embedding.weight if dims.tied else None
        self.head = builder.linear("head", dims.hidden, (dims.vocab,), tied=tied)
        self._layers, self._windows = layers, dims.windows
        local = replace(dims.rope, kind="default", theta=sliding_theta)
        # By whether the layer has a window. Plain attributes, not buffers: they stay float32.
        self._frequencies = {
            windowed: rotary_frequencies(rope, dims.head_dim).to(builder.device)
            for windowed, rope in ((False, dims.rope), (True, local))
        }
        # In the model's dtype, which rounds it in 16 bits as the reference does.
        self._embed_scale = torch.tensor(dims.hidden**0.5, dtype=builder.dtype, device=builder.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding.forward(tokens) * self._embed_scale

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        paged: Paged,
        deep: DeepStackFeatures | None,
        tap: HiddenStateTap | None = None,
        stop: int | None = None,
        mode: KernelMode | None = None,
    ) -> Tensor:
        mode = mode or self.mode
        rotary = {
            windowed: self._rotary(windowed, positions, mode) for windowed in set(map(bool, self._windows))
        }
        norms: list[Norm] = [layer.attention_norm.before(None) for layer in self._layers[1:]]
        norms.append(self.norm.before(None))
        x, normed = embeds, self._layers[0].attention_norm.forward(embeds, mode)
        with sdpa_any_shape(x.device):
            for index, (layer, norm) in enumerate(zip(self._layers[:stop], norms, strict=False)):
                if tap is not None:
                    tap.record(index, x)
                if mode.compile_only and self._windows[index] in self._windows[:index]:
                    continue  # it launches the same kernels as a layer before it
                update, x = layer.forward(x, normed, rotary[bool(self._windows[index])], paged, mode)
                normed, x = add_norm(update, x, norm.weight, None, norm.eps, mode)
        if tap is not None:
            tap.record(len(self._layers) if stop is None else stop, x)
        return normed

    def _rotary(self, windowed: bool, positions: Tensor, mode: KernelMode) -> Rotary:
        return Rotary(*rotary_angles(positions, self._frequencies[windowed], None, self.dtype, mode))

    def queries(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        one, mode = self._layers[layer], self.mode
        normed = one.attention_norm.forward(states, mode)
        rotary = self._rotary(bool(self._windows[layer]), positions, mode)
        return one.attention.queries(normed, rotary, mode)

    def raw_logits(self, hidden: Tensor, mode: KernelMode | None = None) -> Tensor:
        return self.head.forward(hidden, mode or self.mode)


def build(config: Config, builder: ModelBuilder) -> LanguageModel:
    for key in UNSUPPORTED:
        if config.get(key):
            raise CheckpointError(f"config.json: {key!r} {config[key]!r} is not supported for Gemma 3")
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(
            f"config.json: 'hidden_activation' {activation!r} is not supported; 'gelu_pytorch_tanh' is"
        )
    plain = {key: value for key, value in config.items() if key not in ("hidden_act", "rope_parameters")}
    dims = read_decoder(
        {**plain, "rope_scaling": _rope(config, FULL), "layer_types": _layer_types(config)},
        tied=bool(config.get("tie_word_embeddings", True)),
        qk_norm=True,
        default_head_dim=256,
        default_theta=DEFAULT_THETA[FULL],
    )
    local = read_rope(
        {"rope_parameters": _rope(config, SLIDING)}, dims.head_dim, DEFAULT_THETA[SLIDING], None
    )
    if local.kind != "default":
        raise CheckpointError(
            f"config.json: the rotary type {local.kind!r} of sliding layers is not supported; 'default' is"
        )
    scale = positive_float(config, "query_pre_attn_scalar", 256) ** -0.5
    return Gemma3Decoder(dims, scale, local.theta, builder)


def _rope(config: Config, kind: str) -> dict[str, object]:
    """The rotary parameters of a kind of layer. Older files have one theta for each and scale full attention
    alone."""
    given = config.get("rope_parameters")
    if isinstance(given, Mapping):
        return dict(given.get(kind) or {})
    if kind == SLIDING:
        return {"rope_theta": positive_float(config, "rope_local_base_freq", DEFAULT_THETA[SLIDING])}
    theta = positive_float(config, "rope_theta", DEFAULT_THETA[FULL])
    return {**(config.get("rope_scaling") or {}), "rope_theta": theta}


def _layer_types(config: Config) -> list[str]:
    layers = positive_int(config, "num_hidden_layers")
    pattern = positive_int(config, "sliding_window_pattern", DEFAULT_PATTERN)
    listed = config.get("layer_types")
    return listed or [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
