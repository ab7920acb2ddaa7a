"""Mixed traffic of 100,000 requests on the real scheduler with a virtual clock.

    python -m bench.simulate [--requests 100000] [--seed 0] [--scene NAME]

Qwen3-VL-8B shapes at the peak rates of an H200, on five machines: `roomy` has the whole memory; `tight` has a
KV pool too small for two videos and an encoder cache of one image, so that requests queue, are preempted and
swapped; `images` has a KV pool too small for two images; `pools` has a small pool for text and one for views
that is too small for two videos; `kept` is `pools` with an encoder cache for all images. It prints what
happened and fails if a request is unanswered or waited beyond the bound, or if anything is still held."""

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np

from saccade.encoder.partial_views import segment_layers
from saccade.engine.cost_prior import H200, ModelSize, coefficients
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.policy import SchedulerConfig
from saccade.tools.planner.simulator import SimulatedMachine, SimulationResult, Simulator
from saccade.tools.planner.traffic import TrafficKind, VisionSizes, arrivals

QWEN3_VL_8B = ModelSize(36, 32, 8, 128, 4096, 151_936, 7_568_000_000, 2, 27, 1152, 425_000_000)
TRAFFIC = (
    TrafficKind(name="text", rate=20, prompt=130, output=64, shared=40),
    TrafficKind(name="urgent", rate=2, prompt=130, output=32, priority=-1),
    TrafficKind(name="background", rate=2, prompt=600, output=128, priority=2),
    TrafficKind(name="image", rate=3, prompt=64, output=64, image=(1024, 1024)),
    TrafficKind(name="small image", rate=4, prompt=64, output=32, image=(448, 448)),
    TrafficKind(name="known image", rate=4, prompt=64, output=64, image=(1024, 1024), distinct=64),
    TrafficKind(name="video", rate=0.5, prompt=64, output=64, video=(640, 360), frames=48),
)
BLOCK = 16


@dataclass(frozen=True)
class Setup:
    blocks: int
    feature_budget: int  # bytes
    speed: float  # factor on the rates above
    longest: float  # bound of TTFT, seconds
    kinds: tuple[str, ...] = tuple(kind.name for kind in TRAFFIC)
    vision: int = 0  # of the blocks, those of the pool for views
    slots: int = 1_800  # KV blocks of host memory: 4 GiB


SETUPS = {
    "roomy": Setup(blocks=48_000, feature_budget=2 << 30, speed=1.0, longest=2.0),
    "tight": Setup(blocks=400, feature_budget=32 << 20, speed=0.7, longest=60.0),
    "images": Setup(
        blocks=120,
        feature_budget=16 << 20,
        speed=0.4,
        longest=60.0,
        kinds=("text", "urgent", "background", "image", "small image", "known image"),
    ),
    "pools": Setup(blocks=560, feature_budget=32 << 20, speed=0.7, longest=60.0, vision=360),
    "kept": Setup(blocks=560, feature_budget=2 << 30, speed=0.7, longest=60.0, vision=360),
}


def machine(setup: Setup) -> SimulatedMachine:
    costs = coefficients(QWEN3_VL_8B, H200)
    limits = SchedulerConfig(
        max_num_seqs=256,
        max_step_tokens=8192,
        max_model_len=32_768,
        block_size=BLOCK,
        max_encode_patches=32_768,
        max_queue=1 << 30,
        itl_target=20.0,
        encode_layers=QWEN3_VL_8B.vision_depth,
        encode_unit=segment_layers(QWEN3_VL_8B.vision_depth),
    )
    return SimulatedMachine(
        limits=limits,
        blocks=setup.blocks,
        vision=setup.vision,
        feature_budget=setup.feature_budget,
        feature_bytes=4 * QWEN3_VL_8B.hidden * 2,
        truth=CostModel(costs, learning=False),
        believed=CostModel(costs),
        swap_slots=setup.slots,
        swap_seconds=BLOCK * QWEN3_VL_8B.kv_bytes / H200.link,
    )


def traffic(setup: Setup) -> list[TrafficKind]:
    chosen = [kind for kind in TRAFFIC if kind.name in setup.kinds]
    numbers = [{**vars(kind), "rate": kind.rate * setup.speed} for kind in chosen]
    return [TrafficKind(**values) for values in numbers]


def simulate(setup: Setup, requests: int, seed: int) -> tuple[SimulationResult, Simulator]:
    simulator = Simulator(machine(setup))
    result = simulator.run(arrivals(traffic(setup), VisionSizes(), seed, seconds=None, requests=requests))
    simulator.scheduler.check()
    return result, simulator


def faults(result: SimulationResult, setup: Setup, requests: int) -> list[str]:
    """Unanswered requests, too long latencies, resources still held."""
    answered = sum(len(latencies.whole) for latencies in result.kinds.values())
    refused = sum(latencies.refused for latencies in result.kinds.values())
    found = []
    if answered + refused != requests or refused:
        found.append(f"{answered} of {requests} requests were answered, {refused} refused")
    stats = result.stats
    if stats.blocks_used or stats.running or stats.waiting or stats.swap_slots_used or stats.swap_waiting:
        found.append(f"something is still held: {stats}")
    longest = max(max(latencies.first, default=0.0) for latencies in result.kinds.values())
    if longest > setup.longest:
        found.append(f"a first token took {longest:.1f} s; the bound is {setup.longest:.0f} s")
    return found


def show(name: str, result: SimulationResult, elapsed: float) -> None:
    stats = result.stats
    print(f"\n{name}: {result.seconds:,.0f} s in {stats.steps:,} steps, simulated in {elapsed:.0f} s")
    print(
        f"  busy {result.busy / result.seconds:.0%}, sequences <= {result.peak_rows}, blocks <= "
        f"{result.peak_blocks:,}, preemptions {stats.preemptions:,}, encodes {stats.encodes:,}, short of "
        f"{dict(result.short_of)}"
    )
    print(
        f"  blocks swapped out {stats.swap_out_blocks:,}, back in {stats.swap_in_blocks:,}, swaps dropped "
        f"{stats.swap_dropped:,}; prefix hits {stats.prefix_hit_tokens / stats.prefix_queried_tokens:.0%}, "
        f"of those in copied blocks {stats.prefix_copied_tokens:,} tokens"
    )
    print(
        f"  {'kind':15} {'n':>7} {'TTFT p50':>9} {'p99':>9} {'max':>9} {'ITL p50':>8} {'p99':>8} {'max':>9}"
    )
    for kind, latencies in result.kinds.items():
        first, between = (np.array(values) * 1e3 for values in (latencies.first, latencies.between))
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
    parser.add_argument("--scene", choices=SETUPS, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    wrong = []
    for name in options.scene or SETUPS:
        setup = SETUPS[name]
        began = time.perf_counter()
        result, _ = simulate(setup, options.requests, options.seed)
        show(name, result, time.perf_counter() - began)
        wrong += [f"{name}: {fault}" for fault in faults(result, setup, options.requests)]
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
