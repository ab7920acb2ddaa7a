"""A step that cannot be computed ends its requests, and they hear of it though no other is answered. A view
that cannot be made ends those who need it alone."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.core import Engine, HostTimerEvent, StepTimer
from saccade.inputs.processor import InputProcessor
from saccade.models.interface import Layout
from saccade.request import Delta
from saccade.step_plan import StepPlan
from saccade.worker.model_runner import LaunchedStep, ModelRunner
from tests.parity.test_engine import LONG, PICTURES, TEXTS, Bench, bench

__all__ = ["bench"]  # the fixture


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("failing", [0, 3], ids=["the first step", "a later step"])
def test_the_error_of_a_failed_launch_is_returned_before_the_engine_is_idle(
    vl_folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, failing: int
) -> None:
    engine = Engine(
        EngineConfig(model=str(vl_folder), device="cpu", num_blocks=64, overlap=overlap), progress=False
    )
    real = ModelRunner.execute

    def launch(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
        if plan.number == failing:
            raise RuntimeError("out of memory")
        return real(runner, plan)

    monkeypatch.setattr(ModelRunner, "execute", launch)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    front = InputProcessor(open_checkpoint(str(vl_folder)), 4096)
    engine.submit(front.prepare_prompt("The eye jumps", params, "a", trusted=True))
    told: list[Delta] = []
    while not engine.idle:
        told += engine.step()
        engine.check()
    assert [delta.finish for delta in told if delta.finish] == ["error"]
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize(
    "options",
    [{}, {"itl_target": 0.001}, {"graphs": "on"}, {"num_blocks": 90, "block_size": 4}],
    ids=["whole", "in slices", "captured", "few blocks"],
)
def test_an_image_that_cannot_be_encoded_fails_only_its_request(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], overlap: bool
) -> None:
    """The others, in the same step and the same call of the tower, are answered as transformers does."""
    peers = bench("qwen3_vl")
    engine = peers.engine(overlap=overlap, **options)
    vision = engine._executor.runner._vision
    assert vision is not None
    tower = vision.encoder._tower
    rows, columns = peers.request(PICTURES[1]).media[0].view.grid
    poor, broken = tower.carry, [rows * columns]  # captured calls know no more of a view

    def carry(stream: torch.Tensor, layout: Layout, *arguments: Any, **more: Any) -> Any:
        if any(size in broken for size in layout.sizes):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB at 0x7f00")
        return poor(stream, layout, *arguments, **more)

    monkeypatch.setattr(tower, "carry", carry)
    questions = [LONG, *PICTURES, *TEXTS]
    requests = [peers.request(question) for question in questions]
    engine.submit(requests[0])
    news = engine.step()
    for request in requests[1:]:
        engine.submit(request)
    while not engine.idle:
        news += engine.step()
        engine.check()
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    for delta in news:
        answers[delta.request_id].extend(delta.tokens)
    (failed,) = [delta for delta in news if delta.finish == "error"]
    assert failed.request_id == requests[2].id
    assert failed.code == "encoding_failed"
    assert failed.error == (
        "image 1 of this request (333x61 pixels) could not be encoded: the device is short of memory; try "
        "again, or send it smaller"
    )
    for question, request in zip(questions, requests, strict=True):
        if request is not requests[2]:
            assert answers[request.id] == peers.expected(question), question.text
    assert engine.stats().encode_failures == 1
    broken.clear()
    peers.check(engine, [PICTURES[1]])


def run_out(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_idle_time_counts_to_no_step(vl_folder: Path, overlap: bool) -> None:
    """A prompt is cancelled after a step that sampled nothing, whose time is part of the next one's."""
    config = EngineConfig(
        model=str(vl_folder), device="cpu", num_blocks=64, max_num_batched_tokens=16, overlap=overlap
    )
    engine = Engine(config, progress=False)
    slept = [0.0]
    engine._monitor.timer = StepTimer(lambda: HostTimerEvent(lambda: time.perf_counter() + slept[0]))
    front = InputProcessor(open_checkpoint(str(vl_folder)), 4096)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    engine.submit(front.prepare_prompt([5] * 100, params, "long", trusted=True))
    for _ in range(3):
        engine.step()
    engine.cancel(["long"])
    run_out(engine)
    slept[0] = 1000.0
    engine.submit(front.prepare_prompt([6] * 9, params, "short", trusted=True))
    run_out(engine)
    stats = engine.stats()
    assert stats.timed_steps
    assert stats.step_seconds < 1000
