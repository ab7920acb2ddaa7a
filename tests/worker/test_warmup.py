"""Idle warm-up: steps that no request asked for, compiled without a trace of earlier requests."""

from pathlib import Path

import pytest

from saccade import SamplingParams
from saccade.llm import LLM
from saccade.sampling.sampler import SampleOutput, Sampler
from saccade.worker.model_runner import ModelRunner
from saccade.worker.warmup import WarmupStep


@pytest.fixture
def llm(vl_folder: Path) -> LLM:
    return LLM(str(vl_folder), device="cpu", num_blocks=256, max_num_seqs=4, progress=False)


def test_warmup_ignores_the_sampling_parameters_of_earlier_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where launches are only compiled, tokens are whatever was in memory: nothing is looked up by them."""
    asked = SamplingParams(max_tokens=2, temperature=0, logprobs=3, repetition_penalty=1.5)
    llm.generate([[5] * 7, [6] * 9], asked)
    made: list[SampleOutput] = []
    real = Sampler.sample

    def noted(sampler: Sampler, *given: object) -> SampleOutput:
        made.append(real(sampler, *given))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(Sampler, "sample", noted)
    monkeypatch.setattr("saccade.sampling.penalties.TokenHistory.count", None)
    llm.engine._executor.warmup.steps = [WarmupStep(1)]
    assert llm.engine.warm_up()
    assert [output.logprobs for output in made] == [None]


def test_an_idle_engine_compiles_one_step_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes meanwhile waits for one of them, not for all."""
    begun: list[int] = []
    monkeypatch.setattr(ModelRunner, "compile_step", lambda runner, scheduled: begun.append(len(scheduled)))
    llm.engine._executor.warmup.steps = [WarmupStep(1), WarmupStep(2, 40)]
    calls = 0
    while llm.engine.warm_up():
        calls += 1
    assert begun == [2, 3]
    assert calls == 2


def test_a_step_that_cannot_be_compiled_fails_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(runner: ModelRunner, scheduled: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ModelRunner, "compile_step", fails)
    llm.engine._executor.warmup.steps = [WarmupStep(1), WarmupStep(2, 40)]
    while llm.engine.warm_up():
        pass
    assert len([line for line in caplog.messages if "out of memory" in line]) == 1
    answer = llm.generate([5] * 7, SamplingParams(max_tokens=2, temperature=0))
    assert len(answer[0].outputs[0].token_ids) == 2


def test_random_sampling_is_compiled_when_idle_and_not_at_start(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longest; red when a start waits for them, or when the first who draws does."""
    drawn: list[int] = []
    monkeypatch.setattr("saccade.worker.model_runner.compiling", lambda: True)
    monkeypatch.setattr(Sampler, "draw", lambda sampler, logits, rows, outputs: drawn.append(len(rows)))
    runner = llm.engine._executor.runner
    runner.compile_step(WarmupStep(0).scheduled(runner.max_context), draws=False)
    assert drawn == []
    llm.engine._executor.warmup.steps = [WarmupStep(0), WarmupStep(2, 40)]
    while llm.engine.warm_up():
        pass
    assert drawn == [1, 3]
