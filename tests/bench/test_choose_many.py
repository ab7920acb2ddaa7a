"""Times at 128 and 256 rows become lines of the tables: by the layer, and beside those of few rows."""

from pathlib import Path

from bench.candidates import candidates
from bench.choose import Result, rewrite_skinny, skinny_lines
from bench.choose_many import many_lines
from bench.kernel_cases import PRODUCTS
from bench.many_rows import LEFT, LIBRARY, many_cases
from saccade.kernels.gemm import skinny

QKV = [t for t in candidates(128, *PRODUCTS["qkv"]) if t.splits > 1][:2]
GATE, DOWN = (candidates(128, *PRODUCTS[name])[0] for name in ("gate_up", "down"))
HEAD = candidates(256, *PRODUCTS["head"])[-1]
RESULTS = [
    Result(
        "many",
        "qkv 128",
        {QKV[0].name: 15e-6, QKV[1].name: 18e-6, LEFT + QKV[1].name: 14e-6},
        {LIBRARY: 16e-6},
    ),
    Result("many", "gate_up 128", {GATE.name: 50e-6}, {LIBRARY: 60e-6}),  # quicker alone, slower in a layer
    Result("many", "down 128", {DOWN.name: 40e-6}, {LIBRARY: 30e-6}),
    Result("many", "head 256", {HEAD.name: 400e-6}, {LIBRARY: 450e-6}),  # in no layer
    Result(
        "many",
        "layer 128",
        {
            "all four": 190e-6,
            f"qkv: {QKV[0].name}": 197e-6,
            f"qkv: {LEFT}{QKV[1].name}": 195e-6,
            f"gate_up: {GATE.name}": 201e-6,
            f"down: {DOWN.name}": 210e-6,
        },
        {LIBRARY: 200e-6},
    ),
]


def tables(text: str) -> dict[str, dict[tuple[object, ...], object]]:
    scope: dict[str, dict[tuple[object, ...], object]] = {}
    for table in ("TUNED", "LEFT"):
        body = text.split(f"\n{table}: ")[1].split(" = ", 1)[1].split("\n}\n")[0]
        scope[table] = eval(body + "\n}", {"SkinnyTuning": skinny.SkinnyTuning})
    return scope


def test_the_layer_decides_and_the_lines_of_few_rows_stay() -> None:
    before = Path(str(skinny.__file__)).read_text()
    lines = skinny_lines(RESULTS, set(), PRODUCTS)
    assert lines.tuned is None
    assert lines.left is None
    made = rewrite_skinny(rewrite_skinny(before, lines), lines)  # what is written can be written again
    old, new = tables(before), tables(made)
    few = {table: {key: value for key, value in old[table].items() if key[0] <= 64} for table in old}  # type: ignore[operator]
    assert new["TUNED"] == few["TUNED"] | {
        (128, *PRODUCTS["qkv"]): QKV[0],
        (128, *PRODUCTS["gate_up"]): None,
        (128, *PRODUCTS["down"]): None,
        (256, *PRODUCTS["head"]): HEAD,
    }
    assert new["LEFT"] == few["LEFT"] | {(128, *PRODUCTS["qkv"][:2]): QKV[1]}
    # few rows measured again: those of many stay; wrong on this chip: none of them stays
    again = [Result("products", "qkv 1", {"16 256 1 4 4 dot": 12e-6}, {"cuBLAS": 16e-6})]
    after = tables(rewrite_skinny(made, skinny_lines(again, set(), PRODUCTS)))
    assert after["TUNED"][128, *PRODUCTS["qkv"]] == QKV[0]
    assert [key for key in after["TUNED"] if key[0] == 1] == [(1, *PRODUCTS["qkv"])]
    wrong = tables(rewrite_skinny(made, skinny_lines([], {"many"}, PRODUCTS)))
    assert wrong == few


def test_without_a_layer_the_product_and_what_follows_it_decide() -> None:
    lines = many_lines(RESULTS[1:2], PRODUCTS)
    assert lines is not None
    assert f"{GATE.columns}, {GATE.depth}, {GATE.splits}" in lines.tuned[0]
    assert "lines=128" in lines.tuned[0]
    assert many_lines([], PRODUCTS) is None


def test_every_candidate_is_timed_alone_and_in_a_layer() -> None:
    """Otherwise what is elected by itself could not be held against the library's layer."""
    found = {case.name: case for case in many_cases({"many"})}
    for rows in (128, 256):
        layer = found[f"layer {rows}"]
        for name in ("qkv", "o", "gate_up", "down"):
            assert {f"{name}: {variant}" for variant in found[f"{name} {rows}"].kernels} <= set(layer.kernels)
        assert next(iter(layer.others)) == LIBRARY
        assert {"all four", "all four, qkv left"} <= set(layer.kernels)
        assert found[f"head {rows}"].kernels
    assert not list(many_cases({"products"}))
