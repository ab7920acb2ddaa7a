"""INT8 by oneDNN: exact integer sums, the reference's numbers, and no influence of a batch on its rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.config import EngineConfig, LoadFormat
from saccade.engine.core import Engine
from saccade.kernels.dispatch import DEFAULT_MODE
from saccade.kernels.gemm.quantize import quantize_rows_reference
from saccade.kernels.gemm.split_k import Epilogue, Norm
from saccade.quantization.cpu_int8 import OneDNNWeight, has_exact_int8, quantize_rows_unsigned, takes
from saccade.quantization.online import RoundToNearest
from saccade.quantization.weights import DenseWeight, EightBitWeight
from tests.parity.test_deterministic import SURROUNDINGS, TEXTS, numbers

pytestmark = pytest.mark.skipif(not has_exact_int8(), reason="no exact INT8 products by oneDNN here")
SHAPES = [(96, 64), (37, 53), (1, 588), (576, 1536)]  # N, K


def rounded(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> EightBitWeight:
    noise = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float32)
    weight = RoundToNearest("int8").quantize(noise.to(dtype))
    assert isinstance(weight, EightBitWeight)
    return weight


def activations(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))
    return (x * torch.logspace(-3, 3, rows)[:, None]).to(dtype)


def exact(x: torch.Tensor, weight: EightBitWeight) -> torch.Tensor:
    """By integers, and two roundings."""
    rows = quantize_rows_reference(x, torch.int8)
    sums = (rows.values.long() @ weight.values.long().t()).float()
    return sums * weight.scale * rows.scale[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 65])
def test_product_is_that_of_integers(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = rounded(*shape, dtype), activations(rows, shape[1], dtype)
    y = OneDNNWeight.pack(weight).partials(x, None, DEFAULT_MODE)
    assert torch.equal(y, exact(x, weight).to(dtype))
    dense = DenseWeight.of(weight, torch.float32)
    reference = dense.partials(x.float(), None, DEFAULT_MODE)
    magnitude = x.float().abs() @ dense.weight.abs().t()
    assert ((y.float() - reference).abs() / magnitude).max() < 4 * torch.finfo(dtype).eps


def test_largest_values_do_not_overflow() -> None:
    weight = EightBitWeight(
        torch.full((16, 4096), -128, dtype=torch.int8), torch.ones(16), "token", torch.float32
    )
    x = torch.full((3, 4096), -1.0)
    assert torch.equal(OneDNNWeight.pack(weight).partials(x, None, DEFAULT_MODE), exact(x, weight))


@pytest.mark.parametrize("rows", [2, 8, 33, 200])
def test_row_does_not_depend_on_the_batch(rows: int) -> None:
    weight, x = OneDNNWeight.pack(rounded(320, 576)), activations(rows, 576)
    together = weight.partials(x, None, DEFAULT_MODE)
    alone = [weight.partials(row[None], None, DEFAULT_MODE) for row in x]
    assert torch.equal(together, torch.cat(alone))


def test_activations_are_rounded_as_by_the_reference() -> None:
    ties = torch.tensor([[127.5, 0.5, 1.5, -2.5, 1.4999999, -127.5, 0.49999997, -0.0]])
    x = torch.cat((ties, activations(64, 8)))
    values, scale = quantize_rows_unsigned(x)
    reference = quantize_rows_reference(x, torch.int8)
    assert torch.equal(values.int() - 128, reference.values.int())
    assert torch.equal(scale[:, 0], reference.scale)


def test_rows_of_zeros_give_zeros_and_rows_with_nan_give_nan() -> None:
    x = torch.stack((torch.zeros(64), torch.full((64,), torch.nan), torch.ones(64)))
    y = OneDNNWeight.pack(rounded(48, 64)).partials(x, None, DEFAULT_MODE)
    assert torch.equal(y[0], torch.zeros(48))
    assert y[1].isnan().all()
    assert y[2].isfinite().all()
    assert OneDNNWeight.pack(rounded(48, 64)).partials(x[:0], None, DEFAULT_MODE).shape == (0, 48)


def test_epilogues_are_the_reference_ones() -> None:
    weight, x = rounded(64, 128), activations(5, 128)
    fast, reference = OneDNNWeight.pack(weight), DenseWeight.of(weight, torch.float32)
    norm = Norm(torch.rand(64), 1e-6, None)
    for epilogue in (Epilogue(torch.rand(64)), Epilogue(gated=True),
                     Epilogue(None, False, torch.rand(5, 64), norm)):  # fmt: skip
        for one, other in zip(fast.product(x, epilogue, DEFAULT_MODE),
                              reference.product(x, epilogue, DEFAULT_MODE), strict=True):  # fmt: skip
            if one is not None and other is not None:
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-3)


def test_joined_weights_keep_their_values() -> None:
    parts = [rounded(32, 64), rounded(16, 64)]
    packed = [OneDNNWeight.pack(part) for part in parts]
    assert packed[0].joins(packed[1:])
    joined = packed[0].join(packed[1:])
    assert joined.shape == (48, 64)
    assert torch.equal(
        joined.dequantize(torch.float32), torch.cat([p.dequantize(torch.float32) for p in parts])
    )


def test_only_int8_with_a_scale_per_row_and_token_is_taken() -> None:
    values, scale = torch.zeros(128, 128, dtype=torch.int8), torch.ones(128)
    assert takes(EightBitWeight(values, scale, "token", torch.float32))
    assert not takes(EightBitWeight(values, scale, "none", torch.float32))
    assert not takes(EightBitWeight(values, torch.ones(1, 1), "token", torch.float32))
    assert not takes(EightBitWeight(values.to(torch.float8_e4m3fn), scale, "token", torch.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("surroundings", ["together", "small chunks", "preempted"])
def test_greedy_tokens_do_not_depend_on_the_batch(
    family_folder: Callable[[str], Path], surroundings: str, dtype: str
) -> None:
    options: dict[str, Any] = {"quantization": "int8", "dtype": dtype, "deterministic": True}
    folder = family_folder("llama")
    alone = [numbers(folder, [text], **options)[0] for text in TEXTS]
    assert numbers(folder, TEXTS, **options, **SURROUNDINGS[surroundings]) == alone


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_tied_head_is_quantised_beside_the_embedding(
    family_folder: Callable[[str], Path], load_format: LoadFormat
) -> None:
    folder = family_folder("qwen3_vl_tied")
    sizes = {}
    for stages in ("head=none", "head=int8"):
        config = EngineConfig(
            model=str(folder), device="cpu", dtype="float32", num_blocks=64, quantization=stages,
            load_format=load_format,
        )  # fmt: skip
        sizes[stages] = Engine(config, progress=False).info.weight_bytes
    assert sizes["head=int8"] > sizes["head=none"]
