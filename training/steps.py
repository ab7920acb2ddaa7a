"""From arrays to images on the device to losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Spec
from .model import Batch, Heads, Model, Output
from .raster import Painter, dense_targets
from .tokens import START
from .views import UNIT

WIDEST = 1.4  # source pixels per pixel of a zoomed view: 1.2, and a frame of fewer pixels than the source


def shrink(images: Tensor, width: int, height: int) -> Tensor:
    """Antialiased bicubic resize, as the image processor does it. uint8 [b, h, w, 3] -> uint8."""
    small = F.interpolate(
        images.permute(0, 3, 1, 2).float(), size=(height, width), mode="bicubic", antialias=True
    )
    return small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _cubic(x: Tensor) -> Tensor:
    """Pillow's filter."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _weights(length: Tensor, pixels: int, reach: int) -> Tensor:
    """What each of `reach` source pixels is of each of `pixels`, where `length` [n] of them are shown:
    [n, pixels, reach]."""
    scale = (length / pixels)[:, None, None]
    middle = (torch.arange(pixels, device=length.device) + 0.5)[None, :, None] * scale
    source = torch.arange(reach, device=length.device)[None, None, :]
    weights = _cubic((source + 0.5 - middle) / scale.clamp(min=1.0))
    weights = torch.where(source < length[:, None, None], weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def cut(images: Tensor, crops: Tensor, width: int, height: int) -> Tensor:
    """Regions (left, top, width, height, whole pixels; [b, c, 4]) as views of one size, resized as the
    processor does it: uint8 [b, c, height, width, 3]. At scale 1 they are the source's own pixels."""
    b, h, w, _ = images.shape
    c = crops.shape[1]
    left, top, wide, high = crops.flatten(0, 1).unbind(-1)
    across, down = min(w, int(width * WIDEST)), min(h, int(height * WIDEST))
    x = (left[:, None] + torch.arange(across, device=images.device)).long().clamp(max=w - 1)
    y = (top[:, None] + torch.arange(down, device=images.device)).long().clamp(max=h - 1)
    owner = torch.arange(b, device=images.device).repeat_interleave(c)
    part = images[owner[:, None, None], y[:, :, None], x[:, None, :]].float()  # [n, down, across, 3]
    part = _weights(high, height, down) @ part.flatten(2)
    part = part.view(b * c, height, across, 3).transpose(1, 2).flatten(2)
    whole = (_weights(wide, width, across) @ part).view(b, c, width, height, 3).transpose(2, 3)
    return whole.round().clamp(0, 255).to(torch.uint8).contiguous()


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


def _overlap(low: Tensor, high: Tensor, length: int, cells: int) -> Tensor:
    """Pixels of each of the cells along a side that lie between two places: [..., cells]."""
    edges = torch.arange(cells + 1, device=low.device) * (length / cells)
    return (torch.minimum(high[..., None], edges[1:]) - torch.maximum(low[..., None], edges[:-1])).clamp(
        min=0
    )


def relevance_loss(spec: Spec, data: dict[str, Tensor], out: Output, heads: Heads) -> Tensor:
    """Cross entropy between the scores over the image's tokens and the share of the evidence in
    each."""
    wide, high = spec.look if spec.views else (spec.width, spec.height)
    prefix = data["place"].shape[1]
    tokens = out.middle[:, len(START) : prefix]
    asked = out.middle[:, prefix:].gather(1, data["asked"].long()[..., None].expand(-1, -1, tokens.shape[-1]))
    scores = heads.relevance(asked, tokens).float()
    parts = data["parts"]  # [b, asks, parts, 5]
    known = parts[..., 4].sum(-1) > 0
    columns, lines = wide // UNIT, high // UNIT
    over_x = _overlap(parts[..., 0], parts[..., 2], spec.width, columns)
    over_y = _overlap(parts[..., 1], parts[..., 3], spec.height, lines)
    share = (over_y[..., :, None] * over_x[..., None, :]).flatten(3)
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-6) * parts[..., 4, None]
    share = share.sum(2) / share.sum((2, 3))[..., None].clamp(min=1e-6)
    loss = -(share * F.log_softmax(scores, -1)).sum(-1)
    return (loss * known).sum() / known.sum().clamp(min=1)


class Dense(NamedTuple):
    """Images to be read token by token."""

    tokens: Tensor  # [n, m, width]
    rows: Tensor  # [n, p, at least 3]: marks; columns 1 and 2 are their middles
    labels: Tensor  # [n, p, 3]
    width: int
    height: int


def readable(spec: Spec, data: dict[str, Tensor], out: Output, most: int) -> Dense:
    """The first images of a batch, or their zoomed views, of at most about `most` tokens."""
    rows, labels = data["rows"], data["labels"]
    if out.seen is None:
        n = max(1, min(len(rows), most // out.tokens.shape[1]))
        return Dense(out.tokens[:n], rows[:n], labels[:n], spec.width, spec.height)
    b, c = data["crops"].shape[:2]
    n = max(1, min(b, most // 2 // out.seen.shape[1]))  # half: such a step has answers to learn from
    left, top, wide, high = data["crops"][:n, :, None].unbind(-1)  # [n, c, 1]
    x = (rows[:n, None, :, 1] - left) * (spec.zoom[0] / wide)
    y = (rows[:n, None, :, 2] - top) * (spec.zoom[1] / high)
    moved = torch.stack([torch.zeros_like(x), x, y], -1).flatten(0, 1)
    same = labels[:n, None].expand(-1, c, -1, -1).flatten(0, 1)
    return Dense(out.seen[:n].reshape(n * c, -1, out.seen.shape[-1]), moved, same, *spec.zoom)


def dense_losses(seen: Dense, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Characters, shapes and colours."""
    tokens = seen.tokens
    n, m, _ = tokens.shape
    characters, shapes, colours = dense_targets(seen.rows, seen.labels, seen.width, seen.height)
    logits = heads.characters(tokens).view(-1, heads.CHARACTERS).float()
    target = characters.reshape(-1)
    weight = torch.where(target > 0, 1.0, 0.1)
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    read = ((logits.argmax(-1) == target) & (target > 0)).sum() / (target > 0).sum().clamp(min=1)
    shape, colour = (
        heads.things(tokens).view(n * m * heads.PATCHES, -1).float().split([heads.shapes, heads.colours], -1)
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
    if dense == 0:
        return Losses(answer + 0.1 * relevance, answer, zero, zero, relevance, right, zero)
    characters, things, read = dense_losses(readable(spec, data, out, most), heads)
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
