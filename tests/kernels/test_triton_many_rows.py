"""Products of 65 to 256 rows by their own kernel, and which rows get it."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from bench.candidates import FULL, TILES, candidates, filled
from bench.kernel_cases import PRODUCTS
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.skinny import (
    SkinnyTuning,
    skinny_linear,
    skinny_linear_gated,
    skinny_linear_normed,
    skinny_linear_partials,
    skinny_partials,
    skinny_triton,
)
from saccade.kernels.gemm.split_k import Norm, SplitKPartials
from saccade.kernels.norm_rope.elementwise import silu_mul_reference
from tests.kernels.buffers import EXACT, PLACES, Place, assert_near, needs_triton, poison, where_it_fits
from tests.kernels.epilogues import assert_epilogues

WHOLE = SkinnyTuning(64, 32, 1, mode="many", lines=128)
CUT = SkinnyTuning(48, 64, 3, mode="many", lines=128)  # three pieces of 16
WIDE = SkinnyTuning(96, 64, 2, mode="many", lines=256)  # three pieces of 32


TRIED = [(100, WHOLE), (65, CUT), (200, WIDE._replace(splits=1)), (128, WHOLE), (129, CUT), (256, WIDE)]
TRIED += [(1, CUT._replace(lines=16)), (13, WHOLE._replace(lines=16)), (30, CUT._replace(lines=32))]


@pytest.mark.parametrize(("rows", "tuning"), TRIED, ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.parametrize("place", PLACES)
def test_every_epilogue_is_the_reference(
    place: Place, rows: int, tuning: SkinnyTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = TRIED.index((rows, tuning)) % 2
    if place.device == "cpu" and place.dtype != (torch.float32, torch.float16)[turn]:
        pytest.skip("the interpreter takes a while: each is tried in one dtype there, on a GPU in all")
    poison(monkeypatch)
    columns, depth = 136, 264  # no multiple of any tile
    with where_it_fits() if place.dtype == torch.float32 else nullcontext():
        # Of several splits it is the second kernel that adds the bias, as for few rows.
        assert_epilogues(place, rows, columns, depth, tuning, sums=tuning.splits == 1)
    x, weight = place.randn(rows, depth), place.randn(columns, depth, seed=1) * depth**-0.5
    bias = place.randn(columns, seed=2)
    parts = skinny_partials(x, weight, bias, tuning)
    assert parts.sums.shape == (tuning.splits, rows, columns)
    assert_near(parts.reduce(), F.linear(x, weight, bias), place.dtype)


@pytest.mark.parametrize("place", EXACT)
def test_a_row_does_not_depend_on_the_batch(place: Place) -> None:
    x, weight = place.randn(128, 96), place.randn(40, 96, seed=1)
    together, _ = skinny_triton(x, weight, tuning=CUT)
    alone, _ = skinny_triton(x[:70], weight, tuning=CUT)
    assert torch.equal(alone, together[:70])


@pytest.mark.parametrize("place", [PLACES[4]])
@pytest.mark.parametrize("tile", [tile for some in TILES.values() for tile, _ in some], ids=lambda t: t.name)
def test_tiles_are_right_at_the_sizes_of_a_model(place: Place, tile: SkinnyTuning) -> None:
    x, weight = place.randn(tile.lines or 0, 4096), place.randn(1536, 4096, seed=1) / 64
    for splits in (1, 4):
        made, _ = skinny_triton(x, weight, tuning=tile._replace(splits=splits))
        assert_near(made, F.linear(x, weight), place.dtype)


@needs_triton
def test_table_lines_of_many_rows_apply_to_their_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without such a line these rows go to the library, and fewer never take it."""
    monkeypatch.setattr(skinny, "use_triton", lambda name, tensor, mode: True)
    weight = torch.zeros(40, 64)

    def by_kernel() -> list[int]:
        return [
            rows
            for rows in (64, 65, 128, 129, 256, 257)
            if skinny._by_kernel(torch.zeros(rows, 64), weight, DEFAULT_MODE)
        ]

    monkeypatch.setattr(skinny, "TUNED", {})
    assert by_kernel() == [64]  # of an unmeasured shape, by the rule for few rows
    monkeypatch.setattr(skinny, "TUNED", {(128, 40, 64, False): WHOLE})
    assert by_kernel() == [64, 65, 128]
    assert skinny.default_tuning(65, 40, 64, False) == WHOLE
    assert skinny.default_tuning(64, 40, 64, False) != WHOLE
    monkeypatch.setattr(skinny, "TUNED", {(128, 40, 64, False): None, (256, 40, 64, False): WIDE})
    assert by_kernel() == [64, 129, 256]
    monkeypatch.setattr(skinny, "LEFT", {(256, 40, 64): WIDE})
    assert [rows for rows in (64, 128, 129, 256, 257) if skinny.partials_tuning(rows, 40, 64)] == [129, 256]


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_the_products_of_a_model_use_a_measured_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, depth = 70, 48, 64
    launched: list[SkinnyTuning] = []
    plain = skinny._multiply_many_into

    def spy(*args: object) -> None:
        launched.append(args[-1])  # type: ignore[arg-type]
        plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(skinny, "_multiply_many_into", spy)
    lines = {(128, columns, depth, False): CUT, (128, columns // 2, depth, True): WHOLE}
    monkeypatch.setattr(skinny, "TUNED", lines)
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(rows, depth, generator=generator),
        torch.randn(columns, depth, generator=generator),
    )
    residual, norm = torch.randn(rows, columns, generator=generator), Norm(torch.ones(columns), 1e-6)
    mode = KernelMode("triton")
    product, gated = skinny_linear(x, weight, mode=mode), skinny_linear_gated(x, weight, mode)
    _, stream = skinny_linear_normed(x, weight, residual, norm, mode)
    assert not isinstance(skinny_linear_partials(x, weight, mode=mode), SplitKPartials)
    assert launched == [CUT, WHOLE, CUT, CUT]
    monkeypatch.setattr(skinny, "LEFT", {(128, columns, depth): CUT})
    left = skinny_linear_partials(x, weight, mode=mode)
    assert isinstance(left, SplitKPartials)
    assert torch.equal(left.reduce(), product)
    expected = F.linear(x, weight)
    assert_near(product, expected, torch.float32)
    assert_near(gated, silu_mul_reference(expected), torch.float32)
    assert_near(stream, residual + expected, torch.float32)


def test_what_the_kernel_cannot_do_is_refused() -> None:
    x, weight = torch.zeros(70, 64), torch.zeros(48, 64)
    for tuning in (WHOLE._replace(lines=None), WHOLE._replace(columns=80), WHOLE._replace(columns=8)):
        with pytest.raises(ValueError, match="70 rows"):
            skinny_triton(x, weight, tuning=tuning)
    with pytest.raises(ValueError, match="257 rows"):
        skinny_triton(torch.zeros(257, 64), weight, tuning=WHOLE)


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("product", PRODUCTS)
def test_candidates_fill_whole_waves_where_that_can_be(product: str, rows: int) -> None:
    columns, depth, gated = PRODUCTS[product]
    height = columns * (2 if gated else 1)
    resident = {tile._replace(splits=1): count for some in TILES.values() for tile, count in some}
    tried = candidates(rows, columns, depth, gated)
    full = [t for t in tried if filled(t, resident[t._replace(splits=1)], rows, height) >= FULL]
    assert len(tried) == len({t.name for t in tried})  # the names tell them apart
    assert any(t.columns == 192 and t.lines == 128 for t in full)
    assert {t.lines for t in tried} == ({128} if rows == 128 else {128, 256})
    assert all(t.splits == 1 for t in tried if product == "head")
