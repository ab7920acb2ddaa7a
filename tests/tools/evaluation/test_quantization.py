"""`saccade eval-quant` on a tiny random model: the figures must be right, whatever the model says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.config import EngineConfig
from saccade.errors import ConfigError
from saccade.llm import LLM
from saccade.tools.evaluation import quantization, quantization_report
from saccade.tools.evaluation.quantization import compare, split_schemes
from saccade.tools.evaluation.quantization_report import Answer, PromptResult, TokenStats, figures
from saccade.tools.options import QuantEvalOptions
from tests import checkpoints

SMALL: dict[str, Any] = {"limit": 1, "prompts": 2, "max_tokens": 4, "workers": 0, "progress": False}
SMALL |= {"decode_tokens": 3, "repeat": 1, "tasks": ("shape", "position")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3_vl(tmp_path_factory.mktemp("quantized") / "vl")


def engine(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", kv_cache_bytes=16 << 20, max_num_seqs=8, **options)


def evaluate(model: Path, target: Path, *schemes: str, **changed: Any) -> dict[str, Any]:
    options = QuantEvalOptions(**{**SMALL, "json": str(target), "schemes": schemes, **changed})
    assert quantization.run(engine(model), options) == 0
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def test_a_model_does_not_differ_from_itself(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`none` quantises nothing, and a folder may be named in place of a scheme."""
    document = evaluate(model, tmp_path / "out.json", f"none,{model}")
    assert [scheme["name"] for scheme in document["schemes"]] == ["base", "none", str(model)]
    for scheme in document["schemes"]:
        for kind in ("text", "images"):
            found = scheme[kind]
            assert found["prompts"] == 2
            assert 2 <= found["tokens"] <= 8
            assert (found["kld_mean"], found["kld_max"], found["probability_rms"]) == (0, 0, 0)
            assert (found["top_1"], found["perplexity_ratio"], found["changed"]) == (1, 1, 0)
        assert scheme["images"]["flips"] == 0
        assert scheme["text"]["flips"] is None
    assert "100.00%" in capsys.readouterr().out


def test_the_json_has_every_figure_of_every_scheme(model: Path, tmp_path: Path) -> None:
    document = evaluate(
        model, tmp_path / "out.json", "int4", "decoder=fp8,head=none", plot=tmp_path / "p.svg"
    )
    assert [scheme["name"] for scheme in document["schemes"]] == ["base", "int4", "decoder=fp8,head=none"]
    kinds = {
        *("prompts", "tokens", "kld_mean", "kld_median", "kld_99", "kld_999", "kld_max", "probability_rms"),
        *("top_1", "perplexity", "perplexity_ratio", "changed", "lost", "won", "flips"),
    }
    for scheme in document["schemes"]:
        assert scheme["weight_bytes"] > 0
        assert scheme["tokens_per_second"] > 0
        assert set(scheme["text"]) == set(scheme["images"]) == kinds
    assert [scheme["stages"]["decoder"] for scheme in document["schemes"]] == ["none", "int4", "fp8"]
    assert document["schemes"][0]["speed_ratio"] == 1
    assert all(scheme["text"]["kld_mean"] > 0 for scheme in document["schemes"][1:])
    assert len(document["questions"]) == 4
    assert all(line["int4"]["kld"] >= 0 for line in document["questions"])
    head = {
        "schema",
        "model",
        "weights",
        "date",
        "command",
        "commit",
        "machine",
        "versions",
        "dtype",
        "options",
    }
    assert head < set(document)
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_a_text_model_is_compared_on_text_alone(tmp_path: Path) -> None:
    document = evaluate(checkpoints.qwen3(tmp_path / "text"), tmp_path / "out.json", "int8")
    assert all("text" in scheme and "images" not in scheme for scheme in document["schemes"])


def test_forced_logits_are_those_that_chose_the_answer(model: Path, tmp_path: Path) -> None:
    """The base's answer is greedy, so each of its tokens is the most likely one at its position."""
    config = engine(model)
    llm = LLM(config.model, progress=False, **{**config.options(), "prefix_caching": False})
    references = quantization.References(tmp_path)
    run = quantization.SchemePass(llm, references, 6)
    prompt = quantization.QuantPrompt("text", ("text", 0), "What is this?")
    run.ask([prompt])
    llm.close()
    assert references.logits(prompt.key).argmax(-1).tolist() == list(run.results[0].answer.token_ids)


