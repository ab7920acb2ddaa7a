"""Three relevance scorers over the tokens of a global view; maps are float32 [rows, columns], >= 0.

propositional   information content, independent of the question
perspectival    salience: each texture channel against its surround
participatory   coupling of the question with the view's tokens

Nothing here synchronises with the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.errors import CheckpointError
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.vision.texture import means_triton
from saccade.lod.checkpoint_views import RelevanceHead
from saccade.lod.texture import EDGE, ENTROPY, GREEN_RED, LIGHT, TEXT
from saccade.lod.types import FINE, Grid, ImageMaps

HEAD_EPS = 1e-6
SALIENT = (LIGHT, GREEN_RED, EDGE, ENTROPY, TEXT)
NUM_IMAGE_MAPS = 3 + FINE * FINE  # see `image_maps`; the fine map counts FINE^2 times


def pool_channels(
    texture: Tensor, channels: Sequence[int], grid: Grid, mode: KernelMode = DEFAULT_MODE
) -> Tensor:
    """Means of texture channels over the tokens of a view of the whole image: [n, rows, columns]."""
    if use_triton("texture", texture, mode):
        return means_triton(texture, channels, grid)
    # Indexing with a list copies it from the host, which CUDA graph capture forbids.
    chosen = torch.stack([texture[channel] for channel in channels])
    return F.adaptive_avg_pool2d(chosen[None], grid)[0]


def propositional(texture: Tensor, grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """Information content: entropy times edges, so that blank and smoothly shaded areas score low."""
    mean = pool_channels(texture, (ENTROPY, EDGE), grid, mode)
    return mean[0] * mean[1]


def perspectival(texture: Tensor, grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """Salience: distance of each channel from its near and far surround, in standard deviations."""
    mean = pool_channels(texture, SALIENT, grid, mode)
    spread = mean.flatten(1).std(1, correction=0).clamp(min=1e-3)[:, None, None]
    near, far = (_surround(mean, width) for width in (3, 7))
    return ((mean - near).abs() + (mean - far).abs()).div(spread).mean(0)


def _surround(mean: Tensor, width: int) -> Tensor:
    """Mean of the square around each cell, without the cell."""
    count = F.avg_pool2d(torch.ones_like(mean[:1]), width, 1, width // 2) * width * width
    total = F.avg_pool2d(mean, width, 1, width // 2) * width * width
    return torch.where(count > 1.5, (total - mean) / (count - 1).clamp(min=1), mean)


def lost(texture: Tensor, grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """Text density around each token, 0..1: what a coarse view loses first."""
    return pool_channels(texture, (TEXT,), grid, mode)[0]


def image_maps(texture: Tensor, grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """The question-independent maps [NUM_IMAGE_MAPS, rows, columns]: propositional, perspectival, lost, and
    the propositional one at FINE times the resolution."""
    rows, columns = grid
    fine = propositional(texture, (rows * FINE, columns * FINE), mode)
    found = texture.new_empty(NUM_IMAGE_MAPS, rows, columns)
    found[0].copy_(propositional(texture, grid, mode))
    found[1].copy_(perspectival(texture, grid, mode))
    found[2].copy_(lost(texture, grid, mode))
    # [FINE, FINE, rows, columns] seen as [rows, FINE, columns, FINE]
    in_tokens = found[3:].view(FINE, FINE, rows, columns).permute(2, 0, 3, 1)
    in_tokens.copy_(fine.view(rows, FINE, columns, FINE))
    return found


@dataclass(frozen=True)
class RelevanceHeadWeights:
    """score = question(norm(h_question)) . place(norm(h_place)) / sqrt(width), after `layer` layers."""

    layer: int
    norm: Tensor  # [hidden] float32
    question: Tensor  # [width, hidden] float32
    place: Tensor

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, named: RelevanceHead, hidden: int, device: torch.device, *, dummy: bool
    ) -> "RelevanceHeadWeights":
        shapes = {
            "relevance_norm.weight": (hidden,),
            "question.weight": (named.width, hidden),
            "place.weight": (named.width, hidden),
        }
        generator = torch.Generator().manual_seed(0)
        if dummy:
            found = {
                name: torch.randn(shape, generator=generator) / hidden**0.5 for name, shape in shapes.items()
            }
        else:
            found = _read(checkpoint, named.file, shapes)
        norm, question, place = (found[name].to(device, torch.float32) for name in shapes)
        return cls(named.layer, norm, question, place)

    def normed(self, states: Tensor) -> Tensor:
        x = states.float()
        return x * (x.square().mean(-1, keepdim=True) + HEAD_EPS).rsqrt() * self.norm


def _read(checkpoint: Checkpoint, file: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    try:
        with safe_open(checkpoint.path / file, framework="pt") as stored:
            found = {name: stored.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}, which config.json names, cannot be read: {error}") from error
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise CheckpointError(f"{file}: {name} is {tuple(found[name].shape)}; the model needs {shape}")
    return found


def from_head(question: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Learned head: question [..., 64], places [..., tokens, 64] -> shares [..., tokens], strength [...]."""
    scores = (places.float() @ question.float()[..., None])[..., 0] / question.shape[-1] ** 0.5
    return scores.softmax(-1), scores.logsumexp(-1)


def from_attention(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Without training: queries [..., layers, questions, heads, dim], keys [..., layers, tokens, kv_heads,
    dim], both normalised and rotated as attention uses them -> shares [..., tokens], strength [...].

    Heads are weighted by how concentrated they are: a head that attends everywhere says nothing."""
    *front, _, dim = queries.shape
    grouped = (queries.float() / dim**0.5).reshape(*front, keys.shape[-2], -1, dim)
    # [..., layers, kv_heads, heads of each, questions, tokens]
    scores = torch.einsum("...lqkgd,...ltkd->...lkgqt", grouped, keys.float())
    flat = math.log(max(2, keys.shape[-3]))  # entropy of a uniform map
    logs = scores.log_softmax(-1)  # few kernels: launches dominate on a GPU
    share = logs.exp()
    narrow = 1 + (share * logs).sum(-1) / flat  # 1 - normalised entropy
    weight = narrow.clamp(min=1e-4).square().flatten(-4)
    mixed = (weight[..., None, :] @ share.flatten(-5, -2)).squeeze(-2)
    shares = mixed / mixed.sum(-1, keepdim=True).clamp(min=1e-9)
    return shares, (scores[..., 0] - logs[..., 0]).mean((-4, -3, -2, -1))


def unpack_image_maps(numbers: NDArray[np.float32], grid: Grid) -> ImageMaps:
    """The output of `image_maps` on the host, copied."""
    rows, columns = grid
    maps = numbers.reshape(NUM_IMAGE_MAPS, rows, columns)
    fine = maps[3:].reshape(FINE, FINE, rows, columns).transpose(2, 0, 3, 1).copy()
    propositional, perspectival, lost = maps[:3].copy()
    return ImageMaps(
        propositional=propositional,
        perspectival=perspectival,
        lost=lost,
        fine=fine.reshape(rows * FINE, columns * FINE),
    )
