"""Tables of tunings, the model of the kernels, and the search: none of it needs a GPU."""

import json
import logging
from pathlib import Path

import pytest
import torch

from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.quantized_linear import (
    EightBit,
    FourBit,
    eight_bit_tuning,
    fixed_tuning,
    four_bit_tuning,
)
from saccade.kernels.gemm.tuning import (
    TuningTable,
    cache_path,
    entries_from_json,
    entries_to_json,
    read_cache,
    shipped_entries,
    write_cache,
)
from saccade.kernels.gemm.tuning_model import (
    FORMATS,
    LIMITS,
    MOST,
    Gpu,
    Product,
    ProductTuning,
    model_time,
    model_tunings,
    program,
)
from saccade.kernels.gemm.tuning_search import NORMED, Choice, Task, candidates, search

H200 = Gpu()
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
# Measured on an H200: format, rows, then the fastest tuning and its us for each of SHAPES.
MEASURED: list[tuple[str, int, list[tuple[tuple[int, ...], float]]]] = [
    ("fp8", 1, [((64, 16, 128, 4, 4, 4), 8.4), ((64, 16, 128, 4, 4, 4), 6.4), ((64, 16, 256, 1, 3, 4), 25.4),
                ((64, 16, 128, 4, 4, 4), 14.1)]),
    ("fp8", 32, [((64, 32, 256, 1, 6, 4), 8.9), ((64, 32, 256, 2, 4, 4), 6.9), ((64, 32, 256, 1, 3, 4), 27.7),
                 ((64, 32, 256, 2, 6, 4), 15.3)]),
    ("fp8", 64, [((128, 64, 128, 2, 6, 4), 9.8), ((64, 64, 128, 2, 6, 4), 7.4),
                 ((64, 64, 128, 1, 4, 4), 30.0), ((64, 64, 256, 2, 6, 4), 16.5)]),
    ("fp8", 128, [((128, 64, 128, 1, 6, 4), 11.3), ((64, 128, 128, 2, 6, 4), 8.5),
                  ((128, 64, 128, 1, 3, 4), 32.5), ((64, 128, 128, 2, 6, 4), 18.8)]),
    ("int4", 1, [((64, 16, 128, 4, 2, 4), 7.6), ((64, 16, 128, 4, 3, 4), 6.5), ((64, 16, 128, 1, 2, 4), 22.2),
                 ((64, 16, 128, 4, 3, 4), 12.7)]),
    ("int4", 32, [((64, 32, 64, 4, 3, 4), 9.0), ((64, 32, 64, 2, 3, 4), 7.4), ((64, 32, 64, 1, 3, 4), 29.3),
                  ((64, 32, 64, 4, 3, 4), 16.1)]),
]  # fmt: skip
CASES = [
    pytest.param(Product(form, rows, *SHAPES[name], name == "gate_up"), ProductTuning(*tuning), us,
                 id=f"{form} {rows} {name}")
    for form, rows, lines in MEASURED
    for name, (tuning, us) in zip(SHAPES, lines, strict=True)
]  # fmt: skip
SOME = Product("fp8", 16, 512, 1024, False)
TUNING = ProductTuning(64, 16, 128, 2, 4, 4)


@pytest.mark.parametrize(("product", "tuning", "us"), CASES)
def test_the_measured_tuning_is_among_the_candidates_and_its_time_is_predicted(
    product: Product, tuning: ProductTuning, us: float
) -> None:
    assert tuning[:6] in [made[:6] for made in model_tunings(product, H200)]
    assert model_time(product, tuning, H200) == pytest.approx(us, rel=0.2)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gpu", [H200, Gpu(108, 163 << 10), Gpu(20, 99 << 10)], ids=["h200", "a100", "small"])
def test_every_shape_has_candidates_that_fit_the_gpu(form: str, gpu: Gpu) -> None:
    for columns, depth in [(40, 64), (3072, 3072), (4608, 3584), (152_064, 3584), (8192, 28672)]:
        for rows in range(1, 257, 17):
            product = Product(form, rows, columns, depth, False)
            made = model_tunings(product, gpu)
            assert 1 <= len(made) <= MOST
            assert len(set(made)) == len(made)
            assert all(program(product, t, gpu).resident > 0 for t in made)


def test_products_with_few_columns_are_split() -> None:
    assert model_tunings(Product("fp8", 1, 2048, 8192, False), H200)[0].splits > 1
    assert model_tunings(Product("fp8", 1, 49152, 8192, False), H200)[0].splits == 1
    assert all(t.splits == 1 for t in model_tunings(Product("bf16", 1, 151_936, 4096, False), H200))


def test_a_table_speaks_for_the_rows_up_to_its_limit() -> None:
    table = TuningTable({SOME: TUNING})
    assert [rows for rows in range(1, 300) if SOME._replace(rows=rows) in table] == list(range(2, 17))
    assert table.choose(SOME._replace(rows=9)) == TUNING
    assert table.choose(SOME._replace(rows=1)) == model_tunings(SOME._replace(rows=1), H200)[0]
    more = table.extended({SOME._replace(rows=1): None})
    assert more.choose(SOME._replace(rows=1)) is None
    assert SOME._replace(rows=1) not in table


