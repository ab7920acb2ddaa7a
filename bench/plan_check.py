"""`saccade plan` beside a real run of the same traffic.

    python -m bench.plan_check [MODEL] [--device cpu] [--seconds 30] [--traffic KIND ...] [--save FILE]

The engine runs the traffic once to warm up and learn its step costs, then the same kinds again, in real time,
with other arrivals. The plan simulates exactly these arrivals with the learnt costs. Prints both, and the
error of predicted steps."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.core import Engine
from saccade.engine.cost_prior import CHIPS, CPU, ModelSize, read_model_size
from saccade.inputs.processor import InputProcessor
from saccade.request import Request
from saccade.scheduler.cost_model import Coefficients, CostModel
from saccade.scheduler.policy import SchedulerConfig
from saccade.tools.planner.simulator import LatencyRecorder, SimulatedMachine, SimulationResult, Simulator
from saccade.tools.planner.traffic import Arrival, TrafficKind, VisionSizes, arrivals, parse_kind

TRAFFIC = ("text:rate=1.5,prompt=64,output=24", "image:rate=0.5,prompt=24,image=224x224,output=16")
STEP_TOKENS = 512


class RequestMaker:
    """Real requests of the plan's kinds: random words and noise images, as long as the plan says."""

    def __init__(self, model: str, max_model_len: int, seed: int) -> None:
        checkpoint = open_checkpoint(model)
        self._front = InputProcessor(checkpoint, max_model_len)
        self._draw = Random(seed)
        self._placeholder: int = checkpoint.config.get("image_token_id", 0)
        self._words = range(min(checkpoint.text_config["vocab_size"], 200))

    def arrivals(self, kinds: Sequence[TrafficKind], seed: int, seconds: float) -> list[Arrival]:
        drawn = arrivals(kinds, VisionSizes(), seed, seconds=seconds)
        return [Arrival(at, kind, self._request(kind, request)) for at, kind, request in drawn]

    def _request(self, kind: TrafficKind, drawn: Request) -> Request:
        ids = [self._draw.choice(self._words) for _ in range(kind.prompt)]
        images = []
        if kind.image is not None:
            images = [self._image(kind.image) for _ in range(kind.images)]
            ids = [self._placeholder] * len(images) + ids
        params = SamplingParams(max_tokens=drawn.sampling.max_tokens, temperature=0, ignore_eos=True)
        name = f"{drawn.id} {self._draw.random()}"
        return self._front.prepare_prompt(ids, params, name, images=images, trusted=True)

    def _image(self, size: tuple[int, int]) -> Image.Image:
        noise = np.random.default_rng(self._draw.randrange(1 << 32))
        return Image.fromarray(noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def run(engine: Engine, traffic: Iterable[Arrival]) -> SimulationResult:
    """In real time, until everything is answered."""
    waiting = list(traffic)[::-1]
    recorder = LatencyRecorder()
    before, start = engine.stats(), time.perf_counter()
    while waiting or not engine.idle:
        now = time.perf_counter() - start
        while waiting and waiting[-1].at <= now:
            recorder.submit(waiting[-1])
            engine.submit(waiting.pop().request)
        if engine.idle:
            time.sleep(max(waiting[-1].at - now, 0.0) if waiting else 0.0)
            continue
        deltas = engine.step()
        now = time.perf_counter() - start
        for delta in deltas:
            recorder.record(delta, now)
    result = recorder.result
    result.seconds, result.stats = time.perf_counter() - start, engine.stats()
    result.busy = result.stats.step_seconds - before.step_seconds
    return result


def plan(
    engine: Engine, network: ModelSize, costs: Coefficients, traffic: Iterable[Arrival]
) -> SimulationResult:
    info = engine.info
    limits = SchedulerConfig(
        max_num_seqs=info.max_num_seqs,
        max_step_tokens=STEP_TOKENS,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        max_encode_patches=4 * max(STEP_TOKENS, 4096),
        max_queue=1 << 30,
        encode_layers=max(network.vision_depth, 1),
    )
    machine = SimulatedMachine(
        limits=limits,
        blocks=info.num_blocks,
        feature_budget=256 << 20,
        feature_bytes=4 * network.hidden * network.value_bytes,
        truth=CostModel(costs, learning=False),
        believed=CostModel(costs),
    )
    return Simulator(machine).run(traffic)


def rows(planned: SimulationResult, real: SimulationResult) -> list[tuple[str, float, float]]:
    """(what, planned, measured), times in ms."""
    found = []
    for name, latencies in real.kinds.items():
        for part in ("first", "between", "whole"):
            for percentile in (50, 99):
                values = [
                    float(np.percentile(getattr(one, part), percentile)) * 1e3
                    for one in (planned.kinds[name], latencies)
                ]
                found.append((f"{name}: {LABELS[part]}, p{percentile} ms", values[0], values[1]))
    found.append(("device busy, s", planned.busy, real.busy))
    found.append(("all answered after, s", planned.seconds, real.seconds))
    return found


LABELS = {"first": "TTFT", "between": "ITL", "whole": "whole answer"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--traffic", action="append", help="as `saccade plan` takes it; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    kinds = [parse_kind(text) for text in options.traffic or TRAFFIC]
    config = EngineConfig(
        model=options.model, device=options.device, max_num_batched_tokens=STEP_TOKENS, itl_target=0.0
    )
    engine = Engine(config, progress=False)
    maker = RequestMaker(options.model, engine.info.max_model_len, options.seed)
    run(engine, maker.arrivals(kinds, options.seed + 1, options.seconds))
    costs, learnt = engine.costs, engine.stats()
    traffic = maker.arrivals(kinds, options.seed + 2, options.seconds)
    network = read_model_size(open_checkpoint(options.model).config, 4 if options.device == "cpu" else 2)
    planned, real = plan(engine, network, costs, traffic), run(engine, traffic)
    steps = real.stats.steps - learnt.steps
    spent = real.stats.step_seconds - learnt.step_seconds
    predicted = real.stats.step_seconds_predicted - learnt.step_seconds_predicted
    table = [*rows(planned, real), ("steps", planned.stats.steps, steps)]
    show(table, CHIPS.get(options.device, CPU).name, len(traffic))
    print(
        f"\nstep time: {spent:.2f} s measured, {predicted:.2f} s predicted before each step (the cost model"
    )
    print(f"keeps learning); recent mean error of a step {real.stats.step_error:.0%}")
    if options.save:
        stored: dict[str, Any] = {
            "rows": table,
            "costs_ms": asdict(costs),
            "step_error": real.stats.step_error,
        }
        options.save.write_text(json.dumps(stored, indent=1))
    return 0


def show(table: Sequence[tuple[str, float, float]], chip: str, requests: int) -> None:
    print(f"\n{requests} requests on {chip}\n\n| | planned | measured |\n|---|---:|---:|")
    for what, planned, real in table:
        print(f"| {what} | {planned:,.1f} | {real:,.1f} |")


if __name__ == "__main__":
    sys.exit(main())
