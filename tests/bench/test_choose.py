"""From times to the lines of the tables: what is printed is what the tables take."""

import ast
import re
from pathlib import Path

import pytest
import torch

from bench.candidates import CANDIDATES
from bench.choose import (
    LAST,
    WITHOUT,
    Result,
    choice_lines,
    choices,
    rewrite_choice,
    rewrite_rows,
    rewrite_skinny,
    rows_line,
    skinny_lines,
)
from bench.kernel_cases import LAYERS, PRODUCTS
from saccade.kernels import dispatch as choice
from saccade.kernels.attention import decode as paged_decode
from saccade.kernels.dispatch import CHOICE, DEFAULT_MODE
from saccade.kernels.gemm import skinny

FAST, SLOW = CANDIDATES[0].name, CANDIDATES[3].name
CUT, UNCUT = (CANDIDATES[i].name for i in (4, 5))
RESULTS = [
    Result("decode", "1 x 640", {"tile 64": 5e-6, "tile 32": 4e-6}, {"reference": 12e-6}),
    Result("decode", "8 x 640", {"tile 64": 9e-6}, {"reference": 12e-6}),
    Result("prefill", "1 x 8192 of 8192", {"a": 3e-4}, {"reference": 9e-4, "SDPA flash, gathered": 2e-4}),
    Result("finish", "1 tokens", {"a": 5e-6}, {"reference": 4e-6}),
    Result("products", "qkv 1", {FAST: 12e-6, SLOW: 15e-6}, {"cuBLAS": 16e-6}),
    Result("qkv", "1 rows", {CUT: 12e-6, UNCUT: 13e-6}, {"now": 14e-6}),
    Result("qkv", "32 rows", {CUT: 15e-6}, {"now": 14e-6}),
    Result("products", "gate_up 64", {SLOW: 60e-6}, {"cuBLAS": 50e-6}),
    Result(
        "layer", "1 x 640", {"plain": 9e-5, "pdl": 8e-5, "pdl, 512 ahead": 7e-5, "pdl, 2048 ahead": 8e-5}, {}
    ),
    Result("sample", "top-p, flat 256", {"a": 2e-4}, {"reference": 9e-3}),
]


def test_a_kernel_is_chosen_for_being_right_and_faster() -> None:
    made = choices(RESULTS, {"sample"})
    assert made["decode_attention"][0] == "triton"
    assert made["prefill_attention"][0] == "triton"
    assert made["qk_norm_rope"][0] == "torch"
    assert made["draw"] == ("torch", "wrong on this chip")
    assert made["silu_mul"] == ("torch", "not compared")
    elsewhere = {"patchify", "quantize_rows", "quantized_linear"}  # measured by other programs
    assert set(made) == set(CHOICE) - elsewhere


def test_the_lines_are_those_the_tables_take(tmp_path: Path) -> None:
    text = rewrite_choice(Path(str(choice.__file__)).read_text(), choice_lines(RESULTS, set(), "H200"))
    table = next(
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CHOICE"
    )
    assert isinstance(table, ast.Dict)
    chosen = {
        ast.unparse(k)[1:-1]: ast.unparse(v) for k, v in zip(table.keys, table.values, strict=True) if k
    }
    assert set(chosen) == set(CHOICE)
    assert chosen["decode_attention"] == "KERNEL"
    assert chosen["qk_norm_rope"] == "TORCH"

    lines = skinny_lines(RESULTS, set(), PRODUCTS)
    made = rewrite_skinny(Path(str(skinny.__file__)).read_text(), lines)
    made = rewrite_skinny(made, lines)  # what is written can be written again
    scope: dict[str, object] = {"SkinnyTuning": skinny.SkinnyTuning}
    for node in ast.parse(made).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in ("TUNED", "LEFT") and node.value:
            exec(f"{ast.unparse(node.target)} = {ast.unparse(node.value)}", scope)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "AHEAD":
            exec(ast.unparse(node), scope)
    many = {key: tuning for key, tuning in skinny.TUNED.items() if key[0] > skinny.MOST_ROWS}  # not measured
    assert scope["TUNED"] == {
        (1, *PRODUCTS["qkv"]): CANDIDATES[0],
        (64, *PRODUCTS["gate_up"]): None,
        **many,
    }
    assert scope["LEFT"] == {(1, *PRODUCTS["qkv"][:2]): CANDIDATES[4]}  # not where apart is quicker
    assert scope["AHEAD"] == 512
    assert rewrite_skinny(made, skinny_lines([], set(), PRODUCTS)) == made  # what was not measured stays
    assert "LEFT: " in made
    assert re.search(r"^LEFT: .* = \{\}$", rewrite_skinny(made, skinny_lines([], {"qkv"}, PRODUCTS)), re.M)


def test_a_measured_shape_goes_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = skinny.SkinnyTuning(16, 64)
    monkeypatch.setattr(skinny, "TUNED", {(16, 40, 64, False): tuning, (32, 40, 64, False): None})
    assert skinny.default_tuning(9, 40, 64, False) == tuning
    assert skinny.default_tuning(9, 40, 65, False) != tuning
    monkeypatch.setattr(skinny, "use_triton", lambda name, tensor, mode: True)
    weight = torch.zeros(40, 64)
    assert skinny._by_kernel(torch.zeros(9, 64), weight, DEFAULT_MODE)
    assert not skinny._by_kernel(torch.zeros(20, 64), weight, DEFAULT_MODE)
    assert skinny._by_kernel(torch.zeros(40, 64), weight, DEFAULT_MODE)
    assert not skinny._by_kernel(torch.zeros(65, 64), weight, DEFAULT_MODE)


def test_one_launch_is_chosen_up_to_the_rows_where_it_is_quicker() -> None:
    rows = 1, 8, 16, 32
    name, way = LAST

    def layer(rows: int, apart: float, in_one: float) -> Result:
        return Result("layer", f"{rows} x 640", {WITHOUT: apart, way.variant: in_one}, {})

    # The last tells nothing: it is one launch anyway.
    quicker = [layer(rows[0], 9, 8), layer(rows[1], 9, 8.5), layer(rows[2], 9, 9.5), layer(rows[3], 9, 8)]
    text = Path(str(paged_decode.__file__)).read_text()
    for results, failed, most in (
        (quicker, set(), rows[1]),
        (quicker[1:], {way.part}, 0),
        ([layer(rows[0], 8, 9), layer(rows[1], 9, 8)], set(), 0),
    ):
        made = rewrite_rows(text, name, rows_line(results, failed, name, way))
        assert f"\n{name} = {most}  # " in made
    assert rewrite_rows(text, name, rows_line([], set(), name, way)) == text
    assert {WITHOUT, way.variant} <= set(LAYERS)
