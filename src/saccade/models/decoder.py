"""The decoder that all families share; its dims say which optional parts it has."""

import math

import torch
from torch import Tensor, nn

from saccade.kernels.attention.paged import sdpa_any_shape
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import QuantizedRows
from saccade.kernels.norm_rope.rope import interleaved_axes, rotary_angles, sectioned_axes
from saccade.kv_cache.groups import full_attention
from saccade.kv_cache.pages import Paged
from saccade.models.config import DecoderDims, RopeDims
from saccade.models.experts import ExpertMLP
from saccade.models.interface import DeepStackFeatures, HiddenStateTap, LanguageModel, VisionTower
from saccade.models.layers import Attention, Embedding, GatedMLP, ModelBuilder, RMSNorm, Rotary
from saccade.models.linear import Activations, norm_rows

# The names most families give these modules in their checkpoints; fused projections stand in one line.
NAMES: dict[str, tuple[str, ...]] = {
    "embedding": ("{text}.embed_tokens",),
    "layers.*.attention_norm": ("{text}.layers.*.input_layernorm",),
    "layers.*.attention.qkv": tuple(f"{{text}}.layers.*.self_attn.{part}_proj" for part in "qkv"),
    "layers.*.attention.q_norm": ("{text}.layers.*.self_attn.q_norm",),
    "layers.*.attention.k_norm": ("{text}.layers.*.self_attn.k_norm",),
    "layers.*.attention.out": ("{text}.layers.*.self_attn.o_proj",),
    "layers.*.mlp_norm": ("{text}.layers.*.post_attention_layernorm",),
    "layers.*.mlp.gate_up": ("{text}.layers.*.mlp.gate_proj", "{text}.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": ("{text}.layers.*.mlp.down_proj",),
    "norm": ("{text}.norm",),
    "head": ("lm_head",),
}


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The caller applies the last projection, fused with the
    norm of the next layer."""

    def __init__(self, dims: DecoderDims, layer: int, builder: ModelBuilder) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dims.hidden, dims.eps, builder)
        self.attention = Attention(dims, layer, builder.child("attention"))
        self.mlp_norm = RMSNorm(dims.hidden, dims.eps, builder)
        self.mlp: GatedMLP | ExpertMLP
        if dims.experts is not None and layer in dims.experts.layers:
            self.mlp = ExpertMLP(dims.hidden, dims.experts, builder.child("mlp"))
        else:
            self.mlp = GatedMLP(dims.hidden, dims.inner, builder.child("mlp"), dims.mlp_bias)

    def forward(
        self, normed: Activations, x: Tensor, rotary: Rotary, paged: Paged, mode: KernelMode
    ) -> tuple[Activations, Tensor]:
        """From attention_norm(x) and x: what `mlp.add` takes, and the residual it is added to."""
        attended = self.attention.forward(normed, rotary, paged, mode)
        normed, x = self.attention.out.apply_add_norm(attended, x, self.mlp_norm.before(self.mlp.first), mode)
        return self.mlp.forward(normed, mode), x


class Decoder(LanguageModel):
    """Embedding, layers, norm and head; beside them a vision tower, if the family has one."""

    def __init__(self, dims: DecoderDims, builder: ModelBuilder, vision: VisionTower | None = None) -> None:
        super().__init__()
        dtype = str(builder.dtype).removeprefix("torch.")
        self.kv_cache_groups = full_attention(dims.layers, dims.kv_heads, dims.head_dim, dtype)
        self.vocab_size, self.hidden_size = dims.vocab, dims.hidden
        self.max_positions = dims.max_positions
        self.vision = vision
        self.dtype, self.mode = builder.dtype, builder.mode
        self.embedding = Embedding(dims.vocab, dims.hidden, builder)
        layers = [DecoderLayer(dims, i, builder.child(f"layers.{i}")) for i in range(dims.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(dims.hidden, dims.eps, builder)
        tied = self.embedding.weight if dims.tied else None
        self.head = builder.linear("head", dims.hidden, (dims.vocab,), tied=tied)
        self._layers = layers  # the same, with their type
        self._windows = dims.windows
        # Plain attributes, not buffers: they stay float32 and int64 whatever the weights are.
        self._frequencies = rotary_frequencies(dims.rope, dims.head_dim).to(builder.device)
        self._axes = None
        if dims.rope.sections is not None:
            assign = interleaved_axes if dims.rope.interleaved else sectioned_axes
            axes = assign(dims.rope.sections, dims.head_dim // 2)
            self._axes = torch.tensor(axes, dtype=torch.int64, device=builder.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding.forward(tokens)

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
        rotary = self.rotary(positions, mode)
        norms = [layer.attention_norm.before(layer.attention.qkv) for layer in self._layers]
        norms.append(self.norm.before(None))
        normed: Activations = norm_rows(embeds, norms[0], mode)
        x = embeds
        levels = 0 if deep is None else deep.levels.shape[0]
        with sdpa_any_shape(x.device):
            for index, (layer, norm) in enumerate(zip(self._layers[:stop], norms[1:], strict=False)):
                if tap is not None:
                    tap.record(index, x)
                if mode.compile_only and self._windows[index] in self._windows[levels:index]:
                    continue  # it launches the same kernels as a layer before it
                inner, x = layer.forward(normed, x, rotary, paged, mode)
                if deep is not None and index < levels:
                    x = layer.mlp.add(inner, x, mode)
                    x = x.index_add(0, deep.index, deep.levels[index].to(x.dtype))
                    normed = norm_rows(x, norm, mode)
                else:
                    normed, x = layer.mlp.add_norm(inner, x, norm, mode)
        if tap is not None:
            tap.record(len(self._layers) if stop is None else stop, x)
        # Of some of the layers only, or of kernels that are only compiled, nobody reads the result.
        return x if isinstance(normed, QuantizedRows) else normed

    def rotary(self, positions: Tensor, mode: KernelMode) -> Rotary:
        """The rotary embedding at positions [3, T], in the model's dtype."""
        return Rotary(*rotary_angles(positions, self._frequencies, self._axes, self.dtype, mode))

    def queries(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        one, mode = self._layers[layer], self.mode
        normed = one.attention_norm.forward(states, mode)
        return one.attention.queries(normed, self.rotary(positions, mode), mode)

    def raw_logits(self, hidden: Tensor, mode: KernelMode | None = None) -> Tensor:
        return self.head.forward(hidden, mode or self.mode)


def rotary_frequencies(rope: RopeDims, head_dim: int) -> Tensor:
    """Radians per position, [head_dim / 2] float32:  theta ^ (-2 j / head_dim), then the type's scaling.

    llama3 goes by how many periods t of a frequency the original context has: above `high` it is kept, below
    `low` divided by `factor`, in between mixed by (t - low) / (high - low).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        periods = rope.original * frequencies / (2 * math.pi)
        keep = ((periods - rope.low) / (rope.high - rope.low)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies
