"""The decoder all families share: its sizes say which of the optional parts it has."""

import math

import torch
from torch import Tensor, nn

from saccade.kernels.attention.metadata import FixedRows, Rows
from saccade.kernels.attention.paged import any_shape
from saccade.kernels.attention.quantized_kv import Compact
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.skinny import skinny_linear
from saccade.kernels.jit import compiling
from saccade.kernels.norm_rope.rope import interleaved_axes, rotary_angles
from saccade.kv_cache.groups import full_attention
from saccade.kv_cache.pages import FixedPaged, Paged
from saccade.models.config import DecoderDims, RopeDims
from saccade.models.layers import (
    Attention,
    DeepVisual,
    Embedding,
    GatedMLP,
    LanguageModel,
    Linear,
    Place,
    RMSNorm,
    Turn,
    VisionTower,
    Watch,
)

# The names most families give these modules in their checkpoints; what is fused stands in one line.
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


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the last product waits for the next norm."""

    def __init__(self, dims: DecoderDims, layer: int, place: Place) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dims.hidden, dims.eps, place)
        self.attention = Attention(
            dims.hidden,
            dims.heads,
            dims.kv_heads,
            dims.head_dim,
            place,
            bias=dims.attention_bias,
            norm_eps=dims.eps if dims.qk_norm else None,
            window=dims.windows[layer],
        )
        self.mlp_norm = RMSNorm(dims.hidden, dims.eps, place)
        self.mlp = GatedMLP(dims.hidden, dims.inner, place, dims.mlp_bias)

    def forward(
        self,
        normed: Tensor,  # the norm of x this layer begins with
        x: Tensor,
        turn: Turn,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
        rows: Rows | FixedRows,
        compact: Compact | None,
        mode: KernelMode,
    ) -> tuple[Tensor, Tensor]:
        """What `mlp.down` takes, and the stream before it: its sum and the next norm are one step."""
        seen = self.attention.forward(normed, turn, k_pages, v_pages, slots, rows, compact, mode)
        normed, x = self.attention.out.normed(seen, x, self.mlp_norm, mode)
        return self.mlp.inner(normed, mode), x


class Decoder(LanguageModel):
    """Embedding, layers, norm and head; a vision tower beside them where the family has one."""

    def __init__(self, dims: DecoderDims, place: Place, vision: VisionTower | None = None) -> None:
        super().__init__()
        dtype = str(place.dtype).removeprefix("torch.")
        self.kv_cache_groups = full_attention(dims.layers, dims.kv_heads, dims.head_dim, dtype)
        self.vocab_size, self.hidden_size = dims.vocab, dims.hidden
        self.max_positions = dims.max_positions
        self.vision = vision
        self.mode = place.mode
        self.embedding = Embedding(dims.vocab, dims.hidden, place)
        self.layers = nn.ModuleList(Layer(dims, layer, place) for layer in range(dims.layers))
        self.norm = RMSNorm(dims.hidden, dims.eps, place)
        self.head = None if dims.tied else Linear(dims.hidden, (dims.vocab,), place)
        # Plain attributes, not buffers: they stay float32 and int64 whatever the weights are.
        self._windows = dims.windows
        self._frequencies = rotary_frequencies(dims.rope, dims.head_dim).to(place.device)
        self._axes = None
        if dims.rope.sections is not None:
            axes = interleaved_axes(dims.rope.sections, dims.head_dim // 2)
            self._axes = torch.tensor(axes, dtype=torch.int64, device=place.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding.forward(tokens)

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        paged: Paged | FixedPaged,
        deep: DeepVisual | None,
        watch: Watch | None = None,
        stop: int | None = None,
        mode: KernelMode | None = None,
    ) -> Tensor:
        mode = mode or self.mode
        pages = paged.pages
        rows = rows_of(paged)
        turn = self.turn(positions, mode)
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]  # all are; now it is said
        norms = [*(layer.attention_norm for layer in layers), self.norm]
        normed, x = norms[0].add(None, embeds, mode)
        levels = 0 if deep is None else deep.levels.shape[0]
        with any_shape(x.device):
            for index, layer in enumerate(layers[:stop]):
                if watch is not None:
                    watch.note(index, x)
                if compiling() and self._windows[index] in self._windows[levels:index]:
                    continue  # it would launch what a layer like it has launched
                k, v, compact = pages.k[index], pages.v[index], pages.layer(index)
                inner, x = layer.forward(normed, x, turn, k, v, paged.slots, rows, compact, mode)
                down, norm = layer.mlp.down, norms[index + 1]
                if deep is not None and index < levels:
                    x = (x + down.forward(inner, mode)).index_add(
                        0, deep.index, deep.levels[index].to(x.dtype)
                    )
                    normed, x = norm.add(None, x, mode)
                else:
                    normed, x = down.normed(inner, x, norm, mode)
        if watch is not None:
            watch.note(len(layers) if stop is None else stop, x)
        return normed

    def turn(self, positions: Tensor, mode: KernelMode) -> Turn:
        """The rotation at positions [3, T], in the weights' dtype."""
        dtype = self.embedding.weight.dtype
        return Turn(*rotary_angles(positions, self._frequencies, self._axes, dtype, mode))

    def queries(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        one = self.layers[layer]
        if not isinstance(one, Layer):
            raise TypeError(f"layer {layer} is a {type(one).__name__}")
        normed = one.attention_norm.forward(states, self.mode)
        return one.attention.queries(normed, self.turn(positions, self.mode), self.mode)

    def raw_logits(self, hidden: Tensor, mode: KernelMode | None = None) -> Tensor:
        head = self.embedding if self.head is None else self.head
        return skinny_linear(hidden, head.weight, mode=mode or self.mode)


def rows_of(paged: Paged | FixedPaged) -> Rows | FixedRows:
    """Once per step: every layer reads the same rows."""
    p, block_size = paged, paged.pages.block_size
    if isinstance(p, FixedPaged):
        tokens = p.slots.shape[0]
        return FixedRows(p.tables, p.index, p.lengths, p.offsets, p.decodes, tokens, p.longest, block_size)
    return Rows(p.tables, p.lengths, p.offsets, p.counts, p.contexts, p.decodes, block_size)


def rotary_frequencies(rope: RopeDims, head_dim: int) -> Tensor:
    """Radians per position, [head_dim / 2] float32:  theta ^ (-2 j / head_dim), then the kind's scaling.

    llama3 looks at how many turns t a frequency makes over the original context: kept above `high`,
    divided by `factor` below `low`, in between mixed by (t - low) / (high - low).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original * frequencies / (2 * math.pi)
        keep = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / rope.factor
    return frequencies
