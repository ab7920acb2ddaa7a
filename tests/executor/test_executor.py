"""Everything a rank needs is in the plan: executors given the same plans hold the same state."""

from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.builder import build_engine
from saccade.engine.core import Engine
from saccade.executor.executor import SingleProcessExecutor, StepFuture
from saccade.inputs.processor import InputProcessor
from saccade.step_plan import StepOutput, StepPlan
from tests.parity.oracle import picture

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class RecordingExecutor(SingleProcessExecutor):
    """Keeps every plan and its future."""

    def __init__(self, executor: SingleProcessExecutor) -> None:
        super().__init__(executor.runner, executor.warmup)
        self.steps: list[StepFuture] = []

    def execute(self, plan: StepPlan) -> StepFuture:
        self.steps.append(super().execute(plan))
        return self.steps[-1]


def run_engine(config: EngineConfig) -> RecordingExecutor:
    """Greedy and random answers about text and images, with shared prefixes and chunked prefill."""
    engine = Engine(config, progress=False)
    recorder = RecordingExecutor(engine._executor)
    loop: Any = engine._loop
    loop._stages._executor = recorder
    processor = InputProcessor(open_checkpoint(config.model), 4096)
    for number in range(6):
        params = SamplingParams(max_tokens=24, temperature=0.8 * (number % 2), seed=number, n=1 + number % 2)
        images = [picture(120, 90, number % 2)] if number % 3 == 0 else []
        text = f"{IMAGE * len(images)}Tell me about the same long beginning, number {number}"
        engine.submit(processor.prepare_prompt(text, params, f"r{number}", images=images, trusted=True))
        engine.step()
    while not engine.idle:
        engine.step()
    return recorder


def replay(executor: SingleProcessExecutor, plans: list[StepPlan]) -> list[StepOutput]:
    outputs = []
    for plan in plans:
        assert executor.encode(plan) == {}
        outputs.append(executor.execute(plan).wait())
    return outputs


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_the_same_plans_give_the_same_tokens_and_the_same_kv(vl_folder: Path, graphs: Any) -> None:
    config = EngineConfig(
        model=str(vl_folder),
        device="cpu",
        num_blocks=40,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=200,
        graphs=graphs,
        seed=3,
    )
    first = run_engine(config)
    plans = [step.plan for step in first.steps]
    assert any(plan.block_copies for plan in plans)
    assert any(plan.encodes for plan in plans)
    second = build_engine(config, open_checkpoint(config.model), progress=False).executor
    assert replay(second, plans) == [step.wait() for step in first.steps]
    ours, theirs = (executor.runner._batch._pages for executor in (first, second))
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
