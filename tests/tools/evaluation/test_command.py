"""The command on a tiny random model: it cannot answer, but everything around the answers must be right."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.errors import ConfigError, SaccadeError
from saccade.tools import environment
from saccade.tools.evaluation import command, question_set
from saccade.tools.options import CURVE_LIMITS, EvalOptions
from tests import checkpoints

SMALL: dict[str, Any] = {"limit": 2, "max_tokens": 6, "workers": 0, "progress": False}
TASKS = ("shape", "position")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3_vl(tmp_path_factory.mktemp("evaluate") / "vl")


def engine(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", kv_cache_bytes=16 << 20, max_num_seqs=8, **options)


def evaluate(model: Path, target: Path, **changed: Any) -> dict[str, Any]:
    options = EvalOptions(**{**SMALL, "tasks": TASKS, "json": str(target), **changed})
    assert command.run(engine(model), options) == 0
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def test_every_question_is_asked_once_and_stands_in_the_json(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = evaluate(model, tmp_path / "out.json", batch=3)
    asked = [(one["task"], one["index"]) for one in document["questions"]]
    assert asked == [("shape", 0), ("shape", 100), ("position", 0), ("position", 100)]
    for one in document["questions"]:
        example = question_set.example(one["task"], one["index"])
        assert (one["question"], one["answer"], one["kind"]) == (
            example.question,
            example.answer,
            example.kind,
        )
        (answer,) = one["answers"].values()
        assert set(answer) == {"text", "right", "visual_tokens", "size", "output_tokens", "finish"}
        assert answer["size"] == [example.image.shape[1], example.image.shape[0]]
        assert 4 <= answer["visual_tokens"] <= 64  # the tiny checkpoint's limits
        assert answer["right"] is question_set.correct(example, answer["text"])
    (level,) = document["levels"]
    assert level["limit"] is None
    assert [one["name"] for one in level["tasks"]] == list(TASKS)
    assert level["overall"]["questions"] == 4
    right = sum(one["answers"]["full"]["right"] for one in document["questions"])
    assert level["overall"]["right"] == right
    assert {"schema", "model", "weights", "date", "command", "commit", "machine", "versions"} < set(document)
    assert document["options"]["limit"] == 2
    printed = capsys.readouterr()
    for wanted in ("shape", "position", "overall", "95% interval", "visual tokens"):
        assert wanted in printed.out
    assert printed.err == ""


def test_the_answers_scored_are_the_engines_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model is never right; an oracle put in place of the scoring shows what is passed to it."""
    seen: list[tuple[str, str]] = []

    def score(example: question_set.Example, text: str) -> bool:
        seen.append((example.task, text))
        return example.task == "shape"

    monkeypatch.setattr(command, "correct", score)
    document = evaluate(model, tmp_path / "out.json")
    assert [one["accuracy"] for one in document["levels"][0]["tasks"]] == [1.0, 0.0]
    texts = [(one["task"], one["answers"]["full"]["text"]) for one in document["questions"]]
    assert seen == texts


def test_what_is_answered_does_not_depend_on_how_it_is_batched(model: Path, tmp_path: Path) -> None:
    one, many = (evaluate(model, tmp_path / "out.json", batch=batch)["questions"] for batch in (1, 32))
    assert one == many


def test_a_token_limit_holds_for_every_image(model: Path, tmp_path: Path) -> None:
    document = evaluate(model, tmp_path / "out.json", visual_tokens=12)
    for one in document["questions"]:
        assert one["answers"]["12"]["visual_tokens"] <= 12
    assert document["levels"][0]["overall"]["mean_visual_tokens"] <= 12


def test_the_curve_asks_at_every_limit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = evaluate(model, tmp_path / "out.json", limit=1, curve=True)
    assert [level["limit"] for level in document["levels"]] == [*CURVE_LIMITS, None]
    names = [*map(str, CURVE_LIMITS), "full"]
    for one in document["questions"]:
        assert sorted(one["answers"]) == sorted(names)
        # Nothing here costs more than 64 tokens: one image, one answer at every level.
        assert len({json.dumps(answer) for answer in one["answers"].values()}) == 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("overall", *names))


def test_an_instruction_reaches_the_model(model: Path, tmp_path: Path) -> None:
    plain, instructed = (
        evaluate(model, tmp_path / "out.json", limit=1, instruction=line) for line in (None, "One word.")
    )
    texts = [[one["answers"]["full"]["text"] for one in run["questions"]] for run in (plain, instructed)]
    assert texts[0] != texts[1]


def test_the_fingerprint_tells_weights_apart_and_knows_them_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "FINGERPRINT_BYTES", 1000)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    first = environment.fingerprint(open_checkpoint(str(model)))
    assert environment.fingerprint(open_checkpoint(str(copy))) == first
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert environment.fingerprint(open_checkpoint(str(copy))) != first


def test_weights_that_change_while_loading_are_not_evaluated(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer reads the folder after the engine."""
    prints = iter(("before", "after"))
    monkeypatch.setattr(command, "fingerprint", lambda _: next(prints))
    with pytest.raises(SaccadeError, match="changed while they were loaded"):
        command.run(engine(model), EvalOptions(**{**SMALL, "tasks": ("shape",)}))


def test_json_on_stdout_is_alone_there(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = EvalOptions(**{**SMALL, "tasks": ("shape",), "limit": 1, "json": "-"})
    assert command.run(engine(model), options) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["questions"][0]["task"] == "shape"
    assert "overall" in printed.err


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"tasks": ("shape", "jugling")}, "no task 'jugling'"),
        ({}, {"visual_tokens": 3}, "use 4 or more"),
        ({}, {"json": "/no/such/folder/out.json"}, "make it first"),
        ({"load_format": "dummy"}, {}, "no right answers"),
        ({"max_queue": 2}, {"batch": 3}, "--max-queue"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.delattr(command, "LLM")  # loading would fail otherwise than by ConfigError
    with pytest.raises(ConfigError, match=message):
        command.run(engine(model, **config), EvalOptions(**{**SMALL, **options}))


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    text = checkpoints.qwen3(tmp_path / "text")
    with pytest.raises(ConfigError, match="takes none"):
        command.run(engine(text), EvalOptions(**SMALL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": 30, "count": 20}, "lower --limit"),
        ({"curve": True, "visual_tokens": 64}, "leave out --visual-tokens"),
        ({"workers": -1}, "workers is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalOptions(**options)
