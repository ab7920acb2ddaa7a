"""The step log: a line for every step of an engine, which adds up to what was computed."""

import json
from pathlib import Path

import pytest

from saccade.config import EngineConfig
from saccade.engine.step_log import StepLog
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.sampling_params import SamplingParams
from saccade.step_plan import StepPlan


@pytest.mark.parametrize("overlap", [False, True])
def test_every_step_has_a_line_and_lines_add_up(vl_folder: Path, tmp_path: Path, overlap: bool) -> None:
    path = tmp_path / "steps.jsonl"
    llm = LLM(
        str(vl_folder), device="cpu", num_blocks=64, overlap=overlap, step_log=str(path), progress=False
    )
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    llm.generate([[5] * 7, [6] * 9], params, progress=False)
    llm.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(llm.engine.stats().steps))
    assert sum(line["tokens"] for line in lines) == 7 + 9
    assert sum(line["decodes"] for line in lines) >= 2 * 4
    assert all(line["ms"] > 0 and line["expected_ms"] > 0 and not line["captured"] for line in lines)


def test_a_log_that_cannot_be_written_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        StepLog(tmp_path / "nowhere" / "steps.jsonl")
    assert EngineConfig(model="embedded").step_log is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_ends_the_log_and_nothing_else(vl_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(str(vl_folder), device="cpu", num_blocks=64, step_log="/dev/full", progress=False)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    answers = llm.generate([[5] * 7, [6] * 9], params, progress=False)
    llm.close()
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [3, 3]
    assert len([line for line in caplog.messages if "/dev/full" in line]) == 1


def test_failed_steps_are_dropped_from_the_log(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    for number in range(3):
        log.launched(StepPlan(number, (), (), (), (), ()), captured=False)
    log.finished(StepPlan(2, (), (), (), (), ()), None)
    assert not log._launched
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [2]
