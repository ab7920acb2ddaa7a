"""Saccade beside transformers on a tiny random model: the same prompts, the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import peer_answers, peer_speed
from bench.peer_answers import Pair, PeerAnswer
from saccade.config import EngineConfig
from saccade.errors import ConfigError
from saccade.tools.bench.options import BenchOptions
from saccade.tools.evaluation.report import Outcome
from saccade.tools.options import EvalOptions
from tests import checkpoints

SPEED: dict[str, Any] = {
    "requests": 3,
    "input_tokens": 8,
    "output_tokens": 3,
    "image_size": (96, 64),
    "repeat": 2,
    "warmup": 0,
    "threads": 1,
    "progress": False,
}
ANSWERS: dict[str, Any] = {"limit": 2, "max_tokens": 6, "workers": 0, "progress": False}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3_vl(tmp_path_factory.mktemp("peer") / "vl")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3(tmp_path_factory.mktemp("peer") / "text")


def engine(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", kv_cache_bytes=16 << 20, max_num_seqs=32, **options)


def peer_rows(config: EngineConfig, target: Path, *workloads: str, **changed: Any) -> dict[str, Any]:
    options = BenchOptions(json=str(target), **{**SPEED, **changed})
    assert peer_speed.run(config, workloads, options) == 0
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def evaluate(model: Path, target: Path, **changed: Any) -> dict[str, Any]:
    given = {**ANSWERS, "tasks": ("shape", "position"), "json": str(target), **changed}
    assert peer_answers.run(engine(model), EvalOptions(**given)) == 0
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def test_a_single_question_is_timed_beside_the_peer(vision_model: Path, tmp_path: Path) -> None:
    document = peer_rows(
        engine(vision_model), tmp_path / "out.json", "peer_single_96x64", repeat=2, output_tokens=4
    )
    metrics = {row["metric"]: row for row in document["rows"]}
    for name in (
        "saccade, ttft",
        "transformers, ttft",
        "saccade, decoding",
        "ratio, ttft",
        "ratio, whole answer",
    ):
        assert len(metrics[name]["samples"]) == 2
        assert metrics[name]["value"] > 0
    assert metrics["saccade, ttft"]["parameters"] == {"size": "96x64", "in": 8, "out": 4}


def test_the_peer_gives_the_same_tokens_one_at_a_time(vision_model: Path, tmp_path: Path) -> None:
    document = peer_rows(
        engine(vision_model), tmp_path / "out.json", "peer_text", "peer_image", repeat=1, output_tokens=6
    )
    rows = {(row["workload"], row["metric"]): row["value"] for row in document["rows"]}
    for workload in ("peer_text", "peer_image"):
        assert rows[workload, "equal answers"] == 100
        assert rows[workload, "equal tokens"] == 100
        assert rows[workload, "ratio to one at a time"] > 0
        assert rows[workload, "transformers, padded batch"] > 0


def test_a_text_model_is_compared_on_text(text_model: Path, tmp_path: Path) -> None:
    document = peer_rows(engine(text_model), tmp_path / "out.json", "peer_text", repeat=1)
    assert {row["workload"] for row in document["rows"]} == {"peer_text"}


def test_dummy_weights_are_never_compared(vision_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dummy weights"):
        peer_rows(engine(vision_model, load_format="dummy"), tmp_path / "out.json", "peer_text")


def test_an_unknown_workload_is_refused_with_the_known_ones(vision_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="peer_single_WxH"):
        peer_rows(engine(vision_model), tmp_path / "out.json", "text_bs1")


def test_speed_counts_equal_answers_and_the_tokens_before_a_difference() -> None:
    assert peer_speed.agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == (1, 4)
    assert peer_speed.agreement([[1, 2]], [[1, 2, 3]]) == (0, 2)


def test_the_peer_gets_the_same_prompt_and_gives_the_same_tokens(
    vision_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = evaluate(vision_model, tmp_path / "out.json", visual_tokens=40)
    assert document["engine"]["resolved_dtype"] == "float32"
    found = document["peer"]
    assert (found["peer"], found["questions"]) == ("transformers", 4)
    assert found["same_prompts"] == found["equal"] == 4
    assert found["tokens"] == found["shared_tokens"] == 4 * 6
    for one in document["questions"]:
        assert one["peer"]["equal"] is True
        assert one["peer"]["text"] == one["answers"]["40"]["text"]
        assert len(one["peer"]["token_ids"]) == 6
    printed = capsys.readouterr()
    assert "4 of 4 greedy answers equal token for token" in " ".join(printed.out.split())
    assert printed.err == ""


def test_an_instruction_reaches_the_model(vision_model: Path, tmp_path: Path) -> None:
    plain, instructed = (
        evaluate(vision_model, tmp_path / "out.json", limit=1, instruction=line)
        for line in (None, "One word.")
    )
    assert instructed["peer"]["same_prompts"] == 2
    texts = [[one["answers"]["full"]["text"] for one in run["questions"]] for run in (plain, instructed)]
    assert texts[0] != texts[1]


def test_the_peer_compares_one_level_of_detail(vision_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --curve"):
        evaluate(vision_model, tmp_path / "out.json", curve=True)


def outcome(
    task: str, right: bool, *, tokens: int = 10, limit: int | None = None, ids: tuple[int, ...] = (1, 2)
) -> Outcome:
    return Outcome(task, 0, limit, (32, 32), tokens, "text", ids, "stop", right)


def test_agreement_counts_equal_answers_and_tokens_before_a_difference() -> None:
    def pair(ours: tuple[int, ...], theirs: tuple[int, ...], same_prompt: bool = True) -> Pair:
        answer = PeerAnswer((1,), 4, theirs, "text", right=True)
        return Pair(outcome("word", True, ids=ours), answer, same_prompt)

    found = peer_answers.agreement(
        "other",
        [
            pair((5, 6, 7), (5, 6, 7)),
            pair((5, 6), (5, 6, 7), same_prompt=False),  # a beginning is not equal
            pair((5, 9, 7), (5, 6, 7)),
            pair((), ()),
        ],
    )
    assert (found.questions, found.equal, found.same_prompts) == (4, 2, 3)
    assert (found.tokens, found.shared_tokens, found.peer_right) == (9, 6, 4)
