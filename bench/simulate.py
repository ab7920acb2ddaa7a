"""Mixed traffic by the hundred thousand on the real scheduler and a virtual clock.

    python -m bench.simulate [--requests 100000] [--seed 0] [--scene NAME]

Qwen3-VL-8B shapes at an H200's ceilings, on five machines: `roomy` with the whole memory; `tight` with a KV
pool in which two videos do not fit together and a feature cache of one picture, so that requests queue for
memory, give way and come back from host memory; `pictures` with a pool in which two pictures do not fit
together, and hardly anything else; `pools` with a small pool for text and one for views in which two videos
do not fit together; `kept` the same with features of all pictures kept, so that known ones wait for it
among the texts. Prints what happened; fails if anybody is left or waited beyond the bound, or anything is
still held.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np

from saccade.encoder.partial_views import segment_layers
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.cost_prior import H200, Network, coefficients
from saccade.scheduler.policy import Limits
from saccade.tools.planner.play import Machine, Outcome, Player
from saccade.tools.planner.traffic import Kind, Vision, arrivals

QWEN3_VL_8B = Network(36, 32, 8, 128, 4096, 151_936, 7_568_000_000, 2, 27, 1152, 425_000_000)
TRAFFIC = (
    Kind(name="text", rate=20, prompt=130, output=64, shared=40),
    Kind(name="urgent", rate=2, prompt=130, output=32, priority=-1),
    Kind(name="background", rate=2, prompt=600, output=128, priority=2),
    Kind(name="picture", rate=3, prompt=64, output=64, image=(1024, 1024)),
    Kind(name="small picture", rate=4, prompt=64, output=32, image=(448, 448)),
    Kind(name="known picture", rate=4, prompt=64, output=64, image=(1024, 1024), distinct=64),
    Kind(name="video", rate=0.5, prompt=64, output=64, video=(640, 360), frames=48),
)
BLOCK = 16


@dataclass(frozen=True)
class Scene:
    blocks: int
    feature_budget: int  # bytes
    speed: float  # of the traffic, against the rates above
    longest: float  # seconds to a first token that nobody's wait may exceed
    kinds: tuple[str, ...] = tuple(kind.name for kind in TRAFFIC)
    vision: int = 0  # of the blocks, a pool for the views
    slots: int = 1_800  # KV blocks of host memory: 4 GiB


SCENES = {
    "roomy": Scene(blocks=48_000, feature_budget=2 << 30, speed=1.0, longest=2.0),
    "tight": Scene(blocks=400, feature_budget=32 << 20, speed=0.7, longest=60.0),
    "pictures": Scene(
        blocks=120,
        feature_budget=16 << 20,
        speed=0.4,
        longest=60.0,
        kinds=("text", "urgent", "background", "picture", "small picture", "known picture"),
    ),
    "pools": Scene(blocks=560, feature_budget=32 << 20, speed=0.7, longest=60.0, vision=360),
    "kept": Scene(blocks=560, feature_budget=2 << 30, speed=0.7, longest=60.0, vision=360),
}


def machine(scene: Scene) -> Machine:
    costs = coefficients(QWEN3_VL_8B, H200)
    limits = Limits(
        max_rows=256,
        max_step_tokens=8192,
        max_model_len=32_768,
        block_size=BLOCK,
        max_encode_patches=32_768,
        max_queue=1 << 30,
        itl_target=20.0,
        encode_layers=QWEN3_VL_8B.vision_depth,
        encode_unit=segment_layers(QWEN3_VL_8B.vision_depth),
    )
    return Machine(
        limits=limits,
        blocks=scene.blocks,
        vision=scene.vision,
        feature_budget=scene.feature_budget,
        feature_bytes=4 * QWEN3_VL_8B.hidden * 2,
        truth=CostModel(costs, learning=False),
        believed=CostModel(costs),
        swap_slots=scene.slots,
        swap_seconds=BLOCK * QWEN3_VL_8B.kv_bytes / H200.link,
    )


def traffic(scene: Scene) -> list[Kind]:
    chosen = [kind for kind in TRAFFIC if kind.name in scene.kinds]
    numbers = [{**vars(kind), "rate": kind.rate * scene.speed} for kind in chosen]
    return [Kind(**values) for values in numbers]


def play(scene: Scene, requests: int, seed: int) -> tuple[Outcome, Player]:
    player = Player(machine(scene))
    outcome = player.run(arrivals(traffic(scene), Vision(), seed, seconds=None, requests=requests))
    player.scheduler.check()
    return outcome, player


def faults(outcome: Outcome, scene: Scene, requests: int) -> list[str]:
    """What must not be: a request without its answer, or that waited too long; anything still held."""
    answered = sum(len(waits.whole) for waits in outcome.kinds.values())
    refused = sum(waits.refused for waits in outcome.kinds.values())
    found = []
    if answered + refused != requests or refused:
        found.append(f"{answered} of {requests} requests were answered, {refused} refused")
    stats = outcome.stats
    if stats.blocks_used or stats.running or stats.waiting or stats.swap_slots_used or stats.swap_waiting:
        found.append(f"something is still held: {stats}")
    longest = max(max(waits.first, default=0.0) for waits in outcome.kinds.values())
    if longest > scene.longest:
        found.append(f"a first token took {longest:.1f} s; the bound is {scene.longest:.0f} s")
    return found


def show(name: str, outcome: Outcome, elapsed: float) -> None:
    stats = outcome.stats
    print(f"\n{name}: {outcome.seconds:,.0f} s in {stats.steps:,} steps, played in {elapsed:.0f} s")
    print(
        f"  busy {outcome.busy / outcome.seconds:.0%}, rows <= {outcome.peak_rows}, blocks <= "
        f"{outcome.peak_blocks:,}, preemptions {stats.preemptions:,}, encodes {stats.encodes:,}, short of "
        f"{dict(outcome.short_of)}"
    )
    print(
        f"  blocks swapped out {stats.swap_out_blocks:,}, back in {stats.swap_in_blocks:,}, tickets dropped "
        f"{stats.swap_dropped:,}; prefix hits {stats.prefix_hit_tokens / stats.prefix_queried_tokens:.0%}, "
        f"of them in copied blocks {stats.prefix_copied_tokens:,} tokens"
    )
    print(
        f"  {'kind':15} {'n':>7} {'TTFT p50':>9} {'p99':>9} {'max':>9} {'ITL p50':>8} {'p99':>8} {'max':>9}"
    )
    for kind, waits in outcome.kinds.items():
        first, between = (np.array(values) * 1e3 for values in (waits.first, waits.between))
        print(
            f"  {kind:15} {len(first):7,} {np.percentile(first, 50):9.1f} {np.percentile(first, 99):9.1f} "
            f"{first.max():9.1f} {np.percentile(between, 50):8.2f} {np.percentile(between, 99):8.2f} "
            f"{between.max():9.1f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", choices=SCENES, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    wrong = []
    for name in options.scene or SCENES:
        scene = SCENES[name]
        began = time.perf_counter()
        outcome, _ = play(scene, options.requests, options.seed)
        show(name, outcome, time.perf_counter() - began)
        wrong += [f"{name}: {fault}" for fault in faults(outcome, scene, options.requests)]
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