def test_entries_survive_a_file_and_shipped_ones_are_valid() -> None:
    entries = {SOME: TUNING, SOME._replace(format="bf16"): None}
    assert entries_from_json(entries_to_json(entries)) == entries
    shipped = shipped_entries()
    assert all(key.rows in LIMITS for key in shipped)
    assert all(t is None or program(key, t, H200).resident > 0 for key, t in shipped.items())


def test_the_cache_adds_up_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "gpu.json"
    assert read_cache(path) == {}
    write_cache(path, {SOME: TUNING})
    write_cache(path, {SOME._replace(rows=1): None})
    assert read_cache(path) == {SOME: TUNING, SOME._replace(rows=1): None}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 0, "entries": []}', '{"version": 1, "entries": [[1, 2]]}',
     json.dumps({"version": 1, "entries": [[["fp8", 7, 8, 8, False], None]]}),
     json.dumps({"version": 1, "entries": [[["fp8", 1, 8, 8, False], [64, 16]]]}),
     json.dumps({"version": 1, "entries": [[["fp8", 1, 8, 8, False], [0, 16, 128, 1, 1, 1]]]})],
)  # fmt: skip
def test_a_corrupt_cache_is_ignored_with_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read_cache(path) == {}
    assert str(path) in caplog.text
    write_cache(path, {SOME: TUNING})
    assert read_cache(path) == {SOME: TUNING}


def test_a_folder_that_cannot_be_written_does_not_stop_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    write_cache(tmp_path / "file" / "gpu.json", {SOME: TUNING})
    assert "not kept" in caplog.text


def test_each_gpu_has_a_file_of_its_own(tmp_path: Path) -> None:
    path = cache_path(tmp_path, "NVIDIA H200 / 141GB")
    assert path.parent == tmp_path
    assert path.name.startswith("nvidia-h200-141gb-triton-")
    assert path != cache_path(tmp_path, "NVIDIA H100")


def test_the_fastest_candidate_wins_by_more_than_a_percent() -> None:
    task, other, third = Task(SOME, NORMED), TUNING._replace(splits=4), TUNING._replace(stages=6)
    clear: dict[Choice, float] = {TUNING: 10e-6, other: 9e-6, third: float("inf"), None: 9.5e-6}
    found = search(task, tuple(clear), clear.__getitem__, 1.0, lambda: 0.0)
    assert found is not None
    assert (found.choice, found.seconds) == (other, 9e-6)
    assert (found.first, found.first_seconds) == (TUNING, 10e-6)
    close: dict[Choice, float] = {TUNING: 10e-6, other: 9.95e-6}
    found = search(task, tuple(close), close.__getitem__, 1.0, lambda: 0.0)
    assert found is not None
    assert (found.choice, found.seconds) == (TUNING, 10e-6)


def test_a_search_without_time_or_without_a_kernel_that_runs_finds_nothing() -> None:
    task, options = Task(SOME, NORMED), (TUNING, TUNING._replace(splits=4), None)
    clock = iter(range(10))
    assert search(task, options, lambda option: 1e-6, 2.0, lambda: next(clock)) is None
    assert search(task, options, lambda option: float("inf"), 1.0, lambda: 0.0) is None


def test_only_16_bit_products_may_go_to_the_library() -> None:
    assert candidates(SOME._replace(format="bf16"), H200)[-1] is None
    assert None not in candidates(SOME, H200)


def test_products_follow_the_table_of_their_mode() -> None:
    eight = EightBit(torch.zeros(512, 1024, dtype=torch.int8), torch.ones(512))
    four = FourBit(torch.zeros(512, 256, dtype=torch.int16), torch.ones(32, 512), None, 32, 1024)
    deep = TUNING._replace(depth=256)
    int8, int4, bf16 = (SOME._replace(format=form) for form in ("int8", "int4", "bf16"))
    mode = KernelMode(tunings=TuningTable({int8: deep, int4: TUNING, bf16: TUNING}))
    assert eight_bit_tuning(9, eight, False, mode) == deep
    assert eight_bit_tuning(9, eight._replace(scale=torch.ones(4, 8)), False, mode).depth == 128
    assert four_bit_tuning(9, four, False, mode) == TUNING._replace(depth=32)
    assert skinny.default_tuning(9, 512, 1024, False, mode) == skinny.many_rows_tuning(TUNING)
    assert skinny.partials_tuning(9, 512, 1024, mode) == skinny.many_rows_tuning(TUNING)
    alone = mode._replace(deterministic=True)
    assert eight_bit_tuning(9, eight, False, alone) == fixed_tuning(int8)
    assert skinny.default_tuning(9, 512, 1024, False, alone) == skinny.fixed_tuning(512, 1024)
