"""Three ways to score the places of a picture, over the tokens of its global view.

takes   the picture's texture; the question's coupling with the view's tokens (of a head, or queries and keys)
gives   maps float32 [rows, columns], >= 0, on the device they came from
never   waits for the device

propositional   what a place says: its information content, question or not
perspectival    how it stands out: each channel against its surround
participatory   how the question takes hold of it
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.vision.texture import means_triton
from saccade.lod.texture import EDGE, ENTROPY, GREEN_RED, LIGHT, TEXT
from saccade.lod.types import FINE, Grid, StillMaps

SALIENT = (LIGHT, GREEN_RED, EDGE, ENTROPY, TEXT)
STILL = ("propositional", "perspectival", "lost", "fine")  # parts of `still`
NOTHING = -1e30  # a score without a share; finite, for its share of 0 is multiplied by it
STILL_MAPS = len(STILL) - 1 + FINE * FINE  # maps of a token's size they come to


def pooled(texture: Tensor, channels: Sequence[int], grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """Means of some channels [n, rows, columns] over the tokens of a view of the whole picture."""
    if use_triton("texture", texture, mode):
        return means_triton(texture, channels, grid)
    # A list as an index would be copied from the host, which no captured call may do.
    chosen = torch.stack([texture[channel] for channel in channels])
    return F.adaptive_avg_pool2d(chosen[None], grid)[0]


def propositional(texture: Tensor, grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """Information content: shades times edges, so that blank paper and smooth shading say little."""
    mean = pooled(texture, (ENTROPY, EDGE), grid, mode)
    return mean[0] * mean[1]


def perspectival(texture: Tensor, grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """Salience: how far each channel is from its surround, near and far, in units of its spread."""
    mean = pooled(texture, SALIENT, grid, mode)
    spread = mean.flatten(1).std(1, correction=0).clamp(min=1e-3)[:, None, None]
    near, far = (_surround(mean, width) for width in (3, 7))
    return ((mean - near).abs() + (mean - far).abs()).div(spread).mean(0)


def _surround(mean: Tensor, width: int) -> Tensor:
    """Mean of a square around each place, the place itself left out."""
    count = F.avg_pool2d(torch.ones_like(mean[:1]), width, 1, width // 2) * width * width
    total = F.avg_pool2d(mean, width, 1, width // 2) * width * width
    return torch.where(count > 1.5, (total - mean) / (count - 1).clamp(min=1), mean)


def lost(texture: Tensor, grid: Grid, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """What a coarse view loses first, writing: how much of it is around each token, 0..1."""
    return pooled(texture, (TEXT,), grid, mode)[0]


def still(
    texture: Tensor,
    grid: Grid,
    streams: Sequence[torch.cuda.Stream] = (),
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    """What does not depend on the question [STILL_MAPS, rows, columns], in the order of `STILL`; worth
    keeping with the picture. With streams (inside a captured call, where they become branches) the parts run
    side by side; without, one after the other: launched one by one they are done before the host has changed
    streams."""
    rows, columns = grid
    found = texture.new_empty(STILL_MAPS, rows, columns)
    places = found[3:].view(FINE, FINE, rows, columns).permute(2, 0, 3, 1)  # row, place in it, column, place
    finer = (rows * FINE, columns * FINE)
    parts: list[Callable[[], object]] = [
        lambda: found[0].copy_(propositional(texture, grid, mode)),
        lambda: found[1].copy_(perspectival(texture, grid, mode)),
        lambda: found[2].copy_(lost(texture, grid, mode)),
        lambda: places.copy_(propositional(texture, finer, mode).view(rows, FINE, columns, FINE)),
    ]
    side_by_side(parts, streams)
    return found


def from_head(question: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """By a learned head: question [..., 64], places [..., tokens, 64] -> shares [..., tokens], and the
    scores' strength [...]. Here and below looks at equally many tokens may go together, in front."""
    scores = (places.float() @ question.float()[..., None])[..., 0] / question.shape[-1] ** 0.5
    return scores.softmax(-1), scores.logsumexp(-1)


def from_attention(queries: Tensor, keys: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Without training: queries [..., layers, questions, heads, dim], keys [..., layers, tokens, kv_heads,
    dim], both as attention sees them (normed, turned) -> shares [..., tokens], and the scores' strength.
    `real` [...]: how many of the tokens count, at least 1; those behind them have no share.

    A head that looks everywhere says nothing about the question: heads count by how concentrated they are."""
    *front, _, dim = queries.shape
    grouped = (queries.float() / dim**0.5).reshape(*front, keys.shape[-2], -1, dim)
    # [..., layers, kv_heads, heads of each, questions, tokens]
    scores = torch.einsum("...lqkgd,...ltkd->...lkgqt", grouped, keys.float())
    flat: float | Tensor = math.log(max(2, keys.shape[-3]))  # entropy of a flat map
    if real is not None:
        behind = torch.arange(keys.shape[-3], device=keys.device) >= real[..., None]
        scores = scores.masked_fill(behind[..., None, None, None, None, :], NOTHING)
        flat = real.clamp(min=2).log()[..., None, None, None, None]
    logs = scores.log_softmax(-1)  # few kernels: on a GPU their launches are what a look costs
    share = logs.exp()
    narrow = 1 + (share * logs).sum(-1) / flat  # 1 - entropy over a flat map's
    weight = narrow.clamp(min=1e-4).square().flatten(-4)
    mixed = (weight[..., None, :] @ share.flatten(-5, -2)).squeeze(-2)
    shares = mixed / mixed.sum(-1, keepdim=True).clamp(min=1e-9)
    return shares, (scores[..., 0] - logs[..., 0]).mean((-4, -3, -2, -1))


def side_by_side(parts: Sequence[Callable[[], object]], streams: Sequence[torch.cuda.Stream] = ()) -> None:
    """Runs each part on a stream of its own, one after the other where none are given. What parts leave must
    be tensors that were there before."""
    if not streams:
        for part in parts:
            part()
        return
    here = torch.cuda.current_stream(streams[0].device)
    for part, stream in zip(parts, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            part()
    for stream in streams:
        here.wait_stream(stream)


def still_maps(numbers: NDArray[np.float32], grid: Grid) -> StillMaps:
    """What `still` gave, once it is on the host; a copy, to be kept."""
    rows, columns = grid
    maps = numbers.reshape(STILL_MAPS, rows, columns)
    fine = maps[3:].reshape(FINE, FINE, rows, columns).transpose(2, 0, 3, 1).copy()
    propositional, perspectival, lost = maps[:3].copy()
    return StillMaps(
        propositional=propositional,
        perspectival=perspectival,
        lost=lost,
        fine=fine.reshape(rows * FINE, columns * FINE),
    )
