"""Every workload on a tiny model: sane rows, valid JSON."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.config import EngineConfig
from saccade.errors import ConfigError
from saccade.tools.bench.command import run
from saccade.tools.bench.options import BenchOptions
from saccade.tools.bench.workloads import RUN, Row
from tests import checkpoints

SMALL: dict[str, Any] = {
    "requests": 3,
    "input_tokens": 8,
    "output_tokens": 3,
    "image_size": (96, 64),
    "repeat": 2,
    "warmup": 0,
    "threads": 1,
    "progress": False,
}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3_vl(tmp_path_factory.mktemp("bench") / "vl")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3(tmp_path_factory.mktemp("bench") / "text")


def engine(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", kv_cache_bytes=16 << 20, max_num_seqs=32, **options)


def measure(config: EngineConfig, target: Path, *workloads: str, **changed: Any) -> dict[str, Any]:
    options = BenchOptions(workloads=workloads, json=str(target), **{**SMALL, **changed})
    assert run(config, options) == 0
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def test_every_library_workload_gives_a_positive_row_with_its_samples(
    vision_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (
        "text_bs2",
        "text_throughput",
        "ttft_unique_80x64",
        "ttft_repeat",
        "vlm_unique",
        "vlm_repeat",
        "vlm_16img_x8q",
    )
    document = measure(engine(vision_model), tmp_path / "out.json", *names, input_tokens=40, output_tokens=8)
    rows = {row["workload"]: row for row in document["rows"]}
    assert tuple(rows) == names  # in the order they were asked for
    for name, row in rows.items():
        assert len(row["samples"]) == 2, name
        assert row["samples"][0] != row["samples"][1]
        assert row["value"] > 0 or name == "text_bs2"  # a difference of two times may come out negative
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert "vLLM" not in printed  # no figures of another machine
    assert document["machine"]["cores"] >= 1
    assert document["versions"]["torch"]
    assert document["options"]["requests"] == 3
    assert document["engine"]["resolved_dtype"] == "float32"


def test_a_text_model_runs_text_workloads_and_refuses_images(text_model: Path, tmp_path: Path) -> None:
    document = measure(engine(text_model), tmp_path / "out.json", "text_bs1", repeat=1)
    assert {row["workload"] for row in document["rows"]} == {"text_bs1"}
    with pytest.raises(ConfigError, match="vlm_unique asks about images"):
        measure(engine(text_model), tmp_path / "out.json", "vlm_unique")


def test_dummy_weights_are_measured(vision_model: Path, tmp_path: Path) -> None:
    config = engine(vision_model, load_format="dummy")
    (vision_model / "model.safetensors").rename(vision_model / "hidden")
    try:
        document = measure(config, tmp_path / "out.json", "text_bs1", "ttft_unique_64x64", repeat=1)
    finally:
        (vision_model / "hidden").rename(vision_model / "model.safetensors")
    assert len(document["rows"]) == 2


@pytest.mark.parametrize(
    ("workload", "options", "remedy"),
    [
        ("text_bs64", {}, "--max-num-seqs"),
        ("text_bs1", {"input_tokens": 5000}, "--input-tokens"),
        ("text_bs32", {"input_tokens": 1000}, "--kv-cache-bytes"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(
    vision_model: Path, tmp_path: Path, workload: str, options: dict[str, int], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        measure(engine(vision_model), tmp_path / "out.json", workload, **options)


def test_a_late_failure_does_not_take_earlier_figures_along(vision_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        measure(engine(vision_model), target, "text_bs1", "text_bs64", "text_throughput")
    document = json.loads(target.read_text())
    assert [row["workload"] for row in document["rows"]] == ["text_bs1"]
    assert document["unmeasured"] == ["text_bs64", "text_throughput"]


def test_threads_are_put_back(text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = torch.get_num_threads()
    document = measure(engine(text_model), tmp_path / "out.json", "text_bs1", threads=before + 1)
    assert document["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_json_on_stdout_is_alone_there(vision_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = BenchOptions(workloads=("text_bs1",), json="-", **SMALL)
    assert run(engine(vision_model), options) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"][0]["workload"] == "text_bs1"
    assert "text_bs1" in printed.err


def test_processes_of_its_own_start_and_serve_a_mixed_load(vision_model: Path, tmp_path: Path) -> None:
    document = measure(
        engine(vision_model),
        tmp_path / "out.json",
        "start_to_ready",
        "mixed_load",
        phase_seconds=1.0,
        text_rate=8.0,
        image_rates=(4.0,),
        repeat=1,
    )
    rows = {row["metric"]: row for row in document["rows"]}
    assert rows["start"]["value"] > 0
    for phase, metrics in (
        ("text only", ("text ttft", "inter-token")),
        ("+ 4 images/s", ("text ttft", "inter-token", "image ttft")),
    ):
        for metric in metrics:
            half, most = (rows[f"{phase}: {metric} p{share}"] for share in (50, 99))
            assert 0 <= half["value"] <= most["value"]
            assert half["parameters"]["lost"] == 0, half["note"]
            assert half["note"].startswith("event loop lag: client ")
            assert "server <= " in half["note"]


def test_a_run_that_is_terminated_prints_what_it_has(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> list[Row]:
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setitem(RUN, "text_throughput", ended)
    with pytest.raises(KeyboardInterrupt):
        measure(engine(text_model), tmp_path / "out.json", "text_bs2", "text_throughput", progress=True)
    printed = capsys.readouterr()
    assert "text_bs2" in printed.out
    assert "Not measured: text_throughput" in printed.out
    assert "text_bs2: step" in printed.err  # as soon as it was known
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
