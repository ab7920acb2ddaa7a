"""Matrix products with few rows:  y = x W^T  for x [M, K], W [N, K], M from 1 to 64, to 256 where measured.

    plain    y = cast(x W^T) + bias
    gated    y = silu(cast(x G^T)) * cast(x U^T)          W = (G, U), [2 * N, K]
    normed   t = residual + cast(x W^T);  y = rms norm of t   (both are returned)

W must come from memory once and without a pause: N * K * itemsize bytes, 2 * M FLOP per weight. A program
owns `columns` outputs (rows of W) and a split of K; x stays in L2. With `splits` > 1 each split writes
float32 partial sums which a second kernel adds in a fixed order, with the epilogue; `normed` always takes the
second kernel, as a norm needs whole rows. A next kernel that can add the partial sums itself gets them
(`skinny_linear_partials`): one launch less. Sums of one tuning and one padding of x (16, 32 or 64 rows) are
in one order whatever the other rows are.

`mode` of a tuning: "dot" pads x to 16 rows (mma), "swap" makes W the left side (64 columns and more: wgmma, W
from shared memory without a transposition), "fma" multiplies in registers (M = 1 only), "many" is
`many_rows`, made for 65 to 256 rows, which otherwise go to the library; its tall tiles are the fastest for
few rows too. With `pdl` the kernel starts beside its predecessor and prefetches its first `ahead` weights per
column to L2.

Ceiling on an H200: 4.69 TB/s. Qwen3-VL-8B, bf16, M = 1: qkv 50 MB 10.7 us, o 34 MB 7.2 us, gate_up 201 MB
42.9 us, down 101 MB 21.5 us, head 1.24 GB 265 us. cuBLAS reaches 2.55-4.37 TB/s there.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.gemm.many_rows import many_kernel
from saccade.kernels.gemm.split_k import Epilogue, Norm, SplitKPartials, reduce_parts, skinny_kernel
from saccade.kernels.gemm.tuning_model import LIMITS, Product, ProductTuning
from saccade.kernels.jit import pdl_options, power_of_two, up
from saccade.kernels.norm_rope.elementwise import WIDEST, add_norm, silu_mul

MOST_ROWS = 64


class SkinnyTuning(NamedTuple):
    """Launch parameters; only `splits` changes the order of the sums."""

    columns: int = 32  # in one program; "many": rows of W (two for each column of a gated product)
    depth: int = 256
    splits: int = 1
    warps: int = 4
    stages: int = 4
    mode: str = "dot"  # dot, swap, fma, many
    ahead: int = 0  # with pdl: weights of each column prefetched to L2 before the wait
    pdl: bool = False
    lines: int | None = None  # of x in one program, for any number of rows; None: all of them, up to 64

    @property
    def name(self) -> str:
        """Distinguishes candidates."""
        return " ".join(map(str, self[:6])) + (f" x{self.lines}" if self.lines else "")


# Measured choices by (rows up to, N, K, gated), None where the library is faster. Others go by the mode's
# `TuningTable`. Lines with a figure were timed alone (`python -m bench.kernels --choose --write`), the rest
# within a layer (`python -m bench.descend`) of 640 tokens a row: 106.4 us at 1 row, 237.7 at 8 and 16
# together, 133.3 at 32 and 156.4 at 64, where those chosen alone took 112.5, 252.3, 135.2 and 162.3; 209.5 at
# 128, where the library's products take 213.7.
TUNED: dict[tuple[int, int, int, bool], SkinnyTuning | None] = {
    (1, 6144, 4096, False): SkinnyTuning(4, 2048, 1, 4, 2, "fma"),  # qkv: 3.29 TB/s, 1.11x cuBLAS
    (16, 6144, 4096, False): SkinnyTuning(64, 128, 1, 4, 5, "swap", ahead=128),  # qkv
    (32, 6144, 4096, False): SkinnyTuning(64, 128, 1, 4, 5, "swap", ahead=128),  # qkv
    (64, 6144, 4096, False): SkinnyTuning(64, 128, 1, 4, 5, "dot"),  # qkv: 3.02 TB/s, 1.01x cuBLAS
    (1, 4096, 4096, False): SkinnyTuning(64, 128, 2, 4, 6, "many", lines=16),  # o
    (16, 4096, 4096, False): SkinnyTuning(64, 128, 2, 4, 6, "many", lines=16),  # o
    (32, 4096, 4096, False): SkinnyTuning(64, 128, 2, 4, 6, "many", lines=32),  # o
    (64, 4096, 4096, False): SkinnyTuning(64, 128, 2, 4, 5, "swap", ahead=1024),  # o
    (1, 12288, 4096, True): SkinnyTuning(192, 128, 1, 8, 3, "many", ahead=128, lines=16),  # gate_up
    (16, 12288, 4096, True): SkinnyTuning(192, 128, 1, 8, 3, "many", ahead=128, lines=16),  # gate_up
    (32, 12288, 4096, True): SkinnyTuning(64, 128, 1, 4, 6, "many", lines=32),  # gate_up
    (64, 12288, 4096, True): SkinnyTuning(192, 128, 1, 8, 3, "many", lines=64),  # gate_up
    (128, 12288, 4096, True): SkinnyTuning(192, 64, 1, 8, 5, "many", ahead=128, lines=128),  # gate_up
    (1, 4096, 12288, False): SkinnyTuning(64, 128, 2, 4, 6, "many", lines=16),  # down
    (16, 4096, 12288, False): SkinnyTuning(64, 128, 2, 4, 6, "many", lines=16),  # down
    (32, 4096, 12288, False): SkinnyTuning(64, 128, 2, 4, 5, "swap", ahead=128),  # down
    (64, 4096, 12288, False): SkinnyTuning(64, 128, 2, 4, 5, "swap", ahead=128),  # down
    (1, 151936, 4096, False): SkinnyTuning(4, 2048, 1, 4, 2, "fma"),  # head: 4.46 TB/s, 1.07x cuBLAS
    (16, 151936, 4096, False): SkinnyTuning(64, 128, 1, 4, 5, "swap"),  # head: 4.30 TB/s, 1.06x cuBLAS
    (32, 151936, 4096, False): SkinnyTuning(64, 128, 1, 4, 5, "dot"),  # head: 4.16 TB/s, 1.03x cuBLAS
    (64, 151936, 4096, False): None,  # head: 3.86 TB/s, 0.97x cuBLAS
}
# The same by (rows up to, N, K) for products whose parts the next kernel adds up (qkv, by `qk_norm_rope`),
# only where that was faster than as TUNED says.
LEFT: dict[tuple[int, int, int], SkinnyTuning] = {
    (1, 6144, 4096): SkinnyTuning(192, 64, 4, 4, 6, "many", ahead=128, lines=16),  # qkv
}
BEST_UNKNOWN = SkinnyTuning()  # of a shape that TUNED does not name: the mode's `TuningTable` decides
# Weights per column prefetched with pdl, where a tuning does not say.
AHEAD = 512  # pdl, 512 ahead: 0.97 of a layer without early launch


def default_tuning(
    rows: int, columns: int, depth: int, gated: bool, mode: KernelMode = DEFAULT_MODE
) -> SkinnyTuning:
    """As the mode wants it: launched early or not, one for all numbers of rows or the best for this one."""
    tuning = (
        fixed_tuning(columns, depth) if mode.deterministic else best_tuning(rows, columns, depth, gated, mode)
    )
    return tuning._replace(pdl=True, ahead=tuning.ahead or AHEAD) if mode.pdl else tuning


def partials_tuning(
    rows: int, columns: int, depth: int, mode: KernelMode = DEFAULT_MODE
) -> SkinnyTuning | None:
    """For a product whose partial sums the next kernel adds; None: use `skinny_linear`."""
    keys = ((limit, columns, depth) for limit in _limits(rows))
    tuning = next((LEFT[key] for key in keys if key in LEFT), None)
    if tuning is None and _measured(rows, columns, depth, False) is BEST_UNKNOWN:
        tuning = _by_table(rows, columns, depth, False, mode)
        tuning = tuning if tuning is not None and tuning.splits > 1 else None
    if tuning is None or not mode.pdl:
        return tuning
    return tuning._replace(pdl=True, ahead=tuning.ahead or AHEAD)


def fixed_tuning(columns: int, depth: int) -> SkinnyTuning:
    """One per shape: each row's sums are then in one order whatever the batch."""
    splits = max(1, min(8, up(264, up(columns, 64)), depth // 512))
    return SkinnyTuning(64, 128 if depth % 128 == 0 else 64, splits, lines=64)


def best_tuning(rows: int, columns: int, depth: int, gated: bool, mode: KernelMode) -> SkinnyTuning:
    measured = _measured(rows, columns, depth, gated)
    if measured is None or measured is BEST_UNKNOWN:
        measured = _by_table(rows, columns, depth, gated, mode)
    return BEST_UNKNOWN if measured is None else measured


def _by_table(rows: int, columns: int, depth: int, gated: bool, mode: KernelMode) -> SkinnyTuning | None:
    """None: the library's product. It multiplies more than MOST_ROWS rows unless a table names the shape."""
    product = Product("bf16", rows, columns * (2 if gated else 1), depth, gated)
    if rows > MOST_ROWS and (rows > LIMITS[-1] or product not in mode.tunings):
        return None
    tuning = mode.tunings.choose(product)
    return None if tuning is None else many_rows_tuning(tuning)


def has_measured(product: Product) -> bool:
    """Whether TUNED names these rows of this shape."""
    columns = product.columns // (2 if product.gated else 1)
    measured = _measured(product.rows, columns, product.depth, product.gated)
    return product.format == "bf16" and measured is not BEST_UNKNOWN


def many_rows_tuning(t: ProductTuning) -> SkinnyTuning:
    return SkinnyTuning(t.piece, t.depth, t.splits, t.warps, t.stages, "many", ahead=t.ahead, lines=t.lines)


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, mode: KernelMode = DEFAULT_MODE
) -> Tensor:
    """x W^T + bias; [M, K] by [N, K]. Beyond 64 rows the library's product, if no measured line is better."""
    _check(x, weight, bias, None, False)
    if _by_kernel(x, weight, mode):
        return skinny_triton(x, weight, bias=bias, mode=mode)[0]
    return linear_reference(x, weight, bias, mode)


def skinny_linear_partials(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, mode: KernelMode = DEFAULT_MODE
) -> Tensor | SplitKPartials:
    """The same for a caller that can add partial sums: it gets them where that was measured to be faster."""
    rows, depth = x.shape
    tuning = None if mode.deterministic else partials_tuning(rows, weight.shape[0], depth, mode)
    if tuning is None or not rows or not use_triton("skinny_linear", x, mode):
        return skinny_linear(x, weight, bias, mode)
    return skinny_partials(x, weight, bias, tuning)


def skinny_linear_gated(x: Tensor, weight: Tensor, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """silu(gate) * up of a fused projection [2 * N, K], gate first."""
    _check(x, weight, None, None, True)
    if _by_kernel(x, weight, mode, gated=True):
        return skinny_triton(x, weight, gated=True, mode=mode)[0]
    return silu_mul(linear_reference(x, weight, mode=mode), mode)


def skinny_linear_normed(
    x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, mode: KernelMode = DEFAULT_MODE
) -> tuple[Tensor, Tensor]:
    """The RMS norm of residual + x W^T, and that sum."""
    _check(x, weight, None, residual, False)
    if _by_kernel(x, weight, mode) and weight.shape[0] <= WIDEST:
        return skinny_triton(x, weight, residual=residual, norm=norm, mode=mode)
    return add_norm(linear_reference(x, weight, mode=mode), residual, norm.weight, None, norm.eps, mode)


def _by_kernel(x: Tensor, weight: Tensor, mode: KernelMode, *, gated: bool = False) -> bool:
    """For few rows where the library is not faster; for any number in the deterministic mode."""
    rows, depth = x.shape
    if not rows or not use_triton("skinny_linear", x, mode):
        return False
    if mode.deterministic:
        return True
    columns = weight.shape[0] // (2 if gated else 1)
    measured = _measured(rows, columns, depth, gated)
    if measured is BEST_UNKNOWN:
        measured = _by_table(rows, columns, depth, gated, mode)
    return measured is not None


def _limits(rows: int) -> tuple[int, ...]:
    """The limits whose table lines apply to so many rows, the least first."""
    above = tuple(limit for limit in LIMITS if rows <= limit)
    return tuple(limit for limit in above if limit <= MOST_ROWS) if rows <= MOST_ROWS else above[:1]


def _measured(rows: int, columns: int, depth: int, gated: bool) -> SkinnyTuning | None:
    """The least entry of TUNED these rows fall under; None: the library's."""
    keys = ((limit, columns, depth, gated) for limit in _limits(rows))
    return next((TUNED[key] for key in keys if key in TUNED), BEST_UNKNOWN)


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, mode: KernelMode = DEFAULT_MODE
) -> Tensor:
    """x W^T + bias. In the deterministic mode always 64 rows at a time."""
    rows = x.shape[0]
    if not mode.deterministic or rows == 0:
        return F.linear(x, weight, bias)
    padded = F.pad(x, (0, 0, 0, -rows % MOST_ROWS))
    pieces = [F.linear(piece, weight, bias) for piece in torch.split(padded, MOST_ROWS)]
    return torch.cat(pieces)[:rows]


def skinny_triton(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,  # together with a norm
    norm: Norm | None = None,
    tuning: SkinnyTuning | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> tuple[Tensor, Tensor]:
    """The result, and the sum before the norm (the result again without a norm)."""
    _check(x, weight, bias, residual, gated)
    (rows, depth), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    t = tuning or default_tuning(rows, columns, depth, gated, mode)
    if t.splits == 1 and norm is None and residual is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        _multiply_into(out, 1, x, weight, bias, gated, t)
        return out, out
    parts = _parts(x, weight, gated, t)
    plain = norm and norm._replace(quantized=None)
    reduced = reduce_parts(parts, x.dtype, Epilogue(bias, gated, residual, plain), t.pdl)
    return reduced.out, reduced.total


def skinny_partials(x: Tensor, weight: Tensor, bias: Tensor | None, tuning: SkinnyTuning) -> SplitKPartials:
    """The product in one launch, its splits of K not added up."""
    _check(x, weight, bias, None, False)
    return SplitKPartials(_parts(x, weight, False, tuning), bias, x.dtype)


def _parts(x: Tensor, weight: Tensor, gated: bool, t: SkinnyTuning) -> Tensor:
    """[splits, rows, rows of W] float32; no split is empty."""
    pieces = up(x.shape[1], t.depth)
    splits = up(pieces, up(pieces, t.splits))
    parts = torch.empty(splits, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _multiply_into(parts, splits, x, weight, None, gated, t)
    return parts


def _multiply_into(
    out: Tensor, splits: int, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, t: SkinnyTuning
) -> None:
    """Into the result [rows, columns], or into partial sums [splits, rows, rows of W]."""
    (rows, depth), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    if not 1 <= rows <= (MOST_ROWS if t.lines is None else 1 << 22):
        raise ValueError(f"{rows} rows; the skinny product takes 1 to {MOST_ROWS}")
    if t.mode not in ("dot", "swap", "fma", "many") or (t.mode == "fma" and rows != 1):
        raise ValueError(f"the mode {t.mode!r} does not multiply {rows} rows; 'fma' takes one, 'dot' any")
    if t.ahead & (t.ahead - 1):
        raise ValueError(f"{t.ahead} weights ahead; it must be a power of two, or 0")
    if t.mode == "many":
        _multiply_many_into(out, splits, x, weight, bias, gated, t)
        return
    lines = 1 if t.mode == "fma" else t.lines or max(16, power_of_two(rows))
    skinny_kernel[(up(columns, t.columns), splits, up(rows, lines))](
        x, weight, x if bias is None else bias, out, rows, columns, depth, up(up(depth, t.depth), splits),
        x.stride(0), LINES=lines, COLUMNS=t.columns, DEPTH=t.depth, MODE=t.mode, GATED=gated,
        BIAS=bias is not None, PARTS=out.dim() == 3, EVEN=depth % t.depth == 0, STAGES=t.stages,
        AHEAD=t.ahead, num_warps=t.warps, **pdl_options(t.pdl),
    )  # fmt: skip


def _multiply_many_into(
    out: Tensor, splits: int, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, t: SkinnyTuning
) -> None:
    (rows, depth), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    piece = t.columns & -t.columns  # 192: three of 64
    if t.lines is None or rows > LIMITS[-1] or piece < 16 or t.columns > 3 * piece:
        raise ValueError(
            f"{rows} rows by {t}: 'many' takes up to {LIMITS[-1]}, a number of lines, and a power of two of "
            "columns (16 or more) or thrice that"
        )
    many_kernel[(up(rows, t.lines), up(weight.shape[0], t.columns), splits)](
        x, weight, x if bias is None else bias, out, rows, columns, depth, up(up(depth, t.depth), splits),
        x.stride(0), PIECES=t.columns // piece, PIECE=piece, LINES=t.lines, DEPTH=t.depth, GATED=gated,
        BIAS=bias is not None, PARTS=out.dim() == 3, EVEN=depth % t.depth == 0, STAGES=t.stages,
        AHEAD=t.ahead, num_warps=t.warps, **pdl_options(t.pdl),
    )  # fmt: skip


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"{tuple(x.shape)} {x.dtype} by the transpose of {tuple(weight.shape)} {weight.dtype}"
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("rows of x and of the weight must be dense, and the weight contiguous")
    if gated and (weight.shape[0] % 2 or bias is not None or residual is not None):
        raise ValueError(f"a gated product of {weight.shape[0]} columns; it needs an even number and no bias")
    columns = weight.shape[0]
    if bias is not None and (bias.shape != (columns,) or bias.dtype != x.dtype):
        raise ValueError(f"{columns} columns with a bias of {tuple(bias.shape)} {bias.dtype}")
    if residual is not None and (
        residual.shape != (x.shape[0], columns) or residual.dtype != x.dtype or residual.stride(1) != 1
    ):
        raise ValueError(f"[{x.shape[0]}, {columns}] with a residual of {tuple(residual.shape)}")
