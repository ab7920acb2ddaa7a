"""The kernel of `skinny` for 65 to 256 rows: a tile of W by all rows of x, so that W comes from memory once.

At 128 rows the weights of gate_up need 43 us and the arithmetic 38, and every tile of W reads all of x again,
from L2. Hence tall tiles that fill 132 multiprocessors in whole waves; 192 rows of W do: 128 tiles of
gate_up, 32 of qkv (by 4 splits), 792 = 6 * 132 of the head. Triton's tiles are powers of two, so those are
three pieces of 64 that share the tile of x.

W is the left side (wgmma takes 64 of its rows at once). In a gated product each 16 rows of a tile are 8 of
gate and the 8 of up that belong to them: both are then in one thread's registers.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from saccade.kernels.jit import jit, jit_unspecialized, prefetch_l2, tl, wait_for_previous
from saccade.kernels.norm_rope.elementwise import silu


@jit
def _column(first, PIECE: tl.constexpr, GATED: tl.constexpr):
    """The column of the answer that each row of a piece belongs to; `first`: of the piece."""
    row = tl.arange(0, PIECE)
    if GATED:
        column = first + row // 16 * 8 + row % 8
    else:
        column = first + row
    return column


@jit
def row_of_w(first, columns, PIECE: tl.constexpr, GATED: tl.constexpr):
    """Which row of W each row of a piece is. Beyond the last column the last one: its sums are not stored."""
    row = tl.minimum(_column(first, PIECE, GATED), columns - 1)
    if GATED:
        row += tl.arange(0, PIECE) // 8 % 2 * columns
    return row


@jit
def _add(acc, w_at, at, depth, values, EVEN: tl.constexpr):
    """acc [piece, lines] + W x^T over one step of K."""
    if EVEN:
        weights = tl.load(w_at, eviction_policy="evict_first")
    else:
        weights = tl.load(w_at, mask=(at < depth)[None, :], other=0.0)
    return tl.dot(weights, tl.trans(values), acc, input_precision="ieee")


@jit
def store_piece(acc, bias, out, first, m, split, rows, columns, PIECE: tl.constexpr, LINES: tl.constexpr,
           GATED: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """A piece into the answer [rows, columns] with its epilogue, or as it is into the part of this split."""
    kind = out.dtype.element_ty
    if PARTS:
        total = columns * (2 if GATED else 1)
        n = _column(first, PIECE, GATED)
        inside = (n < columns)[:, None] & (m < rows)[None, :]
        if GATED:
            n += tl.arange(0, PIECE) // 8 % 2 * columns
        here = out + split.to(tl.int64) * rows * total
        tl.store(here + m[None, :] * total + n[:, None], acc, mask=inside)
    else:
        if GATED:
            pairs = acc.reshape([PIECE // 16, 2, 8, LINES]).permute([0, 2, 3, 1])
            gate, over = pairs.split()
            gate = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
            y = (gate * over.to(kind).to(tl.float32)).reshape([PIECE // 2, LINES])
            n = first + tl.arange(0, PIECE // 2)
        else:
            y = acc
            n = first + tl.arange(0, PIECE)
        inside = (n < columns)[:, None] & (m < rows)[None, :]
        if BIAS:
            y += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
        tl.store(out + m[None, :] * columns + n[:, None], y.to(kind), mask=inside)


@jit_unspecialized("rows", "steps")
def many_kernel(x, w, bias, out, rows, columns, depth, steps, x_stride, PIECES: tl.constexpr,
                PIECE: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
                BIAS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
                AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`steps` of K for PIECES (1 to 3) times PIECE rows of W. Programs that share W are neighbours."""
    EACH: tl.constexpr = PIECE // 2 if GATED else PIECE  # columns of the answer
    m = tl.program_id(0) * LINES + tl.arange(0, LINES)
    first = tl.program_id(1) * (PIECES * EACH)
    split = tl.program_id(2)
    start = split * steps * DEPTH
    stop = tl.minimum(start + steps * DEPTH, depth)
    w0 = w + row_of_w(first, columns, PIECE, GATED).to(tl.int64) * depth
    w1 = w + row_of_w(first + EACH, columns, PIECE, GATED).to(tl.int64) * depth
    w2 = w + row_of_w(first + 2 * EACH, columns, PIECE, GATED).to(tl.int64) * depth
    if PDL and AHEAD > 0:
        every = tl.full([PIECE], True, tl.int1)
        prefetch_l2(w0 + start, every, stop - start, AHEAD)
        if PIECES > 1:
            prefetch_l2(w1 + start, every, stop - start, AHEAD)
        if PIECES > 2:
            prefetch_l2(w2 + start, every, stop - start, AHEAD)
    wait_for_previous(PDL)
    acc0 = tl.zeros([PIECE, LINES], tl.float32)
    acc1 = tl.zeros([PIECE, LINES], tl.float32)
    acc2 = tl.zeros([PIECE, LINES], tl.float32)
    x_at = x + m[:, None] * x_stride
    for k in tl.range(start, stop, DEPTH, num_stages=STAGES):
        at = k + tl.arange(0, DEPTH)
        if EVEN:
            values = tl.load(x_at + at[None, :], mask=(m < rows)[:, None], other=0.0)
        else:
            values = tl.load(x_at + at[None, :], mask=(m < rows)[:, None] & (at < depth)[None, :], other=0.0)
        acc0 = _add(acc0, w0[:, None] + at[None, :], at, depth, values, EVEN)
        if PIECES > 1:
            acc1 = _add(acc1, w1[:, None] + at[None, :], at, depth, values, EVEN)
        if PIECES > 2:
            acc2 = _add(acc2, w2[:, None] + at[None, :], at, depth, values, EVEN)
    store_piece(acc0, bias, out, first, m, split, rows, columns, PIECE, LINES, GATED, BIAS, PARTS)
    if PIECES > 1:
        store_piece(acc1, bias, out, first + EACH, m, split, rows, columns, PIECE, LINES, GATED, BIAS, PARTS)
    if PIECES > 2:
        store_piece(
            acc2, bias, out, first + 2 * EACH, m, split, rows, columns, PIECE, LINES, GATED, BIAS, PARTS
        )
