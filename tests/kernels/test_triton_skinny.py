"""Products of few rows against torch's own, with every epilogue and way of multiplying."""

import pytest
import torch
import torch.nn.functional as F

from bench.candidates import CANDIDATES
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.skinny import (
    SkinnyTuning,
    default_tuning,
    skinny_linear,
    skinny_linear_gated,
    skinny_linear_normed,
    skinny_triton,
)
from saccade.kernels.gemm.split_k import Norm
from saccade.kernels.norm_rope.elementwise import silu_mul_reference
from tests.kernels.buffers import EXACT, PLACES, Place, assert_near, poison, where_it_fits
from tests.kernels.epilogues import assert_epilogues

TUNINGS = [
    SkinnyTuning(16, 32, 1),
    SkinnyTuning(32, 64, 3),
    SkinnyTuning(64, 32, 1, mode="swap"),
    SkinnyTuning(64, 32, 2, mode="swap"),
]
FMA = SkinnyTuning(8, 64, 2, mode="fma")


@pytest.mark.parametrize("tuning", [*TUNINGS, FMA], ids=lambda tuning: str(tuple(tuning)[:6]))
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("place", PLACES)
def test_every_epilogue_is_the_reference(
    place: Place, rows: int, tuning: SkinnyTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tuning.mode == "fma" and rows > 1:
        pytest.skip("multiplies one row")
    poison(monkeypatch)
    assert_epilogues(place, rows, 72, 200, tuning)  # no multiples of any tile


@pytest.mark.parametrize("place", EXACT)
def test_a_row_does_not_depend_on_the_batch(place: Place) -> None:
    x, weight = place.randn(16, 96), place.randn(40, 96, seed=1)
    tuning = SkinnyTuning(16, 32, 3)
    alone, _ = skinny_triton(x[3:4], weight, tuning=tuning)
    together, _ = skinny_triton(x, weight, tuning=tuning)
    assert torch.equal(alone[0], together[3])


@pytest.mark.parametrize("place", [PLACES[4]])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("tuning", CANDIDATES, ids=lambda tuning: str(tuple(tuning)[:6]))
def test_candidates_are_right_at_the_sizes_of_a_model(place: Place, tuning: SkinnyTuning, rows: int) -> None:
    if tuning.mode == "fma" and rows > 1:
        pytest.skip("multiplies one row")
    x, weight = place.randn(rows, 4096), place.randn(1024, 4096, seed=1) / 64
    with where_it_fits():
        made = skinny_triton(x, weight, tuning=tuning)[0]
    assert_near(made, F.linear(x, weight), place.dtype)


def test_a_measured_tuning_is_used_for_its_rows_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = SkinnyTuning(16, 512, 2)
    monkeypatch.setattr(skinny, "TUNED", {(16, 4096, 4096, False): measured})
    assert default_tuning(1, 4096, 4096, False) == measured
    assert default_tuning(16, 4096, 4096, False) == measured
    assert default_tuning(17, 4096, 4096, False) != measured
    assert default_tuning(8, 4096, 4096, True) != measured


def test_wrappers_run_the_reference_on_the_cpu_and_refuse_what_does_not_fit() -> None:
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    residual, norm = torch.randn(3, 6), Norm(torch.randn(6), 1e-6)
    assert torch.equal(skinny_linear(x, weight), F.linear(x, weight))
    assert torch.equal(skinny_linear_gated(x, weight), silu_mul_reference(F.linear(x, weight)))
    assert torch.equal(skinny_linear_normed(x, weight, residual, norm)[1], residual + F.linear(x, weight))
    with pytest.raises(ValueError, match=r"\(3, 8\).*\(6, 7\)"):
        skinny_linear(x, weight[:, :7])
    with pytest.raises(ValueError, match="65 rows"):
        skinny_triton(torch.zeros(65, 8), weight)
    with pytest.raises(ValueError, match="'fma'"):
        skinny_triton(x, weight, tuning=SkinnyTuning(mode="fma"))
    with pytest.raises(ValueError, match="gated product of 5"):
        skinny_linear_gated(x, weight[:5])
    with pytest.raises(ValueError, match="residual"):
        skinny_linear_normed(x, weight, residual[:2], norm)
    with pytest.raises(ValueError, match="both or neither"):
        skinny_triton(x, weight, residual=residual)
