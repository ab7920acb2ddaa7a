"""Which products of a model are searched, what a start keeps of it, and `saccade tune`."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from saccade.checkpoint import open_checkpoint
from saccade.cli.app import app
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.skinny import SkinnyTuning, has_measured
from saccade.kernels.gemm.tuning import TuningTable, read_cache
from saccade.kernels.gemm.tuning_model import Gpu, Product, ProductTuning
from saccade.kernels.gemm.tuning_search import GATED, NORMED, PARTIALS, PLAIN, Found, Task
from saccade.llm import LLM
from saccade.models.interface import LanguageModel
from saccade.models.loader import load_model
from saccade.quantization.online import online_scheme
from saccade.quantization.stages import parse_quantization
from saccade.tools.tune import report, summary
from saccade.worker import product_tuning
from saccade.worker.product_tuning import can_tune, limits_of, load_tunings, model_tasks, tune, untuned

CPU = torch.device("cpu")
TUNING = ProductTuning(64, 16, 128, 2, 4, 4)


def tiny(folder: Path, scheme: str = "none", dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    online = online_scheme(parse_quantization(scheme))
    return load_model(open_checkpoint(str(folder)), CPU, dtype, online=online)


def found(task: Task) -> Found:
    return Found(task, TUNING, 9e-6, TUNING._replace(splits=1), 10e-6)


def test_each_product_of_a_decoder_is_searched_once_with_what_follows_it(vl_folder: Path) -> None:
    model = tiny(vl_folder)
    tasks = model_tasks(model, 4)
    assert {task.use for task in tasks} == {PARTIALS, NORMED, GATED, PLAIN}
    assert {task.product.rows for task in tasks} == {1, 8}  # 8 speaks for 2 to 16
    assert tasks[0].product.rows == 1
    assert all(task.product.format == "bf16" for task in tasks)
    heads = [task.product for task in tasks if task.use == PLAIN]
    assert heads == [Product("bf16", rows, model.vocab_size, model.hidden_size, False) for rows in (1, 8)]
    gated = next(task.product for task in tasks if task.use == GATED)
    assert gated.gated
    assert gated.depth == model.hidden_size


def test_formats_follow_the_scheme_and_float32_has_no_tunings(vl_folder: Path) -> None:
    forms = {task.use: task.product.format for task in model_tasks(tiny(vl_folder, "int4"), 1)}
    assert forms == {PARTIALS: "int4", NORMED: "int4", GATED: "int4", PLAIN: "bf16"}
    assert model_tasks(tiny(vl_folder, dtype=torch.float32), 1) == []


def test_rows_end_with_the_batch_and_with_the_kernel() -> None:
    assert limits_of(1, "fp8") == [1]
    assert limits_of(17, "fp8") == [1, 16, 32]
    assert limits_of(1000, "fp8") == [1, 16, 32, 64, 128, 256]
    assert limits_of(1000, "int4") == [1, 16, 32, 64, 128]


def test_what_a_table_names_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Task(Product("fp8", 8, 512, 1024, False), NORMED)
    other = Task(some.product._replace(rows=1), NORMED)
    assert untuned([some, other], TuningTable({some.product.key: TUNING})) == [other]
    by_hand = Product("bf16", 1, 512, 1024, False)
    monkeypatch.setitem(skinny.TUNED, (1, 512, 1024, False), SkinnyTuning())
    assert not has_measured(by_hand._replace(rows=8))
    monkeypatch.setitem(skinny.TUNED, (1, 512, 1024, False), None)
    assert has_measured(by_hand)
    assert not has_measured(by_hand._replace(format="fp8"))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert product_tuning.cache_folder() == tmp_path / "saccade" / "tuning"


def test_results_are_kept_on_disk_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks = [Task(Product("fp8", rows, 512, 1024, False), NORMED) for rows in (1, 8)]
    file = tmp_path / "gpu.json"

    def search_all(some: Sequence[Task], *given: object, pdl: bool) -> Iterator[Found]:
        yield from map(found, some)

    monkeypatch.setattr(product_tuning, "search_all", search_all)
    monkeypatch.setattr(product_tuning, "_cache", lambda device: file)
    results = tune(tasks, TuningTable(gpu=Gpu(20)), CPU, 1.0, pdl=True)
    next(results)
    assert set(read_cache(file)) == {tasks[0].product.key}
    assert len(list(results)) == 1
    assert read_cache(file) == {task.product.key: TUNING for task in tasks}


def test_a_start_uses_what_it_found(vl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Task] = []

    def fake(tasks: Sequence[Task], *given: object, pdl: bool) -> Iterator[Found]:
        seen.extend(tasks)
        yield found(tasks[0])

    monkeypatch.setattr("saccade.engine.builder.can_tune", lambda device, mode: True)
    monkeypatch.setattr("saccade.engine.builder.tune", fake)
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_blocks": 64, "progress": False}
    llm = LLM(str(vl_folder), tuning="auto", **options)
    mode = llm.engine._executor.runner._model.mode
    assert mode.tunings.choose(seen[0].product) == TUNING
    seen.clear()
    LLM(str(vl_folder), **options)
    assert not seen


def test_only_kernels_of_a_gpu_are_tuned() -> None:
    assert not can_tune(CPU, KernelMode())
    assert not can_tune(torch.device("cuda"), KernelMode("torch"))
    assert not can_tune(torch.device("cuda"), KernelMode(deterministic=True))
    assert not load_tunings(CPU, cached=True).entries


def test_the_command_says_what_it_won_and_refuses_a_cpu(vl_folder: Path) -> None:
    results = [found(Task(Product("fp8", 8, 512, 1024, True), GATED))]
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(report(results), summary(results, 1, 3))
    text = console.export_text()
    assert "512 x 1024 gated" in text
    assert "10.0%" in text
    assert "1 of 1 products searched, 2 named by tables; 10.0% faster" in text
    result = CliRunner().invoke(app, ["tune", str(vl_folder), "--device", "cpu"])
    assert result.exit_code == 1
    assert "nothing to tune on cpu" in str(result.exception)