def test_divergence_agrees_with_its_formula() -> None:
    base, other = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[2.0, 1.0, 0.0]])
    p = [math.exp(x) / sum(map(math.exp, (0, 1, 2))) for x in (0, 1, 2)]
    stats = compare(base, other, [2])
    assert stats.kld[0] == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, p[::-1], strict=True)))
    assert stats.same_top == (False,)
    assert (math.exp(stats.base_logprob[0]), math.exp(stats.logprob[0])) == pytest.approx((p[2], p[0]))
    assert compare(base, base, [0]).kld == (0,)


def result(base: bool | None, right: bool | None, text: str = "same", logprob: float = -1.0) -> PromptResult:
    stats = TokenStats((0.1, 0.3), (True, False), (-1.0, -1.0), (-1.0, logprob))
    return PromptResult(
        "images", ("shape", 0), Answer(text, (1, 2), right), Answer("same", (1, 2), base), stats
    )


def test_flips_and_changed_answers_are_counted() -> None:
    found = figures(
        [result(True, True), result(True, False, "x"), result(False, True, "y"), result(False, False, "z")]
    )
    assert (found.prompts, found.changed, found.lost, found.won, found.flips) == (4, 3, 1, 1, 2)
    assert (found.tokens, found.top_1) == (8, 0.5)
    assert (found.kld_mean, found.kld_max) == pytest.approx((0.2, 0.3))
    unknown = figures([result(None, None), result(None, None, "x")])
    assert (unknown.changed, unknown.flips) == (1, None)


def test_perplexity_grows_where_the_scheme_finds_the_answer_less_likely() -> None:
    found = figures([result(True, True, logprob=-2.0)])
    assert found.perplexity == pytest.approx(math.exp(1.5))
    assert found.perplexity_ratio == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("text", "schemes"),
    [
        ("fp8", ["fp8"]),
        ("fp8, int8,int4", ["fp8", "int8", "int4"]),
        ("decoder=fp8,vision=none,int4", ["decoder=fp8,vision=none", "int4"]),
        ("int4,decoder=fp8,decoder=int8,head=int8", ["int4", "decoder=fp8", "decoder=int8,head=int8"]),
    ],
)
def test_commas_separate_schemes_but_not_stages_of_one(text: str, schemes: list[str]) -> None:
    assert split_schemes(text) == schemes


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"schemes": ("fp8,fp9",)}, "'fp9' is neither .* nor is it a folder"),
        ({}, {"schemes": ("int8,",)}, "'' is neither .* nor is it a folder"),
        ({}, {"schemes": ("fp8,fp8",)}, "names fp8 twice"),
        ({}, {"json": "/no/such/folder/out.json"}, "make it first"),
        ({"quantization": "fp8"}, {}, "--schemes alone"),
        ({"load_format": "dummy"}, {}, "--load-format dummy"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.delattr(quantization, "running_engine")
    with pytest.raises(ConfigError, match=message):
        quantization.run(engine(model, **config), QuantEvalOptions(**{**SMALL, **options}))


def test_a_quantised_base_and_another_vocabulary_are_refused(model: Path, tmp_path: Path) -> None:
    folder = checkpoints.qwen3_vl(tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(ConfigError, match="quantised already"):
        quantization.run(engine(folder), QuantEvalOptions(**SMALL))
    config["text_config"]["vocab_size"] += 8
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="with the same model"):
        quantization.run(engine(model), QuantEvalOptions(**{**SMALL, "schemes": (str(folder),)}))


def test_a_plot_without_matplotlib_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_report, "PLOTTER", "saccade_no_such_module")
    with pytest.raises(ConfigError, match=r"saccade\[tools\]"):
        quantization.run(engine(model), QuantEvalOptions(**{**SMALL, "plot": Path("plot.svg")}))
