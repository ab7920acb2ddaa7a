"""From arrays to pictures on the device to losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import UNIT, Spec
from .model import Batch, Heads, Model, Output
from .raster import Painter, dense_targets
from .tokens import START


def shrink(images: Tensor, width: int, height: int) -> Tensor:
    """Antialiased bicubic resize, as the image processor does it. uint8 [b, h, w, 3] -> uint8."""
    small = F.interpolate(
        images.permute(0, 3, 1, 2).float(), size=(height, width), mode="bicubic", antialias=True
    )
    return small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def cut(images: Tensor, crops: Tensor, width: int, height: int) -> Tensor:
    """Regions (left, top, width, height; [b, c, 4]) as views of one size: uint8 [b, c, height, width, 3]."""
    b, h, w, _ = images.shape
    c = crops.shape[1]
    across = (torch.arange(width, device=images.device) + 0.5) / width
    down = (torch.arange(height, device=images.device) + 0.5) / height
    x = (crops[..., 0, None] + crops[..., 2, None] * across) / w * 2 - 1  # [b, c, width]
    y = (crops[..., 1, None] + crops[..., 3, None] * down) / h * 2 - 1
    size = (b, c, height, width)
    grid = torch.stack([x[:, :, None, :].expand(size), y[:, :, :, None].expand(size)], -1)
    out = F.grid_sample(
        images.permute(0, 3, 1, 2).float(),
        grid.reshape(b, c * height, width, 2),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    whole = out.round().clamp(0, 255).to(torch.uint8)
    return whole.view(b, 3, c, height, width).permute(0, 2, 3, 4, 1).contiguous()


def to_batch(spec: Spec, data: dict[str, Tensor], painter: Painter) -> Batch:
    device = data["rows"].device
    images = painter(data["rows"], data["counts"], data["ground"], spec.width, spec.height)
    crops = visual = None
    if spec.views:
        crops, visual = cut(images, data["crops"], *spec.zoom), data["visual"].long()
        images = shrink(images, *spec.look)
    start = torch.tensor(START, device=device)
    return Batch(
        images, crops, start, data["place"], data["ids"].long(), visual, data["positions"], data["branch"]
    )


class Losses(NamedTuple):
    total: Tensor
    answer: Tensor
    characters: Tensor
    things: Tensor
    relevance: Tensor
    right: Tensor  # share of answer tokens predicted
    read: Tensor  # share of characters named by the dense head


def relevance_loss(spec: Spec, data: dict[str, Tensor], out: Output, heads: Heads) -> Tensor:
    """Cross entropy between the scores over the picture's tokens and the share of the evidence's box in
    each."""
    wide, high = spec.look if spec.views else (spec.width, spec.height)
    prefix = data["place"].shape[1]
    tokens = out.middle[:, len(START) : prefix]
    asked = out.middle[:, prefix:].gather(1, data["asked"].long()[..., None].expand(-1, -1, tokens.shape[-1]))
    scores = heads.relevance(asked, tokens).float()
    boxes = data["boxes"]
    known = boxes[..., 2] > 0
    columns, lines = wide // UNIT, high // UNIT
    edges_x = torch.arange(columns + 1, device=boxes.device) * (spec.width / columns)
    edges_y = torch.arange(lines + 1, device=boxes.device) * (spec.height / lines)
    over_x = (
        torch.minimum(boxes[..., 2, None], edges_x[1:]) - torch.maximum(boxes[..., 0, None], edges_x[:-1])
    ).clamp(min=0)
    over_y = (
        torch.minimum(boxes[..., 3, None], edges_y[1:]) - torch.maximum(boxes[..., 1, None], edges_y[:-1])
    ).clamp(min=0)
    share = (over_y[..., :, None] * over_x[..., None, :]).flatten(2)
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-6)
    loss = -(share * F.log_softmax(scores, -1)).sum(-1)
    return (loss * known).sum() / known.sum().clamp(min=1)


def dense_losses(
    spec: Spec, data: dict[str, Tensor], tokens: Tensor, heads: Heads, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Characters, shapes and colours on the tokens of the first pictures, at most about `most` tokens."""
    b, m, _ = tokens.shape
    n = max(1, min(b, most // m))
    characters, shapes, colours = dense_targets(data["rows"][:n], data["labels"][:n], spec.width, spec.height)
    logits = heads.characters(tokens[:n]).view(-1, heads.CHARACTERS).float()
    target = characters.reshape(-1)
    weight = torch.where(target > 0, 1.0, 0.1)
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    read = ((logits.argmax(-1) == target) & (target > 0)).sum() / (target > 0).sum().clamp(min=1)
    shape, colour = (
        heads.things(tokens[:n])
        .view(n * m * heads.PATCHES, -1)
        .float()
        .split([heads.shapes, heads.colours], -1)
    )
    wanted, tinted = shapes.reshape(-1), colours.reshape(-1)
    weight = torch.where(wanted > 0, 1.0, 0.1)
    things = (
        F.cross_entropy(shape, wanted, reduction="none") + F.cross_entropy(colour, tinted, reduction="none")
    ) * weight
    return loss, things.sum() / weight.sum(), read


def losses(
    spec: Spec,
    data: dict[str, Tensor],
    batch: Batch,
    model: Model,
    heads: Heads,
    dense: float,
    most: int = 16384,
) -> Losses:
    out = model(batch)
    hidden = out.hidden.flatten(0, 1)[data["picks"]]
    logits = model.logits(hidden).float()
    target = data["answers"].long()
    answer = (F.cross_entropy(logits, target, reduction="none") * data["weights"]).sum() / data[
        "weights"
    ].sum()
    right = (logits.argmax(-1) == target).float().mean()
    zero = answer.new_zeros(())
    relevance = relevance_loss(spec, data, out, heads)
    if spec.views or dense == 0:
        return Losses(answer + 0.1 * relevance, answer, zero, zero, relevance, right, zero)
    characters, things, read = dense_losses(spec, data, out.tokens, heads, most)
    total = answer + dense * (characters + 0.3 * things) + 0.1 * relevance
    return Losses(total, answer, characters, things, relevance, right, read)


@torch.no_grad()
def branch_right(data: dict[str, Tensor], batch: Batch, model: Model) -> Tensor:
    """Whether every token of each branch's answer is the most likely one: exactly when greedy decoding
    gives that answer. [b, asks]."""
    out = model(batch)
    b, t = batch.ids.shape
    picks = data["picks"]
    wrong = model.logits(out.hidden.flatten(0, 1)[picks]).argmax(-1) != data["answers"].long()
    owner = (picks // t) * data["task"].shape[1] + batch.branch.flatten()[picks].long()
    count = torch.zeros(b * data["task"].shape[1], device=picks.device).index_add_(0, owner, wrong.float())
    return (count == 0).view(b, -1)
