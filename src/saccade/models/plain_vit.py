"""CLIP and SigLIP: a vision transformer with learned positions over views of one fixed, square grid.

A view's patches come in merge order (see `models/vit.py`), so that pixel shuffle is a reshape. The class
token, where there is one, is the first row of each view; `finish` drops it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.errors import CheckpointError
from saccade.kernels.attention.paged import sdpa_any_shape, sdpa_recurring_shape
from saccade.kernels.dispatch import KernelMode
from saccade.models.config import PLAIN_VIT_DEFAULTS, Config, positive_float, positive_int
from saccade.models.interface import Layout, PatchGrid, VisionTower
from saccade.models.layers import Embedding, LayerNorm, ModelBuilder
from saccade.models.linear import LinearMethod
from saccade.models.vit import ACTIVATIONS

PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
# The checkpoint's names of the modules of `PlainVit`, below the root {vision}.
PLAIN_VIT_NAMES: dict[str, tuple[str, ...]] = {
    "vision": ("{vision}.embeddings",),  # its class_embedding
    "vision.patch_embedding": ("{vision}.embeddings.patch_embedding",),
    "vision.positions": ("{vision}.embeddings.position_embedding",),
    "vision.pre_norm": ("{vision}.pre_layrnorm",),
    "vision.layers.*.attention_norm": ("{vision}.encoder.layers.*.layer_norm1",),
    "vision.layers.*.qkv": tuple(f"{{vision}}.encoder.layers.*.self_attn.{part}_proj" for part in "qkv"),
    "vision.layers.*.out": ("{vision}.encoder.layers.*.self_attn.out_proj",),
    "vision.layers.*.mlp_norm": ("{vision}.encoder.layers.*.layer_norm2",),
    "vision.layers.*.up": ("{vision}.encoder.layers.*.mlp.fc1",),
    "vision.layers.*.down": ("{vision}.encoder.layers.*.mlp.fc2",),
    "vision.post_norm": ("{vision}.post_layernorm",),
}


@dataclass(frozen=True)
class PlainVitDims:
    layers: int  # of the checkpoint
    depth: int  # layers that are run
    hidden: int
    inner: int
    heads: int
    activation: str
    eps: float
    patch: int
    side: int  # patches along each side of a view
    merge: int  # patches along each side of a token
    class_token: bool  # and a norm before the first layer: CLIP
    post_norm: bool  # of the features

    @property
    def merged(self) -> int:
        """Channels of the patches of a token together."""
        return self.hidden * self.merge**2


def read_plain_vit(
    config: Config, *, feature_layer: int = -1, merge: int = 1, class_token: bool, post_norm: bool
) -> PlainVitDims:
    """`feature_layer` as transformers counts: 0 is the input of the first layer, -1 the last output."""
    config = {**PLAIN_VIT_DEFAULTS, **config}
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"config.json: a vision width of {hidden} does not divide by {heads} heads")
    activation = config.get("hidden_act", "quick_gelu" if class_token else "gelu_pytorch_tanh")
    if activation not in PLAIN_ACTIVATIONS:
        raise CheckpointError(
            f"config.json: the vision 'hidden_act' {activation!r} is not supported; "
            f"{', '.join(PLAIN_ACTIVATIONS)} are"
        )
    image, patch = positive_int(config, "image_size"), positive_int(config, "patch_size")
    side = image // patch
    if side < 1 or side % merge:
        raise CheckpointError(
            f"config.json: {side} patches along a side ('image_size' {image}, 'patch_size' {patch}) do not "
            f"divide by {merge} patches of a token"
        )
    layers = positive_int(config, "num_hidden_layers")
    depth = feature_layer + layers + 1 if feature_layer < 0 else feature_layer
    if not 1 <= depth <= layers:
        raise CheckpointError(
            f"config.json: 'vision_feature_layer' is {feature_layer}; the vision tower has {layers} layers"
        )
    return PlainVitDims(
        layers=layers,
        depth=depth,
        hidden=hidden,
        inner=positive_int(config, "intermediate_size"),
        heads=heads,
        activation=activation,
        eps=positive_float(config, "layer_norm_eps", 1e-5 if class_token else 1e-6),
        patch=patch,
        side=side,
        merge=merge,
        class_token=class_token,
        post_norm=post_norm,
    )


class PlainVitLayer(nn.Module):
    def __init__(self, dims: PlainVitDims, builder: ModelBuilder) -> None:
        super().__init__()
        hidden = dims.hidden
        self.heads = dims.heads
        self.attention_norm = LayerNorm(hidden, dims.eps, builder)
        self.qkv = builder.linear("qkv", hidden, (hidden,) * 3, bias=True)
        self.out = builder.linear("out", hidden, (hidden,), bias=True)
        self.mlp_norm = LayerNorm(hidden, dims.eps, builder)
        self.up = builder.linear("up", hidden, (dims.inner,), bias=True)
        self.down = builder.linear("down", dims.inner, (hidden,), bias=True)
        self._activation = PLAIN_ACTIVATIONS[dims.activation]

    def forward(self, x: Tensor, rows: int, mode: KernelMode) -> Tensor:
        """x is [views * rows, hidden]; each view attends to itself."""
        qkv = self.qkv.forward(self.attention_norm.forward(x, mode), mode)
        q, k, v = qkv.view(-1, rows, 3, self.heads, x.shape[1] // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)  # [views, heads, rows, head_dim]
        attended = self.out.forward(seen.transpose(1, 2).reshape(x.shape), mode)
        normed, x = self.mlp_norm.add(attended, x, mode)
        return x + self.down.forward(self._activation(self.up.forward(normed, mode)), mode)


class PlainVit(VisionTower):
    """`project` turns the merged patches of a token [tokens, merged] into its feature [tokens, out_dim]."""

    deep = ()
    depth_levels = 0

    def __init__(self, dims: PlainVitDims, out_dim: int, builder: ModelBuilder) -> None:
        super().__init__()
        self.patch_dim = 3 * dims.patch**2
        self.merge, self.mode, self.out_dim = dims.merge, builder.mode, out_dim
        self.depth, self.hidden_dim = dims.depth, dims.hidden
        self.grid, self._side = (dims.side, dims.side), dims.side
        self.extra_rows = int(dims.class_token)
        self.merged = dims.merged
        self.patch_embedding = builder.linear(
            "patch_embedding", self.patch_dim, (dims.hidden,), bias=not dims.class_token
        )
        self.positions = Embedding(dims.side**2 + self.extra_rows, dims.hidden, builder)
        self.class_embedding = builder.parameter(dims.hidden) if dims.class_token else None
        self.pre_norm = LayerNorm(dims.hidden, dims.eps, builder) if dims.class_token else None
        # All of the checkpoint's, although the last ones may not be run: 25 MB in LLaVA-1.5.
        self.layers = nn.ModuleList(
            PlainVitLayer(dims, builder.child(f"layers.{i}")) for i in range(dims.layers)
        )
        self.post_norm = LayerNorm(dims.hidden, dims.eps, builder)  # of CLIP too, unused
        self._norm_features = dims.post_norm
        self._device, self._dtype = builder.device, builder.dtype
        self._order: tuple[Tensor, ...] = ()

    def project(self, merged: Tensor) -> Tensor:
        raise NotImplementedError

    def layout(self, grids: Sequence[PatchGrid]) -> Layout:
        size = self._side**2
        for rows, columns in grids:
            if rows * columns != size:
                raise ValueError(f"a view has {rows} x {columns} patches; this tower takes {self.grid}")
        return super().layout(grids)

    def tables(self, grid: PatchGrid) -> tuple[Tensor, ...]:
        """The position of each patch, in merge order; [patches] int64."""
        if not self._order:
            side, merge = self._side, self.merge
            index = torch.arange(side * side, device=self._device) + self.extra_rows
            index = index.view(side // merge, merge, side // merge, merge).transpose(1, 2)
            self._order = (index.flatten(),)
        return self._order

    def begin(self, patches: Tensor, layout: Layout) -> Tensor:
        total = sum(layout.sizes)
        if not total or patches.shape != (total, self.patch_dim):
            raise ValueError(
                f"the grids {list(layout.grids)} need patches [{total}, {self.patch_dim}], "
                f"not {tuple(patches.shape)}"
            )
        x = self.patch_embedding.forward(patches.to(self._dtype), self.mode)
        x = x + self.positions.forward(layout.table(0))
        if self.class_embedding is None or self.pre_norm is None:
            return x
        views = len(layout.grids)
        first = (self.class_embedding + self.positions.weight[0]).expand(views, 1, -1)
        x = torch.cat((first, x.view(views, -1, self.hidden_dim)), dim=1)
        return self.pre_norm.forward(x.view(-1, self.hidden_dim), self.mode)

    def carry(
        self, stream: Tensor, layout: Layout, first: int, stop: int, *, recurring: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        rows = len(stream) // len(layout.grids)
        with (sdpa_recurring_shape if recurring else sdpa_any_shape)(stream.device):
            for index in range(first, stop):
                stream = self.layers[index](stream, rows, self.mode)
        return stream, []

    def finish(self, stream: Tensor, levels: Sequence[Tensor]) -> Tensor:
        if self.extra_rows:
            rows = self._side**2 + self.extra_rows
            stream = stream.view(-1, rows, self.hidden_dim)[:, self.extra_rows :].reshape(-1, self.hidden_dim)
        if self._norm_features:
            stream = self.post_norm.forward(stream, self.mode)
        return self.project(stream.reshape(-1, self.merged))


class MLPProjector(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, width: int, out: int, activation: str, builder: ModelBuilder, *, bias: bool) -> None:
        super().__init__()
        self.up: LinearMethod = builder.linear("up", width, (out,), bias=bias)
        self.down: LinearMethod = builder.linear("down", out, (out,), bias=bias)
        if activation not in PLAIN_ACTIVATIONS:
            raise CheckpointError(
                f"config.json: 'projector_hidden_act' {activation!r} is not supported; "
                f"{', '.join(PLAIN_ACTIVATIONS)} are"
            )
        self._activation = PLAIN_ACTIVATIONS[activation]

    def forward(self, x: Tensor, mode: KernelMode) -> Tensor:
        return self.down.forward(self._activation(self.up.forward(x, mode)), mode)
