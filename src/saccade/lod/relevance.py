"""Three ways to score the places of a picture, over the tokens of its global view.

takes   the picture's texture; the question's coupling with the view's tokens (of a head, or queries and keys)
gives   maps float32 [rows, columns], >= 0, on the device they came from; `Look`s on the host
never   waits for the device, but in `to_look`

propositional   what a place says: its information content, question or not
perspectival    how it stands out: each channel against its surround
participatory   how the question takes hold of it
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.lod.texture import EDGE, ENTROPY, GREEN_RED, LIGHT, TEXT
from saccade.lod.values import Grid, Look

SALIENT = (LIGHT, GREEN_RED, EDGE, ENTROPY, TEXT)
STILL = ("propositional", "perspectival", "lost")  # rows of `still`


def pooled(texture: Tensor, grid: Grid) -> Tensor:
    """Means [channels, rows, columns] over the tokens of a view of the whole picture."""
    return F.adaptive_avg_pool2d(texture[None], grid)[0]


def propositional(texture: Tensor, grid: Grid) -> Tensor:
    """Information content: shades times edges, so that blank paper and smooth shading say little."""
    mean = pooled(texture[[ENTROPY, EDGE]], grid)
    return mean[0] * mean[1]


def perspectival(texture: Tensor, grid: Grid) -> Tensor:
    """Salience: how far each channel is from its surround, near and far, in units of its spread."""
    mean = pooled(texture[list(SALIENT)], grid)
    spread = mean.flatten(1).std(1, correction=0).clamp(min=1e-3)[:, None, None]
    near, far = (_surround(mean, width) for width in (3, 7))
    return ((mean - near).abs() + (mean - far).abs()).div(spread).mean(0)


def _surround(mean: Tensor, width: int) -> Tensor:
    """Mean of a square around each place, the place itself left out."""
    count = F.avg_pool2d(torch.ones_like(mean[:1]), width, 1, width // 2) * width * width
    total = F.avg_pool2d(mean, width, 1, width // 2) * width * width
    return torch.where(count > 1.5, (total - mean) / (count - 1).clamp(min=1), mean)


def lost(texture: Tensor, grid: Grid) -> Tensor:
    """What a coarse view loses first, writing: how much of it is around each token, 0..1."""
    return pooled(texture[TEXT : TEXT + 1], grid)[0]


def still(texture: Tensor, grid: Grid) -> Tensor:
    """What does not depend on the question [3, rows, columns], in the order of `STILL`; worth keeping with
    the picture. On a GPU the three run side by side."""
    parts: list[Callable[[], Tensor]] = [
        lambda: propositional(texture, grid),
        lambda: perspectival(texture, grid),
        lambda: lost(texture, grid),
    ]
    return torch.stack(side_by_side(parts, texture.device))


def from_head(question: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """By a learned head: question [64], places [tokens, 64] -> shares [tokens], and the scores' strength."""
    scores = places.float() @ question.float() / question.shape[-1] ** 0.5
    return scores.softmax(-1), scores.logsumexp(-1)


def from_attention(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Without training: queries [layers, questions, heads, dim], keys [layers, tokens, kv_heads, dim], both
    as attention sees them (normed, turned) -> shares [tokens], and the scores' strength.

    A head that looks everywhere says nothing about the question: heads count by how concentrated they are."""
    _, _, heads, dim = queries.shape
    groups = heads // keys.shape[2]
    spread = keys.float().repeat_interleave(groups, 2)
    scores = torch.einsum("lqhd,lthd->lhqt", queries.float(), spread) / dim**0.5
    share = scores.softmax(-1)  # [layers, heads, questions, tokens]
    widest = math.log(max(2, share.shape[-1]))
    entropy = -(share * share.clamp(min=1e-9).log()).sum(-1) / widest
    weight = (1 - entropy).clamp(min=1e-4).square()
    mixed = (share * weight[..., None]).sum((0, 1, 2))
    return mixed / mixed.sum().clamp(min=1e-9), scores.logsumexp(-1).mean()


def side_by_side(parts: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Runs the parts on a CUDA stream each; one after the other where there are no streams."""
    if device.type != "cuda" or len(parts) < 2:
        return [part() for part in parts]
    here = torch.cuda.current_stream(device)
    done: list[Tensor] = []
    for part in parts:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found = part()
        here.wait_stream(stream)
        found.record_stream(here)
        done.append(found)
    return done


def score(texture: Tensor, grid: Grid, coupling: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """All of one look, [4 * tokens + 1] on the device: propositional, perspectival, lost, participatory, the
    strength. `coupling` gives what `from_head` or `from_attention` give."""

    def participatory() -> Tensor:
        share, strength = coupling()
        return torch.cat([share.flatten(), strength.reshape(1)])

    parts = [
        lambda: propositional(texture, grid).flatten(),
        lambda: perspectival(texture, grid).flatten(),
        lambda: lost(texture, grid).flatten(),
        participatory,
    ]
    return torch.cat(side_by_side(parts, texture.device))


def to_look(scores: Tensor, grid: Grid) -> Look:
    """A look out of `score`'s numbers; brings them to the host."""
    numbers = scores.float().cpu().numpy()
    maps = numbers[:-1].reshape(4, *grid)
    return Look(
        propositional=maps[0],
        perspectival=maps[1],
        lost=maps[2],
        participatory=maps[3],
        strength=float(numbers[-1]),
    )
