"""Learns how a checkpoint is to weigh the three scorers: the `saccade.balance` section of its config.json.

python -m training.balance MODEL --limit 8

takes   a checkpoint; looks at drawn scenes whose evidence is known
gives   the section, on stdout; before it, of scenes of another seed, how windows lie by the rule and by what
        was learned. Worth shipping only where the second is better
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from saccade import pictures
from saccade.async_llm import AsyncEngine
from saccade.checkpoint import open_checkpoint
from saccade.errors import SaccadeError
from saccade.inputs.image_processor import ImageProcessing
from saccade.lod.balance import felt
from saccade.lod.checkpoint_views import views_of
from saccade.lod.choose import choose
from saccade.lod.types import SCORERS, Grid, Leanings, LodParams, Picture, ViewRule
from saccade.tools.evaluation.draw import places
from saccade.tools.evaluation.methods import EVERYWHERE, covered
from saccade.tools.evaluation.resize import least_tokens

SHARES = (0.25, 0.125)  # of full detail's tokens, asked with, as far as a picture may be that small
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
    def whole(self) -> bool:
        """Whether all three scorers have something to say; else there is less to weigh."""
        return all(self.picture.look.still.said) and bool(self.picture.look.share.any())

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
    tensions = torch.tensor([felt(one.picture.look) for one in seen], dtype=torch.float64)
    held = torch.tensor([one.held for one in seen], dtype=torch.float64)
    leanings = torch.zeros(len(SCORERS), tensions.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([leanings], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        mass = ((tensions @ leanings.T).softmax(-1) * held).sum(-1)
        found = DECAY * leanings.square().sum() - (mass + LEAST).log().mean()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    found: Leanings = msgspec.convert([[round(one, 3) for one in row] for row in leanings.tolist()], Leanings)
    return found


def told(seen: Sequence[Seen], rule: ViewRule) -> str:
    """How much of the evidence the best window holds, how often more than nine tenths, and what all windows
    cost."""
    chosen = [choose([one.picture], one.budget, LodParams(budget=one.budget), rule)[0] for one in seen]
    held = np.array([covered(one.box, choice.regions) for one, choice in zip(seen, chosen, strict=True)])
    tokens = np.mean([choice.spent for choice in chosen])
    return f"{held.mean():6.1%} of the evidence, nearly all {np.mean(held > 0.9):6.1%}, {tokens:5.1f} tokens"


async def look(model: str, image: ImageProcessing, seeds: Sequence[int], limit: int) -> list[list[Seen]]:
    """At scenes of each seed."""
    found: list[list[Seen]] = []
    async with AsyncEngine(model) as engine:
        for seed in seeds:
            wanted = places(pictures.TASKS, COUNT, limit)
            seen: list[Seen] = []
            for task, index in track(wanted, f"scenes {seed}", console=Console(stderr=True)):
                example = pictures.example(task, index, seed)
                seen += [one async for one in _looks(engine, image, example) if one.whole]
            found.append(seen)
    return found


async def _looks(
    engine: AsyncEngine, image: ImageProcessing, example: pictures.Example
) -> AsyncIterator[Seen]:
    height, width = example.image.shape[:2]
    x0, y0, x1, y1 = example.box
    if (x1 - x0) * (y1 - y0) > EVERYWHERE * width * height:
        return  # in no place
    content = [{"type": "image", "image": example.image}, {"type": "text", "text": example.question}]
    rows, columns = image.token_grid(width, height)
    budgets = {max(int(rows * columns * share), least_tokens(image)) for share in SHARES}
    for budget in sorted(one for one in budgets if one < rows * columns):
        found = await engine.look([{"role": "user", "content": content}], lod=LodParams(budget=budget))
        for item, one in zip(found.pictures, found.zoomed.looks, strict=True):
            picture = Picture(look=one, size=(width, height), frame=item.full, grid=item.view.token_grid)
            yield Seen(picture, found.budget, (x0, y0, x1, y1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--scenes", type=int, default=777, help="seed of the scenes it learns from")
    parser.add_argument("--tried", type=int, default=779, help="seed of those it is tried on")
    parser.add_argument("--limit", type=int, default=8, help=f"questions per task, 1 to {COUNT}")
    given = parser.parse_args()
    if not 1 <= given.limit <= COUNT:
        parser.error(f"--limit is {given.limit}; 1 to {COUNT} questions per task can be asked")
    if given.scenes == given.tried:
        parser.error(
            f"--scenes and --tried are both {given.scenes}; it would be tried on what it learned from"
        )
    try:
        checkpoint = open_checkpoint(given.model)
    except SaccadeError as error:
        parser.error(str(error))
    if checkpoint.image is None:
        parser.error(f"{given.model} sees no pictures")
    seeds = given.scenes, given.tried
    seen, others = asyncio.run(look(given.model, checkpoint.image, seeds, given.limit))
    if not seen or not others:
        parser.error(
            "in no look did all three scorers have something to say; ask about more scenes (--limit)"
        )
    rule, learned = msgspec.structs.replace(views_of(checkpoint).rule, leanings=None), learn(seen)
    print(f"{len(seen)} looks, tried on {len(others)}")
    print(f"by the rule  {told(others, rule)}")
    print(f"as learned   {told(others, msgspec.structs.replace(rule, leanings=learned))}")
    print(json.dumps({"balance": dict(zip(SCORERS, learned, strict=True))}))


if __name__ == "__main__":
    main()
