"""Steps that nobody asked for, compiled while nobody waits: they meet no trace of who was there before."""

from pathlib import Path

import pytest

from saccade import SamplingParams
from saccade.llm import LLM
from saccade.sampling.sampler import SampleOutput, Sampler
from saccade.worker.model_runner import Rehearsal, Runner


@pytest.fixture
def llm(vl_folder: Path) -> LLM:
    return LLM(str(vl_folder), device="cpu", num_blocks=256, max_num_seqs=4, progress=False)


def test_what_the_last_one_in_a_row_asked_for_is_not_done_with_tokens_nobody_computed(
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
    monkeypatch.setattr("saccade.sampling.penalties.History.count", None)
    llm.engine._runner.rehearsals = [Rehearsal(1)]
    assert llm.engine.warm_up()
    assert [output.logprobs for output in made] == [None]


def test_an_idle_engine_compiles_one_step_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes meanwhile waits for one of them, not for all."""
    begun: list[list[Rehearsal]] = []
    monkeypatch.setattr(Runner, "rehearse", lambda runner, steps: begun.append(list(steps)))
    llm.engine._runner.rehearsals = [Rehearsal(1), Rehearsal(2, 40)]
    while llm.engine.warm_up():
        pass
    assert begun == [[Rehearsal(1)], [Rehearsal(2, 40)]]


def test_a_step_that_cannot_be_compiled_ahead_ends_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(runner: Runner, steps: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Runner, "rehearse", fails)
    llm.engine._runner.rehearsals = [Rehearsal(1), Rehearsal(2, 40)]
    while llm.engine.warm_up():
        pass
    assert len([line for line in caplog.messages if "out of memory" in line]) == 1
    answer = llm.generate([5] * 7, SamplingParams(max_tokens=2, temperature=0))
    assert len(answer[0].outputs[0].token_ids) == 2


def test_random_tokens_are_compiled_by_an_idle_engine_and_not_before_the_first_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longest; red when a start waits for them, or when the first who draws does."""
    drawn: list[int] = []
    monkeypatch.setattr("saccade.worker.model_runner.compiling", lambda: True)
    monkeypatch.setattr(Sampler, "draw", lambda sampler, logits, rows, outputs: drawn.append(len(rows)))
    llm.engine._runner.rehearse([Rehearsal(0)], draws=False)
    assert drawn == []
    llm.engine._runner.rehearsals = [Rehearsal(0), Rehearsal(2, 40)]
    while llm.engine.warm_up():
        pass
    assert drawn == [1, 3]
