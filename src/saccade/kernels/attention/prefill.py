"""Attention of rows of several queries over their pages: prompts, chunks of prompts, mixed lengths.

Row r has offsets[r + 1] - offsets[r] queries, the last tokens of a sequence of lengths[r]. The query at
position i sees positions max(0, i - window + 1) .. i of its sequence:

    out[i, h] = sum_j p_j v[j] / sum_j p_j,   p_j = exp(scale * q[i, h] . k[j])

A tile holds `lines` (query, head) pairs: lines // group neighbouring queries of the group heads that share a
kv head, so K and V are read once for the group. Tiles are numbered without the host: row r's begin at
(offsets[r] - offsets[0]) // queries_per_tile + r, at least as many as it needs, and a program finds its row
by bisection. The grid is tokens // queries_per_tile + rows tiles; the few spare ones return at once. The last
tiles (the longest, in one long row) start first.

Operations: 4 * dim * heads * count * (context - count / 2). Bytes from L2, in 16 bits: one per `lines` FLOP.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.decode import LOG2_E, check_paged
from saccade.kernels.attention.quantized_kv import Compact, kv_offsets, load_kv_tile, pointers
from saccade.kernels.jit import jit, jit_unspecialized, power_of_two, tl


class PrefillTuning(NamedTuple):
    """Launch parameters; none changes the result beyond rounding."""

    lines: int = 64  # (query, head) pairs of a tile; 64 with 4 warps beat 128 with 8 by 1 to 30% on an H200
    tile: int = 64  # keys at once
    warps: int = 4
    stages: int = 3


MIXED = PrefillTuning(lines=128, tile=32, warps=8, stages=4)  # blocks of two kinds: larger tiles spill
SMALL = PrefillTuning(lines=128, warps=8, stages=2)  # 8 bits alone: as it was timed on an H200
WIDE = PrefillTuning(lines=32, tile=16, warps=8, stages=2)  # float32: no tensor cores; for tests


@jit
def _find_row(offsets, rows, tile, PER: tl.constexpr):
    """The row a tile belongs to, and the tile's number inside it."""
    zero = tl.load(offsets)
    left, right = rows * 0, rows
    while right - left > 1:
        middle = (left + right) // 2
        begins = (tl.load(offsets + middle) - zero) // PER + middle
        left = tl.where(begins <= tile, middle, left)
        right = tl.where(begins <= tile, right, middle)
    return left, tile - (tl.load(offsets + left) - zero) // PER - left


