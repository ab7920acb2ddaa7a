"""A step that cannot be computed ends its requests, and they hear of it though no other is answered."""

from pathlib import Path

import pytest

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.front import Front
from saccade.plan import StepPlan
from saccade.request import Delta
from saccade.runtime.engine import Engine
from saccade.runtime.runner import Launched, Runner


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("failing", [0, 3], ids=["the first step", "a later step"])
def test_a_step_that_cannot_be_launched_is_told_before_the_engine_is_idle(
    vl_folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, failing: int
) -> None:
    engine = Engine(
        EngineConfig(model=str(vl_folder), device="cpu", num_blocks=64, overlap=overlap), progress=False
    )
    real = Runner.launch

    def launch(runner: Runner, plan: StepPlan) -> Launched:
        if plan.number == failing:
            raise RuntimeError("out of memory")
        return real(runner, plan)

    monkeypatch.setattr(Runner, "launch", launch)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    front = Front(open_checkpoint(str(vl_folder)), 4096)
    engine.submit(front.prepare_prompt("The eye jumps", params, "a", trusted=True))
    told: list[Delta] = []
    while not engine.idle:
        told += engine.step()
        engine.check()
    assert [delta.finish for delta in told if delta.finish] == ["error"]
    assert engine.stats().blocks_used == 0
