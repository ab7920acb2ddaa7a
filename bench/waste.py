"""How much of the KV cache in use is empty, and what sharing saves, on the real scheduler and block pool.

    python -m bench.waste [--requests 2000] [--block-size 16] [--seed 0]

Chat-like traffic on the planner's simulator: lengths are log-normal with the means published for ShareGPT
conversations (161 prompt and 338 output tokens; the spreads, 1.2 and 0.8, are ours), Qwen3-VL-8B shapes on an
H200, requests arriving faster than they are answered, so that the pool is full. All tokens are distinct.
After each step:

    waste   share of the token slots of blocks in use that hold no token
    saved   with n answers to a prompt: share of the blocks that sharing saves

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
from saccade.engine.cost_prior import H200, coefficients
from saccade.request import Delta, Request, Sampling
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.policy import SchedulerConfig
from saccade.scheduler.sequence import Sequence
from saccade.step_plan import StepOutput, StepPlan
from saccade.tools.planner.simulator import SimulatedMachine, Simulator
from saccade.tools.planner.traffic import Arrival, TrafficKind

PROMPT, OUTPUT = (161.31, 1.2), (337.99, 0.8)  # mean, and sigma of the logarithm
LIMIT = 0.04
KIND = TrafficKind(name="chat")


@dataclass
class Sums:
    """Over all steps."""

    slots: int = 0  # of blocks in use
    tokens: int = 0  # in those blocks
    blocks: int = 0
    unshared: int = 0  # blocks without sharing
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
    """Prompts are distinct: only the n answers of a request share anything."""
    draw = Random(seed)
    for number in range(requests):
        prompt = (1_000 + number,) * length(draw, *PROMPT)
        sampling = Sampling(max_tokens=length(draw, *OUTPUT), n=choices)
        yield Arrival(number / 200, KIND, Request(id=str(number), prompt=prompt, sampling=sampling))


class WasteSimulator(Simulator):
    """Every answer token is distinct; sums up the blocks in use after each step."""

    def __init__(self, block_size: int, tokens: int) -> None:
        costs = coefficients(QWEN3_VL_8B, H200)
        limits = SchedulerConfig(
            max_num_seqs=256,
            max_step_tokens=8192,
            max_model_len=8192,
            block_size=block_size,
            max_encode_patches=32_768,
            max_queue=1 << 30,
            itl_target=20.0,
        )
        super().__init__(
            SimulatedMachine(
                limits=limits,
                blocks=tokens // block_size,
                feature_budget=0,
                feature_bytes=0,
                truth=CostModel(costs, learning=False),
                believed=CostModel(costs),
            )
        )
        self._block_size = block_size
        self._drawn = count(2)
        self.sums = Sums()

    def sample(self, plan: StepPlan) -> StepOutput:
        tokens = tuple(next(self._drawn) for row in plan.scheduled if row.sample)
        return StepOutput(plan.number, tokens, (None,) * len(tokens))

    def record(self, delta: Delta) -> None:
        """Latencies do not matter here."""

    def step(self) -> bool:
        stepped = super().step()
        if stepped and self.scheduler.stats().blocks_used:
            measure(self.scheduler._queues.running, self._block_size, self.sums)
        return stepped


def measure(running: Iterable[Sequence], block_size: int, sums: Sums) -> None:
    """A shared block holds as many tokens as the sequence that has most in it."""
    held: dict[int, int] = {}
    for sequence in running:
        sums.unshared += len(sequence.blocks)
        for index, block in enumerate(sequence.blocks):
            inside = min(max(sequence.num_tokens - index * block_size, 0), block_size)
            held[block] = max(held.get(block, 0), inside)
    sums.slots += len(held) * block_size
    sums.tokens += sum(held.values())
    sums.blocks += len(held)
    sums.most = max(sums.most, len(held))
    sums.steps += 1


def run(requests: int, choices: int, block_size: int, seed: int, tokens: int = 65_536) -> Sums:
    simulator = WasteSimulator(block_size, tokens)
    simulator.run(traffic(requests, choices, seed))
    simulator.scheduler.check()
    return simulator.sums


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