@jit
def _walk(acc, total, top, q, k_head, v_head, k_small, v_small, k_scale, v_scale, border, table, start,
          stop, place, scale, window, d,
          MASKED: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, KV_HEADS: tl.constexpr,
          BLOCK: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Go through keys start .. stop; MASKED where a line does not see them all, or the last tile is short."""
    ahead = start + tl.arange(0, TILE)
    block = tl.load(table + ahead // BLOCK, mask=ahead < stop, other=0)  # one tile ahead of its use
    for first in range(start, stop, TILE):
        key = first + tl.arange(0, TILE)
        at, small_at, scale_at, is_small = kv_offsets(block, key, border, KV_HEADS, DIM, BLOCK, KIND)
        ahead = key + TILE
        block = tl.load(table + ahead // BLOCK, mask=ahead < stop, other=0)
        wide, tall = (d < DIM)[:, None], (d < DIM)[None, :]
        scaled = is_small
        if MASKED:
            wide = wide & (key < stop)[None, :]
            tall = tall & (key < stop)[:, None]
            scaled = scaled & (key < stop)
        k = load_kv_tile(k_head, k_small, at[None, :] + d[:, None], small_at[None, :] + d[:, None],
                    is_small[None, :], wide, KIND)  # fmt: skip
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if KIND:
            scores = scores * tl.load(k_scale + scale_at, mask=scaled, other=1.0)[None, :]
        if MASKED:
            seen = (key[None, :] <= place[:, None]) & (key < stop)[None, :]
            if WINDOW:
                seen = seen & (key[None, :] > place[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        if WINDOW:
            higher = tl.maximum(higher, -1e30)  # a line may see nothing of its first tiles
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        if KIND:
            p = p * tl.load(v_scale + scale_at, mask=scaled, other=1.0)[None, :]
        v = load_kv_tile(v_head, v_small, at[:, None] + d[None, :], small_at[:, None] + d[None, :],
                    is_small[:, None], tall, KIND)  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, total, top


@jit_unspecialized("border", "tables", "index", "lengths", "offsets", "window", "rows", "table_stride")
def _prefill_kernel(q, k_pages, v_pages, k_small, v_small, k_scale, v_scale, border, tables, index, lengths,
                    offsets, out, scale, window, rows, table_stride, q_stride, INDEXED: tl.constexpr,
                    HEADS: tl.constexpr,
                    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
                    LINES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
                    KIND: tl.constexpr):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PER: tl.constexpr = LINES // GROUP  # queries of a tile
    kv = tl.program_id(0)
    row, tile = _find_row(offsets, rows, tl.num_programs(1) - 1 - tl.program_id(1), PER)
    begin = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - begin
    if tile * PER >= count:
        return
    length = tl.load(lengths + row)
    line, d = tl.arange(0, LINES), tl.arange(0, DIM_UP)
    query = tile * PER + line // GROUP
    head = kv * GROUP + line % GROUP
    inside = ((line < PER * GROUP) & (query < count))[:, None] & (d < DIM)[None, :]
    token = (begin + query).to(tl.int64)
    mine = tl.load(q + token[:, None] * q_stride + head[:, None] * DIM + d[None, :], mask=inside, other=0.0)

    place = length - count + query
    first = length - count + tile * PER  # place of the tile's first query, which sees the least
    stop = tl.minimum(first + PER, length)
    start = first * 0
    if WINDOW:
        start = tl.maximum(first - window + 1, 0) // TILE * TILE  # tiles begin at the same places for all
        whole = start  # nothing is seen by all lines for sure
    else:
        whole = (first + 1) // TILE * TILE
    which = row
    if INDEXED:
        which = tl.load(index + row)
    table = tables + which.to(tl.int64) * table_stride
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DIM_UP], tl.float32)
    if not WINDOW:
        acc, total, top = _walk(acc, total, top, mine, k_pages + kv * DIM, v_pages + kv * DIM,
                                k_small + kv * DIM, v_small + kv * DIM, k_scale + kv * BLOCK,
                                v_scale + kv * BLOCK, border, table, start, whole, place, scale, window, d,
                                False, False, DIM, KV_HEADS, BLOCK, TILE, KIND)  # fmt: skip
    acc, total, top = _walk(acc, total, top, mine, k_pages + kv * DIM, v_pages + kv * DIM, k_small + kv * DIM,
                            v_small + kv * DIM, k_scale + kv * BLOCK, v_scale + kv * BLOCK, border, table,
                            whole, stop, place, scale, window, d, True, WINDOW, DIM, KV_HEADS, BLOCK, TILE,
                            KIND)  # fmt: skip
    acc = acc / total[:, None]
    tl.store(out + (token * HEADS + head)[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty),
             mask=inside)  # fmt: skip


def prefill_attention_triton(
    q: Tensor,  # [T, heads, dim], heads and dim dense
    k_pages: Tensor,  # [blocks, block_size, kv_heads, dim]
    v_pages: Tensor,
    tables: Tensor,  # [R, W] int32; with `index` any number of lines
    lengths: Tensor,  # [R] int32
    offsets: Tensor,  # [R + 1] int32, into q: row r's queries are offsets[r] .. offsets[r + 1]
    tokens: int,  # how many queries the rows have together, on the host: it sets the grid
    out: Tensor,  # [T, heads, dim], contiguous; the rows' lines are written, others are left alone
    scale: float,
    window: int | None,
    tuning: PrefillTuning | None = None,  # None: by the width of the dtype and the kinds of blocks
    index: Tensor | None = None,  # [R] int32: row r reads tables[index[r]]; not read without queries
    compact: Compact | None = None,
) -> None:
    """Rows without queries (padding) and queries of no row are left alone."""
    narrow = PrefillTuning() if compact is None else MIXED if compact.first else SMALL
    tuning = tuning or (narrow if q.element_size() <= 2 else WIDE)
    check_paged(q, k_pages, v_pages, tables, lengths, tuning.tile, index)
    rows, (block, kv_heads), (_, heads, dim) = lengths.shape[0], k_pages.shape[1:3], q.shape
    if offsets.shape != (rows + 1,) or offsets.dtype != torch.int32 or not offsets.is_contiguous():
        raise ValueError(f"{rows} rows need offsets [{rows + 1}] int32, not {tuple(offsets.shape)}")
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"queries {tuple(q.shape)} {q.dtype} into {tuple(out.shape)} {out.dtype}")
    per = tuning.lines // (heads // kv_heads)
    if per < 1 or tuning.lines < 16 or tuning.lines & (tuning.lines - 1):
        raise ValueError(
            f"a tile of {tuning.lines} lines; it must be a power of two, at least 16, and hold the "
            f"{heads // kv_heads} heads of a group"
        )
    if rows == 0:
        return
    small = pointers(compact, k_pages)
    _prefill_kernel[(kv_heads, tokens // per + rows)](
        q, k_pages, v_pages, *small[:5], tables, lengths if index is None else index, lengths, offsets, out,
        scale * LOG2_E, window or 0, rows, tables.stride(0), q.stride(0), INDEXED=index is not None,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
        DIM_UP=max(power_of_two(dim), 16), LINES=tuning.lines, BLOCK=block, TILE=tuning.tile,
        KIND=small.kind, WINDOW=window is not None, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
