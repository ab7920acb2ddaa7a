"""Learns how a checkpoint is to weigh the three scorers: the `saccade.balance` section of its config.json.

python -m train.balance MODEL --limit 8

takes   a checkpoint; looks at drawn scenes whose evidence is known
gives   the section, on stdout; beside it, of scenes of another seed, how windows lie by the rule and by what
        was learned. Worth shipping only where the second is better
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from saccade import pictures
from saccade.async_engine import AsyncEngine
from saccade.checkpoint import open_checkpoint
from saccade.evaluate.draw import chunks, places
from saccade.evaluate.methods import EVERYWHERE, covered
from saccade.evaluate.resize import least_tokens
from saccade.lod.balance import balance
from saccade.lod.choose import choose
from saccade.lod.values import SCORERS, Grid, Leanings, LodParams, Picture, ViewRule
from saccade.media.geometry import ImageProcessing
from saccade.views import views_of

SHARES = (0.25, 0.125)  # of full detail's tokens, asked with
CHUNK = 8  # scenes drawn ahead
COUNT = 200  # questions of a task, of which `limit` are taken
LEAST = 1e-3  # mass on the evidence that counts at least: a question nobody understood decides nothing
DECAY = 1e-3  # of the squares of leanings


@dataclass(frozen=True)
class Seen:
    """One look at a picture whose evidence is known."""

    picture: Picture
    budget: int
    box: tuple[float, float, float, float]  # of the evidence

    @property
    def felt(self) -> list[float]:
        """1 and the three tensions."""
        weights = balance(self.picture.look).weights
        return [1.0, weights.particularise, weights.explore, weights.diversify]

    @property
    def held(self) -> list[float]:
        """Of each scorer's map, how much lies on the evidence."""
        look = self.picture.look
        on = evidence(self.picture.grid, self.picture.size, self.box)
        return [float((share * on).sum()) for share in (*look.still.shares, look.share)]


def evidence(grid: Grid, size: tuple[int, int], box: Sequence[float]) -> NDArray[np.float64]:
    """How much of each cell of a grid over a picture lies in a box."""

    def along(low: float, high: float, cells: int, length: int) -> NDArray[np.float64]:
        edges = np.arange(cells + 1) * length / cells
        inside = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
        return np.asarray(np.clip(inside, 0, None) * cells / length, np.float64)

    return np.outer(along(box[1], box[3], grid[0], size[1]), along(box[0], box[2], grid[1], size[0]))


def learn(seen: Sequence[Seen]) -> Leanings:
    """The leanings with which most of the relevance lies on the evidence, by the mean of its logarithm."""
    felt = torch.tensor([one.felt for one in seen], dtype=torch.float64)
    held = torch.tensor([one.held for one in seen], dtype=torch.float64)
    leanings = torch.zeros(len(SCORERS), felt.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([leanings], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        mass = ((felt @ leanings.T).softmax(-1) * held).sum(-1)
        found = DECAY * leanings.square().sum() - (mass + LEAST).log().mean()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    return tuple(tuple(round(value, 3) for value in row) for row in leanings.tolist())


def told(seen: Sequence[Seen], rule: ViewRule) -> str:
    """How much of the evidence windows hold, how often nine tenths of it, and what they cost."""
    chosen = [choose([one.picture], one.budget, LodParams(budget=one.budget), rule)[0] for one in seen]
    held = np.array([covered(one.box, choice.regions) for one, choice in zip(seen, chosen, strict=True)])
    tokens = np.mean([choice.spent for choice in chosen])
    return f"{held.mean():6.1%} of the evidence, wholly {np.mean(held > 0.9):6.1%}, {tokens:5.1f} tokens"


async def look(model: str, image: ImageProcessing, seed: int, limit: int) -> list[Seen]:
    wanted = [(task, index, seed) for task, index in places(pictures.TASKS, COUNT, limit)]
    seen = []
    async with AsyncEngine(model) as engine:
        drawn = chain.from_iterable(chunks(wanted, CHUNK, 1))
        shown = track(drawn, f"scenes {seed}", len(wanted), console=Console(stderr=True))
        for example in shown:
            seen += [one async for one in _looks(engine, image, example)]
    return seen


async def _looks(
    engine: AsyncEngine, image: ImageProcessing, example: pictures.Example
) -> AsyncIterator[Seen]:
    height, width = example.image.shape[:2]
    x0, y0, x1, y1 = example.box
    if (x1 - x0) * (y1 - y0) > EVERYWHERE * width * height:
        return  # in no place
    content = [{"type": "image", "image": example.image}, {"type": "text", "text": example.question}]
    rows, columns = image.token_grid(width, height)
    for share in SHARES:
        asked = LodParams(budget=max(int(rows * columns * share), least_tokens(image)))
        found = await engine.look([{"role": "user", "content": content}], lod=asked)
        for item, one in zip(found.pictures, found.zoomed.looks, strict=True):
            picture = Picture(look=one, size=(width, height), frame=item.full, grid=item.view.token_grid)
            yield Seen(picture, found.budget, (x0, y0, x1, y1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--scenes", type=int, default=777, help="seed of the scenes it learns from")
    parser.add_argument("--tried", type=int, default=779, help="seed of those it is tried on")
    parser.add_argument("--limit", type=int, default=8, help="questions per task")
    given = parser.parse_args()
    checkpoint = open_checkpoint(given.model)
    if checkpoint.image is None:
        raise SystemExit(f"{given.model} sees no pictures")
    rule = msgspec.structs.replace(views_of(checkpoint).rule, leanings=None)
    image, seeds = checkpoint.image, (given.scenes, given.tried)
    seen, others = (asyncio.run(look(given.model, image, seed, given.limit)) for seed in seeds)
    learned = learn(seen)
    print(f"{len(seen)} looks, tried on {len(others)}")
    print(f"by the rule  {told(others, rule)}")
    print(f"as learned   {told(others, msgspec.structs.replace(rule, leanings=learned))}")
    print(json.dumps({"balance": dict(zip(SCORERS, learned, strict=True))}))


if __name__ == "__main__":
    main()
