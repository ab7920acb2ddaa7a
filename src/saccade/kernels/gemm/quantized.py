"""The kernels of products with quantised weights: y = x W^T for few rows of x, W in 8 or 4 bits.

8 bits: x and W are both FP8 or both int8 and go to the tensor cores as they are; the scales of the rows of x
and of W (or of its blocks of 128 x 128) multiply the sums. W is the left side, as in `many_rows`.

4 bits: x is in bfloat16. Four neighbouring tiles of W lie in the nibbles of one tile of int16, so the copy to
shared memory and the load of the operand are those of a 16-bit product, and a nibble becomes bfloat16 in two
instructions for two columns: a mask leaves n * 2^-133 (a subnormal number) or 16 times that, and one fused
multiply-add makes (n - 8) / 64 of it, exactly. The 64 goes into the group's scale.

H200, us, qkv / o / gate_up / down of Qwen3-VL-8B alone:
    1 row     bf16 14.0 / 10.1 / 47.6 / 25.4   FP8 8.4 / 6.4 / 25.4 / 14.1   4 bits 7.6 / 6.5 / 22.2 / 12.7
    32 rows   bf16 15.6 / 10.7 / 49.6 / 26.6   FP8 8.9 / 6.9 / 27.7 / 15.3   4 bits 9.0 / 7.4 / 29.3 / 16.1
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from saccade.kernels.gemm.many_rows import row_of_w, store_piece
from saccade.kernels.jit import constant, jit, jit_unspecialized, prefetch_l2, tl, wait_for_previous


def _nibble_asm(index: int) -> str:
    """Two int16 in one register to the two bfloat16 of their nibbles `index`."""
    shift = "shr.b32 t, t, 8;" if index >= 2 else ""
    mask, power = ("0x00f000f0", "0x7d007d00") if index % 2 else ("0x000f000f", "0x7f007f00")
    constants = f"mov.b32 a, {power}; mov.b32 b, 0xbe00be00;"
    return (
        f"{{ .reg .b32 t, a, b; mov.b32 t, $1; {shift} and.b32 t, t, {mask}; {constants} "
        "fma.rn.bf16x2 $0, t, a, b; }"
    )


_ASM_0, _ASM_1, _ASM_2, _ASM_3 = (constant(_nibble_asm(index)) for index in range(4))


@jit
def _nibbles(raw, INDEX: tl.constexpr, CODE: tl.constexpr, kind: tl.constexpr, ASM: tl.constexpr):
    """(n - 8) / 64 of the nibbles INDEX of int16 values, in `kind`."""
    if ASM:
        y = tl.inline_asm_elementwise(CODE, "=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        n = (raw.to(tl.int32) >> (4 * INDEX)) & 15
        y = ((n - 8).to(tl.float32) / 64).to(kind)
    return y


@jit
def _add_slice(acc, raw, x_at, first, depth, real, scale, zero, row, columns, group, INDEX: tl.constexpr,
               CODE: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """acc [piece, lines] + W x^T over the columns of x from `first` on, one group of W."""
    at = first + tl.arange(0, raw.shape[1])
    if EVEN:
        values = tl.load(x_at + at[None, :], mask=real, other=0.0)
    else:
        values = tl.load(x_at + at[None, :], mask=real & (at < depth)[None, :], other=0.0)
    weights = _nibbles(raw, INDEX, CODE, values.dtype, ASM)
    place = tl.minimum(first, depth - 1) // group * columns + row
    factor = tl.load(scale + place).to(tl.float32) * 64.0
    y = tl.dot(weights, tl.trans(values), input_precision="ieee")
    if ZERO:  # (q - z) = (q - 8) + (8 - z); 8 - z times the sum of x, by the tensor cores
        offset = (8 - tl.load(zero + place).to(tl.int32)).to(tl.float32)
        sixtyfourth = tl.full(weights.shape, 0.015625, values.dtype)
        y += tl.dot(sixtyfourth, tl.trans(values), input_precision="ieee") * offset[:, None]
    return acc + y * factor[:, None]


@jit_unspecialized("rows", "steps", "group")
def four_bit_kernel(x, w, scale, zero, bias, out, rows, columns, depth, width, steps, group, x_stride,
                    PIECE: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr, SLICE: tl.constexpr,
                    GATED: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
                    EVEN: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """`steps` tiles of DEPTH int16 for PIECE rows of W [., width]; DEPTH divides SLICE and the group."""
    m = tl.program_id(0) * LINES + tl.arange(0, LINES)
    first = tl.program_id(1) * (PIECE // 2 if GATED else PIECE)
    split = tl.program_id(2)
    start = split * steps
    stop = tl.minimum(start + steps, width // DEPTH)
    row = row_of_w(first, columns, PIECE, GATED)
    w_at = w + row.to(tl.int64) * width
    if PDL and AHEAD > 0:
        prefetch_l2(w_at + start * DEPTH, tl.full([PIECE], True, tl.int1), (stop - start) * DEPTH, AHEAD)
    wait_for_previous(PDL)
    acc = tl.zeros([PIECE, LINES], tl.float32)
    total = columns * (2 if GATED else 1)  # rows of W
    x_at = x + m[:, None] * x_stride
    real = (m < rows)[:, None]
    lane = tl.arange(0, DEPTH)
    for k in tl.range(start, stop, num_stages=STAGES):
        raw = tl.load(w_at[:, None] + (k * DEPTH + lane)[None, :], eviction_policy="evict_first")
        at = tl.multiple_of(k * DEPTH // SLICE * (4 * SLICE) + k * DEPTH % SLICE, DEPTH)
        acc = _add_slice(acc, raw, x_at, at, depth, real, scale, zero, row, total, group, 0, _ASM_0, ZERO,
                         ASM, EVEN)  # fmt: skip
        acc = _add_slice(acc, raw, x_at, at + SLICE, depth, real, scale, zero, row, total, group, 1, _ASM_1,
                         ZERO, ASM, EVEN)  # fmt: skip
        acc = _add_slice(acc, raw, x_at, at + 2 * SLICE, depth, real, scale, zero, row, total, group, 2,
                         _ASM_2, ZERO, ASM, EVEN)  # fmt: skip
        acc = _add_slice(acc, raw, x_at, at + 3 * SLICE, depth, real, scale, zero, row, total, group, 3,
                         _ASM_3, ZERO, ASM, EVEN)  # fmt: skip
    store_piece(acc, bias, out, first, m, split, rows, columns, PIECE, LINES, GATED, BIAS, PARTS)


@jit_unspecialized("rows", "steps")
def eight_bit_kernel(x, w, x_scale, w_scale, bias, out, rows, columns, depth, steps, x_stride, blocks,
                     PIECE: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
                     BLOCKED: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
                     STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`steps` of K for PIECE rows of W. BLOCKED: w_scale is [., blocks], and DEPTH divides 128."""
    m = tl.program_id(0) * LINES + tl.arange(0, LINES)
    first = tl.program_id(1) * (PIECE // 2 if GATED else PIECE)
    split = tl.program_id(2)
    start = split * steps * DEPTH
    stop = tl.minimum(start + steps * DEPTH, depth)
    row = row_of_w(first, columns, PIECE, GATED)
    w_at = w + row.to(tl.int64) * depth
    if PDL and AHEAD > 0:  # counted in 16-bit values
        here = (w_at + start).to(tl.pointer_type(tl.int16))
        prefetch_l2(here, tl.full([PIECE], True, tl.int1), (stop - start) // 2, AHEAD)
    wait_for_previous(PDL)
    whole: tl.constexpr = tl.int32 if w.dtype.element_ty == tl.int8 else tl.float32
    zero: tl.constexpr = 0 if w.dtype.element_ty == tl.int8 else 0.0
    acc = tl.zeros([PIECE, LINES], tl.float32 if BLOCKED else whole)
    x_at = x + m[:, None] * x_stride
    real = (m < rows)[:, None]
    for k in tl.range(start, stop, DEPTH, num_stages=STAGES):
        at = k + tl.arange(0, DEPTH)
        if EVEN:
            values = tl.load(x_at + at[None, :], mask=real, other=zero)
            weights = tl.load(w_at[:, None] + at[None, :], eviction_policy="evict_first")
        else:
            values = tl.load(x_at + at[None, :], mask=real & (at < depth)[None, :], other=zero)
            weights = tl.load(w_at[:, None] + at[None, :], mask=(at < depth)[None, :], other=zero)
        if BLOCKED:
            factor = tl.load(w_scale + row // 128 * blocks + k // 128)
            acc += tl.dot(weights, tl.trans(values)) * factor[:, None]
        else:
            acc = tl.dot(weights, tl.trans(values), acc, out_dtype=whole)
    y = acc.to(tl.float32) * tl.load(x_scale + m, mask=m < rows, other=0.0)[None, :]
    if not BLOCKED:
        y *= tl.load(w_scale + row)[:, None]
    store_piece(y, bias, out, first, m, split, rows, columns, PIECE, LINES, GATED, BIAS, PARTS)
