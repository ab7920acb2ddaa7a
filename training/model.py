"""The model as it is trained: the Qwen3-VL architecture on batches of equal-shaped images, many questions
per image.

Parameter names are those of transformers' Qwen3VLForConditionalGeneration, so the state dict is the
checkpoint. An image is encoded once; its tokens are a prefix shared by several branches, one per question,
which see the prefix and themselves."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shape import Shape


class Rope(NamedTuple):
    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x [..., tokens, heads, dim] turned by angles [..., tokens, dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * rope.cos.unsqueeze(-2) + turned * rope.sin.unsqueeze(-2)).to(x.dtype)


class VisionMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class VisionBlock(nn.Module):
    """Attention stands between two parts that a compiler can fuse, each for itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.vit_heads
        self.norm1, self.norm2 = (
            nn.LayerNorm(shape.vit_width, eps=1e-6),
            nn.LayerNorm(shape.vit_width, eps=1e-6),
        )
        self.attn = VisionAttention(shape.vit_width)
        self.mlp = VisionMLP(shape.vit_width, shape.vit_mlp)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, width = x.shape
        q, k, v = self.attn.qkv(self.norm1(x)).view(b, n, 3, self.heads, width // self.heads).unbind(2)
        rope = Rope(cos, sin)
        return rotate(q, rope).transpose(1, 2), rotate(k, rope).transpose(1, 2), v.transpose(1, 2)

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.attn.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        return self.after(x, F.scaled_dot_product_attention(*self.before(x, rope.cos, rope.sin)))


class Merger(nn.Module):
    """Four neighbouring patches to one token of the decoder's width."""

    def __init__(self, shape: Shape, after: bool) -> None:
        super().__init__()
        self.after, self.hidden = after, 4 * shape.vit_width
        self.norm = nn.LayerNorm(self.hidden if after else shape.vit_width, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = (
            nn.Linear(self.hidden, self.hidden),
            nn.Linear(self.hidden, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, n, _width = x.shape
        x = (
            self.norm(x.reshape(b, n // 4, self.hidden))
            if self.after
            else self.norm(x).reshape(b, n // 4, self.hidden)
        )
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, width, (2, 16, 16), (2, 16, 16))

    def forward(self, patches: Tensor) -> Tensor:
        """patches [b, n, 768]: a still image fills both moments, so their kernels add."""
        return F.linear(patches, self.proj.weight.sum(2).flatten(1), self.proj.bias)


class Visual(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbed(shape.vit_width)
        self.pos_embed = nn.Embedding(shape.positions, shape.vit_width)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.vit_depth))
        self.merger = Merger(shape, after=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(shape, after=True) for _ in shape.deepstack)

    def positions(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column of each patch in merge order."""
        y, x = torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        )
        order = [t.view(rows // 2, 2, columns // 2, 2).transpose(1, 2).reshape(-1) for t in (y, x)]
        return order[0], order[1]

    def rope(self, y: Tensor, x: Tensor) -> Rope:
        head = self.shape.vit_width // self.shape.vit_heads
        inverse = 1.0 / self.shape.vit_theta ** (torch.arange(0, head // 2, 2, device=y.device) / (head // 2))
        angles = torch.cat([y[:, None] * inverse, x[:, None] * inverse], -1)
        angles = torch.cat([angles, angles], -1)
        return Rope(angles.cos(), angles.sin())

    def learned(self, y: Tensor, x: Tensor, rows: int, columns: int) -> Tensor:
        """The learned grid, stretched over the image."""
        side = math.isqrt(self.shape.positions)
        v, u = y * (side - 1) / (rows - 1), x * (side - 1) / (columns - 1)
        i, j = v.long().clamp(max=side - 2), u.long().clamp(max=side - 2)
        fv, fu = (v - i)[:, None], (u - j)[:, None]
        table = self.pos_embed.weight
        top = table[i * side + j] * (1 - fu) + table[i * side + j + 1] * fu
        low = table[(i + 1) * side + j] * (1 - fu) + table[(i + 1) * side + j + 1] * fu
        return top * (1 - fv) + low * fv

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """images uint8 [b, h, w, 3] -> tokens [b, h * w / 1024, width] and the deepstack's."""
        b, h, w, _ = images.shape
        rows, columns = h // 16, w // 16
        patches = (
            images.view(b, rows // 2, 2, 16, columns // 2, 2, 16, 3)
            .permute(0, 1, 4, 2, 5, 7, 3, 6)
            .reshape(b, rows * columns, 768)
        )
        dtype = (
            torch.get_autocast_dtype("cuda")
            if torch.is_autocast_enabled("cuda")
            else self.pos_embed.weight.dtype
        )
        y, x = self.positions(rows, columns, images.device)
        hidden = self.patch_embed(patches.to(dtype) / 127.5 - 1.0)
        hidden = hidden + self.learned(y, x, rows, columns).to(hidden.dtype)
        rope = Rope(*(t.to(hidden.dtype) for t in self.rope(y, x)))
        deep = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, rope)
            if index in self.shape.deepstack:
                deep.append(self.deepstack_merger_list[self.shape.deepstack.index(index)](hidden))
        return self.merger(hidden), deep


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = shape.heads, shape.kv_heads, shape.head
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(shape.head), RMSNorm(shape.head)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(shape.width), RMSNorm(shape.width)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        own, rope = self.self_attn, Rope(cos, sin)
        x = self.input_layernorm(x)
        q = rotate(own.q_norm(own.q_proj(x).view(b, n, own.heads, own.head)), rope).transpose(1, 2)
        k = rotate(own.k_norm(own.k_proj(x).view(b, n, own.kv_heads, own.head)), rope).transpose(1, 2)
        v = own.v_proj(x).view(b, n, own.kv_heads, own.head).transpose(1, 2)
        groups = own.heads // own.kv_heads
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(out)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, rope: Rope, mask: Tensor, prefix: int) -> Tensor:
        """Prefix rows see the prefix before them; branch rows see what mask [b, 1, branch, all] adds to
        their scores."""
        q, k, v = self.before(x, rope.cos, rope.sin)
        first = F.scaled_dot_product_attention(
            q[:, :, :prefix], k[:, :, :prefix], v[:, :, :prefix], is_causal=True
        )
        rest = F.scaled_dot_product_attention(q[:, :, prefix:], k, v, attn_mask=mask)
        return self.after(x, torch.cat([first, rest], 2).transpose(1, 2).flatten(2))


def compile_parts() -> None:
    """Compiles the fusible parts once for all blocks and sizes."""
    for part in (VisionBlock, Layer):
        part.before = torch.compile(part.before, dynamic=True)  # type: ignore[method-assign]
        part.after = torch.compile(part.after, dynamic=True)  # type: ignore[method-assign]
    Merger.forward = torch.compile(Merger.forward, dynamic=True)  # type: ignore[method-assign]


class LanguageModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.depth))
        self.norm = RMSNorm(shape.width)

    def rope(self, positions: Tensor) -> Rope:
        """positions [3, b, n] of time, height, width, fractions allowed -> angles [b, n, head]; axes
        interleaved."""
        head, sections = self.shape.head, self.shape.sections
        inverse = 1.0 / self.shape.theta ** (torch.arange(0, head, 2, device=positions.device) / head)
        angles = positions[..., None].float() * inverse
        axis = torch.zeros(head // 2, dtype=torch.long, device=positions.device)
        axis[1 : sections[1] * 3 : 3] = 1
        axis[2 : sections[2] * 3 : 3] = 2
        mixed = (
            angles.permute(1, 2, 3, 0)
            .gather(-1, axis.view(1, 1, -1, 1).expand(*angles.shape[1:], 1))
            .squeeze(-1)
        )
        mixed = torch.cat([mixed, mixed], -1)
        return Rope(mixed.cos(), mixed.sin())


class Batch(NamedTuple):
    """One training batch on the device. b images, t branch tokens each."""

    images: Tensor  # uint8 [b, h, w, 3]: the plain image or the global view
    crops: Tensor | None  # uint8 [b, c, h, w, 3]: zoomed views, in the branches
    start: Tensor  # [prefix text]: ids before the image
    place: Tensor  # float [3, prefix]: positions of the prefix (its text, then the image)
    ids: Tensor  # [b, t]
    visual: Tensor | None  # [b, t]: index of the crop token that stands here, -1 for text
    positions: Tensor  # float [3, b, t]
    branch: Tensor  # [b, t]: which branch, -1 for padding


class Output(NamedTuple):
    hidden: Tensor  # [b, t, width] of the branches, after the last norm
    tokens: Tensor  # [b, m, width]: the image's tokens before the decoder
    middle: Tensor  # [b, prefix + t, width] after `relevance_layer` layers
    seen: Tensor | None  # [b, c * m, width]: the tokens of its zoomed views, one view after the other


class Core(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.visual = Visual(shape)
        self.language_model = LanguageModel(shape)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Core(shape)

    def forward(self, batch: Batch) -> Output:
        text = self.model.language_model
        tokens, deep = self.model.visual(batch.images)
        b, m, width = tokens.shape
        embeds = text.embed_tokens(batch.ids).to(tokens.dtype)
        late = [torch.zeros_like(embeds) for _ in deep]
        seen = None
        if batch.crops is not None and batch.visual is not None:
            seen, seen_deep = self.model.visual(batch.crops.flatten(0, 1))
            index = batch.visual.clamp(min=0)[..., None].expand(-1, -1, width)
            here = (batch.visual >= 0)[..., None]
            seen = seen.view(b, -1, width)
            embeds = torch.where(here, seen.gather(1, index), embeds)
            late = [
                torch.where(here, d.view(b, -1, width).gather(1, index), z)
                for d, z in zip(seen_deep, late, strict=True)
            ]
        start = text.embed_tokens(batch.start).to(tokens.dtype).expand(b, -1, -1)
        prefix = start.shape[1] + m
        x = torch.cat([start, tokens, embeds], 1)
        places = torch.cat([batch.place[:, None].expand(-1, b, -1), batch.positions], 2)
        rope = Rope(*(t.to(x.dtype) for t in text.rope(places)))
        mask = branch_mask(batch.branch, prefix, x.dtype)
        middle = x
        for depth, layer in enumerate(text.layers):
            x = layer(x, rope, mask, prefix)
            if depth < len(deep):
                x = x + torch.cat([torch.zeros_like(start), deep[depth], late[depth]], 1)
            if depth + 1 == self.shape.relevance_layer:
                middle = x
        return Output(text.norm(x[:, prefix:]), tokens, middle, seen)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.language_model.embed_tokens.weight.to(hidden.dtype))


def branch_mask(branch: Tensor, prefix: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [b, 1, t, prefix + t]: a branch sees the prefix and its own earlier tokens."""
    b, t = branch.shape
    own = (branch[:, :, None] == branch[:, None, :]) & torch.ones(
        t, t, dtype=torch.bool, device=branch.device
    ).tril()
    zero = torch.zeros((), dtype=dtype, device=branch.device)
    own_mask = torch.where(own, zero, torch.finfo(dtype).min)
    total = -(-(prefix + t) // 8) * 8  # rows of the storage start on 16 bytes, as the kernel wants
    mask = torch.zeros(b, 1, t, total, dtype=dtype, device=branch.device)
    mask[:, 0, :, prefix : prefix + t] = own_mask
    return mask[..., : prefix + t]


class Heads(nn.Module):
    """Dropped after training, but for `question` and `place`, which are the relevance head.

    Dense targets on the image's tokens: the character centred in each cell of 4 x 8 pixels (32 per token)
    and the shape and colour centred in each patch (4 per token)."""

    CELLS, CHARACTERS, PATCHES = 32, 95, 4

    def __init__(self, shape: Shape, shapes: int, colours: int) -> None:
        super().__init__()
        self.shapes, self.colours = shapes + 1, colours + 1
        self.characters = nn.Linear(shape.width, self.CELLS * self.CHARACTERS)
        self.things = nn.Linear(shape.width, self.PATCHES * (self.shapes + self.colours))
        self.question = nn.Linear(shape.width, shape.relevance_width, bias=False)
        self.place = nn.Linear(shape.width, shape.relevance_width, bias=False)
        self.relevance_norm = RMSNorm(shape.width)

    def relevance(self, asked: Tensor, tokens: Tensor) -> Tensor:
        """asked [b, q, width], tokens [b, m, width] (hidden states) -> scores [b, q, m]; a softmax makes
        them shares."""
        q = self.question(self.relevance_norm(asked))
        k = self.place(self.relevance_norm(tokens))
        return q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])


def initialise(model: nn.Module, depth: int) -> None:
    """Linear layers by fan-in, residual outputs smaller, embeddings small."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = 0.7 / math.sqrt(module.in_features)
            if (
                name.endswith(("proj", "linear_fc2", "down_proj", "o_proj"))
                and "merger" not in name
                and "q_proj" not in name
            ):
                std /= (
                    math.sqrt(2 * depth)
                    if not name.endswith(("k_proj", "v_proj", "gate_proj", "up_proj"))
                    else 1.0
                )
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv3d):
            nn.init.normal_(module.weight, std=0.7 / math.sqrt(768 * 2))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
