"""What a product may end in, each against its reference: for every kernel that multiplies."""

import torch.nn.functional as F

from saccade.kernels.gemm.skinny import SkinnyTuning, skinny_triton
from saccade.kernels.gemm.split_k import Norm
from saccade.kernels.norm_rope.elementwise import add_norm_reference, silu_mul_reference
from tests.kernels.buffers import Place, assert_near


def assert_epilogues(
    place: Place, rows: int, columns: int, depth: int, tuning: SkinnyTuning, *, sums: bool = True
) -> None:
    """`sums`: bias too."""
    x = place.randn(rows, depth + 8)[:, 8:]
    weight = place.randn(columns, depth, seed=1) * depth**-0.5
    bias, residual = place.randn(columns, seed=2), place.randn(rows, columns + 8, seed=3)[:, :columns]
    norm = Norm(place.randn(columns, seed=4), 1e-6)
    plain = F.linear(x, weight)
    assert_near(skinny_triton(x, weight, tuning=tuning)[0], plain, place.dtype)
    if sums:
        made, _ = skinny_triton(x, weight, bias=bias, tuning=tuning)
        assert_near(made, F.linear(x, weight, bias), place.dtype)
    made, _ = skinny_triton(x, weight, gated=True, tuning=tuning)
    assert_near(made, silu_mul_reference(plain), place.dtype)
    normed, stream = skinny_triton(x, weight, residual=residual, norm=norm, tuning=tuning)
    expected, total = add_norm_reference(plain, residual, norm.weight, None, norm.eps)
    assert_near(normed, expected, place.dtype, scale=2)
    assert_near(stream, total, place.dtype)
