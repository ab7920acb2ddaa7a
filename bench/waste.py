"""How much of the KV cache in use holds nothing, and what sharing saves: real scheduler, real allocator.

    python -m bench.waste [--requests 2000] [--block-size 16] [--seed 0]

Chat-like traffic on the virtual clock of the planner: lengths are log-normal with the means published
for ShareGPT conversations (161 prompt and 338 output tokens; the spreads, 1.2 and 0.8, are ours), Qwen3-VL-8B
shapes on an H200, requests coming faster than they can be answered, so that the pool is full. Every token of
every answer is another one. After each step:

    waste   the slots of all blocks in use that hold no token of anybody, over all slots in use
    saved   with n answers to a prompt: the blocks that would be in use if nobody shared, less those that are

Fails if the waste is 4% or more.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from bench.simulate import QWEN3_VL_8B
from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.request import Request, Sampling
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.cost_prior import H200, coefficients
from saccade.scheduler.scheduler import Limits, Scheduler
from saccade.scheduler.sequence import Sequence
from saccade.step_plan import StepResult
from saccade.tools.planner.play import work_of
from saccade.tools.planner.traffic import Arrival, Kind

PROMPT, OUTPUT = (161.31, 1.2), (337.99, 0.8)  # mean, and sigma of the logarithm
LIMIT = 0.04
KIND = Kind(name="chat")


@dataclass
class Sums:
    """Over all steps."""

    slots: int = 0  # of blocks in use
    tokens: int = 0  # they hold
    blocks: int = 0
    unshared: int = 0  # blocks there would be
    steps: int = 0
    most: int = 0

    @property
    def waste(self) -> float:
        return 1 - self.tokens / self.slots

    @property
    def saved(self) -> float:
        return 1 - self.blocks / self.unshared


def length(draw: Random, mean: float, sigma: float) -> int:
    value = draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return min(max(round(value), 1), 4096)


def traffic(requests: int, choices: int, seed: int) -> Iterator[Arrival]:
    """Every prompt is another one: nothing is shared but between the choices of a request."""
    draw = Random(seed)
    for number in range(requests):
        prompt = (1_000 + number,) * length(draw, *PROMPT)
        sampling = Sampling(max_tokens=length(draw, *OUTPUT), n=choices)
        yield Arrival(number / 200, KIND, Request(id=str(number), prompt=prompt, sampling=sampling))


class Player:
    """The scheduler on a virtual clock, as saccade.tools.planner has it, but no two answers are alike."""

    def __init__(self, block_size: int, tokens: int) -> None:
        self.now = 0.0
        costs = coefficients(QWEN3_VL_8B, H200)
        limits = Limits(
            max_rows=256,
            max_step_tokens=8192,
            max_model_len=8192,
            block_size=block_size,
            max_encode_patches=32_768,
            max_queue=1 << 30,
            itl_target=20.0,
        )
        pool = BlockPool(tokens // block_size)
        prefix = PrefixCache(pool, block_size)
        store: EncoderCache[None] = EncoderCache(0)
        self._truth = CostModel(costs, learning=False)
        self._drawn = count(2)
        self.scheduler = Scheduler(limits, pool, prefix, store, CostModel(costs), clock=lambda: self.now)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        seconds = self._truth.predict(work_of(plan, 1)) / 1e3
        self.now += seconds
        tokens = tuple(next(self._drawn) for row in plan.rows if row.sample)
        self.scheduler.apply(plan, StepResult(plan.number, tokens, (None,) * len(tokens)), seconds)
        return True

    @property
    def running(self) -> Iterable[Sequence]:
        return self.scheduler._places.running


def measure(running: Iterable[Sequence], block_size: int, sums: Sums) -> None:
    """The tokens each block in use holds: of whoever has most in it."""
    held: dict[int, int] = {}
    for sequence in running:
        sums.unshared += len(sequence.blocks)
        for index, block in enumerate(sequence.blocks):
            inside = min(max(sequence.length - index * block_size, 0), block_size)
            held[block] = max(held.get(block, 0), inside)
    sums.slots += len(held) * block_size
    sums.tokens += sum(held.values())
    sums.blocks += len(held)
    sums.most = max(sums.most, len(held))
    sums.steps += 1


def run(requests: int, choices: int, block_size: int, seed: int, tokens: int = 65_536) -> Sums:
    player, sums = Player(block_size, tokens), Sums()
    coming = traffic(requests, choices, seed)
    following = next(coming, None)
    while following is not None or not player.scheduler.idle:
        while following is not None and following.at <= player.now:
            player.scheduler.add(following.request, lay_out_prompt(following.request))
            following = next(coming, None)
        if not player.step():
            player.now = following.at if following is not None else player.now
        elif player.scheduler.stats().blocks_used:
            measure(player.running, block_size, sums)
    player.scheduler.check()
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        f"{'n':>3} {'requests':>9} {'steps':>8} {'blocks in use':>14} {'waste':>7} {'saved by sharing':>17}"
    )
    worst = 0.0
    for choices in (1, 2, 4, 8):
        requests = max(options.requests // choices, 1)
        sums = run(requests, choices, options.block_size, options.seed)
        mean = sums.blocks / sums.steps
        print(
            f"{choices:3} {requests:9,} {sums.steps:8,} {mean:7,.0f} ({sums.most:5,}) {sums.waste:7.2%} "
            f"{sums.saved:8.1%}",
            flush=True,
        )
        worst = max(worst, sums.waste) if choices == 1 else worst
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
