"""Attention of one query per row over its pages, split over the context (flash-decoding).

Row r's query is the last token of a sequence of lengths[r] tokens; with low = max(0, length - window),

    out[r, h] = sum_j p_j v[j] / sum_j p_j,   p_j = exp(scale * q[r, h] . k[j]),   low <= j < length

Split s of a row takes `per` neighbouring tokens, per = max(chunk, the span / splits in whole tiles), and
writes its own softmax and the log of its sum; a second kernel weighs the splits, or the last program of a row
and kv head does (`last`: one launch, needs `KernelMode.counters`). The grid depends on the number of rows,
heads and splits alone and lengths are read on the device, so a launch can be captured; splits past a row's
end return at once, and rows of length 0 (padding) give zeros. If chunk * splits covers the longest sequence,
a row's sums do not depend on the batch. The query heads that share a kv head form one tile (padded to 16
lines for the tensor cores), so K and V are read once.

Bytes: 2 * kv_heads * dim * itemsize per token of context, and 8 * heads * dim per split (fp32; L2). On
Qwen3-VL-8B (8 kv heads of 128, bf16) memory-bound at 16 FLOP per byte: at 4.69 TB/s a batch of 128 at 640
tokens takes 72 us a layer, one row of 512 tokens under 1 us: there the launches are the cost.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.metadata import check_pages
from saccade.kernels.attention.quantized_kv import Compact, kv_offsets, load_kv_tile, pointers
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode
from saccade.kernels.jit import (
    arrives_last,
    jit,
    jit_unspecialized,
    pdl_options,
    power_of_two,
    tl,
    up,
    wait_for_previous,
)

PROGRAMS = 256  # about two for each multiprocessor of an H200; twice that where contexts are long
MOST_SPLITS, FEW_SPLITS = 64, 16  # of long contexts and of short ones
LOG2_E = 1.4426950408889634  # the kernels take powers of two
LONGEST_SPLIT = 4096  # tokens one program may walk through when others have long finished
SHORT = 4096  # tokens of a context
# Rows up to which splits of short contexts are weighed by the last program to finish; 0: always by a second
# launch, as those of long ones are: up to 64 splits, weighed by one program, were not measured. Written by
# `python -m bench.kernels --choose --write`.
LAST_ROWS = 16  # of a layer's time in two launches, by rows: 1: 0.997, 4: 0.989, 8: 0.976, 16: 0.991
HELD = 64  # values of splits that a thread of that program asks for at once


class DecodeTuning(NamedTuple):
    """Launch parameters; none changes the result beyond rounding."""

    tile: int = 64  # tokens read at once: 32 KiB of K and V at 128 channels in 16 bits
    chunk: int = 64  # fewest tokens of a split
    splits: int | None = None  # None: by `default_splits`
    warps: int = 4
    stages: int = 3
    pdl: bool = False
    last: bool = False  # one launch: needs a counter for each row and kv head in `KernelMode.counters`


def default_tuning(
    compact: Compact | None = None,
    rows: int = 1,
    programs: int = 1,
    max_context: int = 1,
    mode: KernelMode = DEFAULT_MODE,
) -> DecodeTuning:
    """Small tiles where all programs then fit on the chip at once, and for short or very long walks.
    Microseconds on an H200, small against large tiles: one row of 640 tokens 7.0 and 6.4, 8 12.5 and 13.1, 32
    27.1 and 26.2, 64 42.5 and 51.6, 128 89.9 and 83.6, 256 157.7 and 160.3, one of 65,536 68.9 and 81.2."""
    last = rows <= LAST_ROWS and max_context <= SHORT and mode.counters is not None
    tuning = DecodeTuning(pdl=mode.pdl, last=last)
    if compact is not None:
        # Blocks of two kinds: twice the loads in flight, and at this size nothing spills.
        return tuning._replace(tile=32) if compact.first else tuning
    small = 4 <= rows < 16 or 264 < programs <= 528 or programs > 1500 or max_context > SHORT
    return tuning._replace(tile=32, warps=2) if small else tuning


def default_splits(rows: int, kv_heads: int, max_context: int, chunk: int) -> int:
    """Splits that fill the chip when rows are few, and bound the longest walk when they are many."""
    short = max_context <= SHORT
    filling = (PROGRAMS if short else 2 * PROGRAMS) // max(rows * kv_heads, 1)
    walking = up(max_context, LONGEST_SPLIT)
    most = FEW_SPLITS if short else MOST_SPLITS
    return max(1, min(max(filling, walking), most, up(max_context, chunk)))


@jit
def _span(length, window, splits, WINDOW: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The first token a row reads, and the tokens of each split."""
    low = length * 0
    if WINDOW:
        low = tl.maximum(length - window, 0)
    share = tl.cdiv(length - low, splits)
    return low, tl.maximum(tl.cdiv(share, TILE) * TILE, CHUNK)


@jit
def _walk(q, k_head, v_head, k_small, v_small, k_scale, v_scale, border, table, start, stop, scale, d,
          DIM: tl.constexpr, LINES: tl.constexpr, DIM_UP: tl.constexpr, KV_HEADS: tl.constexpr,
          BLOCK: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Softmax sums of q [LINES, DIM_UP] over tokens start .. stop: accumulator, sum, maximum (base 2)."""
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DIM_UP], tl.float32)
    # Block numbers are fetched one tile ahead: K and V then wait for no other load and are pipelined alone.
    ahead = start + tl.arange(0, TILE)
    block = tl.load(table + ahead // BLOCK, mask=ahead < stop, other=0)
    for first in range(start, stop, TILE):
        place = first + tl.arange(0, TILE)
        there = place < stop
        at, small_at, scale_at, is_small = kv_offsets(block, place, border, KV_HEADS, DIM, BLOCK, KIND)
        ahead = place + TILE
        block = tl.load(table + ahead // BLOCK, mask=ahead < stop, other=0)
        k = load_kv_tile(k_head, k_small, at[None, :] + d[:, None], small_at[None, :] + d[:, None],
                    is_small[None, :], there[None, :] & (d < DIM)[:, None], KIND)  # fmt: skip
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if KIND:
            scores = scores * tl.load(k_scale + scale_at, mask=there & is_small, other=1.0)[None, :]
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        if KIND:
            p = p * tl.load(v_scale + scale_at, mask=there & is_small, other=1.0)[None, :]
        v = load_kv_tile(v_head, v_small, at[:, None] + d[None, :], small_at[:, None] + d[None, :],
                    is_small[:, None], there[:, None] & (d < DIM)[None, :], KIND)  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, total, top


@jit
def _weighed(parts, logs, line, real, splits, used, d, DIM: tl.constexpr, SPLITS_UP: tl.constexpr,
             STEP: tl.constexpr):  # fmt: skip
    """[lines, dims] of some lines (row and head): their splits weighed by their sums, in their order."""
    split = tl.arange(0, SPLITS_UP)
    at = line[:, None] * splits + split[None, :]
    there = real[:, None] & (split < used)[None, :]
    log = tl.load(logs + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    top = tl.maximum(tl.max(log, 1), -1e30)  # a padding row has no split
    total = tl.sum(tl.exp2(log - top[:, None]), 1)
    value = tl.zeros([line.shape[0], d.shape[0]], tl.float32)
    for first in range(0, used, STEP):
        for more in tl.static_range(STEP):  # unrolled: loads in parallel, sums in order
            here = line * splits + first + more
            inside = real & (here < line * splits + used)
            share = tl.load(logs + here, mask=inside, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(parts + here[:, None] * DIM + d[None, :],
                           mask=inside[:, None] & (d < DIM)[None, :], other=0.0,
                           cache_modifier=".cg")  # fmt: skip
            value += tl.exp2(share - top)[:, None] * part
    return value / tl.where(total > 0, total, 1.0)[:, None]


@jit_unspecialized(
    "border", "tables", "index", "lengths", "logs", "arrivals", "window", "splits", "table_stride"
)
def _split_kernel(q, k_pages, v_pages, k_small, v_small, k_scale, v_scale, border, tables, index, lengths,
                  parts, logs, out, arrivals, scale, window, splits, table_stride, q_stride,
                  INDEXED: tl.constexpr, GROUP_UP: tl.constexpr, SPLITS_UP: tl.constexpr, STEP: tl.constexpr,
                  LAST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                  DIM_UP: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
                  CHUNK: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr, KIND: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """One split of one row and kv head. Kv heads run side by side: they share DRAM pages."""
    kv, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous(PDL)
    length = tl.load(lengths + row)
    low, per = _span(length, window, splits, WINDOW, TILE, CHUNK)
    start = low + split * per
    GROUP: tl.constexpr = HEADS // KV_HEADS
    line, d = tl.arange(0, LINES), tl.arange(0, DIM_UP)
    inside = (line < GROUP)[:, None] & (d < DIM)[None, :]
    head = kv * GROUP + line
    wide = row.to(tl.int64)
    answer = out + (wide * HEADS + head)[:, None] * DIM + d[None, :]
    if start >= length:
        if WHOLE or LAST:  # the first split of a padding row
            zeros = tl.zeros([LINES, DIM_UP], out.dtype.element_ty)
            tl.store(answer, zeros, mask=inside & (d * 0 + split == 0)[None, :])
        return
    stop = tl.minimum(start + per, length)
    mine = tl.load(q + wide * q_stride + head[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    if INDEXED:
        table = tables + tl.load(index + row).to(tl.int64) * table_stride
    else:
        table = tables + wide * table_stride
    acc, total, top = _walk(mine, k_pages + kv * DIM, v_pages + kv * DIM, k_small + kv * DIM,
                            v_small + kv * DIM, k_scale + kv * BLOCK, v_scale + kv * BLOCK, border, table,
                            start, stop, scale, d, DIM, LINES, DIM_UP, KV_HEADS, BLOCK, TILE,
                            KIND)  # fmt: skip
    acc = acc / total[:, None]
    if WHOLE:
        tl.store(answer, acc.to(out.dtype.element_ty), mask=inside)
    else:
        place = (wide * HEADS + head) * splits + split  # [rows, heads, splits]
        tl.store(parts + place[:, None] * DIM + d[None, :], acc, mask=inside)
        tl.store(logs + place, top + tl.log2(total), mask=line < GROUP)
        if LAST:
            used = tl.cdiv(length - low, per)
            if arrives_last(arrivals + row * KV_HEADS + kv, used):
                one = tl.arange(0, GROUP_UP)
                lines = wide * HEADS + kv * GROUP + one
                value = _weighed(parts, logs, lines, one < GROUP, splits, used, d, DIM, SPLITS_UP, STEP)
                tl.store(out + lines[:, None] * DIM + d[None, :], value.to(out.dtype.element_ty),
                         mask=(one < GROUP)[:, None] & (d < DIM)[None, :])  # fmt: skip


@jit_unspecialized("logs", "lengths", "window", "splits")
def _combine_kernel(parts, logs, lengths, out, window, splits, HEADS: tl.constexpr, DIM: tl.constexpr,
                    DIM_UP: tl.constexpr, TILE: tl.constexpr, SPLITS_UP: tl.constexpr, CHUNK: tl.constexpr,
                    WINDOW: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Weigh the splits of one row and head by their sums."""
    head, row = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    length = tl.load(lengths + row)
    low, per = _span(length, window, splits, WINDOW, TILE, CHUNK)
    split, d = tl.arange(0, SPLITS_UP), tl.arange(0, DIM_UP)
    used = split < tl.cdiv(length - low, per)
    line = row.to(tl.int64) * HEADS + head
    log = tl.load(logs + line * splits + split, mask=used, other=float("-inf"))
    top = tl.maximum(tl.max(log, 0), -1e30)  # a padding row has no split
    weight = tl.exp2(log - top)
    part = tl.load(parts + (line * splits + split)[:, None] * DIM + d[None, :],
                   mask=used[:, None] & (d < DIM)[None, :], other=0.0)  # fmt: skip
    total = tl.sum(weight, 0)
    value = tl.sum(weight[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + line * DIM + d, value.to(out.dtype.element_ty), mask=d < DIM)


def decode_attention_triton(
    q: Tensor,  # [R, heads, dim], heads and dim dense
    k_pages: Tensor,  # [blocks, block_size, kv_heads, dim]
    v_pages: Tensor,
    tables: Tensor,  # [R, W] int32; with `index` any number of lines
    lengths: Tensor,  # [R] int32
    scale: float,
    window: int | None,
    max_context: int,
    tuning: DecodeTuning | None = None,  # None: by the mode
    index: Tensor | None = None,  # [R] int32: row r reads tables[index[r]]; not read where it is 0 long
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    """[R, heads, dim]. No length may exceed `max_context` by much: it only sets the number of splits."""
    rows, (block, kv_heads) = q.shape[0], k_pages.shape[1:3]
    splits = default_splits(rows, kv_heads, max_context, DecodeTuning().chunk)
    tuning = tuning or default_tuning(compact, rows, rows * kv_heads * splits, max_context, mode)
    check_paged(q, k_pages, v_pages, tables, lengths, tuning.tile, index)
    heads, dim = q.shape[1:]
    splits = tuning.splits or default_splits(rows, kv_heads, max_context, tuning.chunk)
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    parts, logs = out, lengths  # unused with one split
    if splits > 1:
        parts = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    last = tuning.last and splits > 1
    dim_up, group_up = max(power_of_two(dim), 16), power_of_two(heads // kv_heads)
    sizes = {"HEADS": heads, "DIM": dim, "DIM_UP": dim_up, "TILE": tuning.tile}
    sizes |= {"CHUNK": tuning.chunk, "WINDOW": window is not None, **pdl_options(tuning.pdl)}
    weigh = {"GROUP_UP": 1, "SPLITS_UP": 1, "STEP": 1}  # of no meaning unless `last`
    if last:
        step = max(1, min(power_of_two(splits), HELD * 32 * tuning.warps // (group_up * dim_up)))
        weigh = {"GROUP_UP": group_up, "SPLITS_UP": power_of_two(splits), "STEP": step}
    small = pointers(compact, k_pages)
    _split_kernel[(kv_heads, splits, rows)](
        q, k_pages, v_pages, *small[:5], tables, lengths if index is None else index, lengths, parts, logs,
        out, _counters(mode, rows * kv_heads) if last else lengths, scale * LOG2_E, window or 0, splits,
        tables.stride(0), q.stride(0), INDEXED=index is not None, LAST=last, KV_HEADS=kv_heads,
        LINES=max(group_up, 16), BLOCK=block, WHOLE=splits == 1, KIND=small.kind, **sizes, **weigh,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    if splits > 1 and not last:
        _combine_kernel[(heads, rows)](
            parts, logs, lengths, out, window or 0, splits, SPLITS_UP=power_of_two(splits), **sizes,
            num_warps=4,
        )  # fmt: skip
    return out


def _counters(mode: KernelMode, count: int) -> Tensor:
    counters = mode.counters
    if counters is None or counters.dtype != torch.int32 or counters.numel() < count:
        have = "none" if counters is None else f"{counters.numel()} of {counters.dtype}"
        raise ValueError(
            f"attention in one launch counts in {count} int32; there are {have} (KernelMode.counters)"
        )
    return counters


def check_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    tile: int,
    index: Tensor | None = None,
) -> None:
    """What both attention kernels need beyond `check_pages`: they walk memory by these strides."""
    if q.dim() != 3 or q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        raise ValueError(f"queries are [T, heads, dim] with dense heads, not strides {q.stride()}")
    check_pages(q, k_pages, v_pages)
    if tables.dim() != 2 or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(f"block tables are [rows, width] int32, not {tuple(tables.shape)} {tables.dtype}")
    which = tables[:, 0] if index is None else index
    if lengths.shape != which.shape or lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise ValueError(f"{which.shape[0]} tables with lengths {tuple(lengths.shape)} {lengths.dtype}")
    if index is not None and (index.dtype != torch.int32 or not index.is_contiguous()):
        raise ValueError(f"an index of tables is dense int32, not {index.dtype} of strides {index.stride()}")
    if tile < 16 or tile & (tile - 1):
        raise ValueError(f"a tile of {tile} tokens; it must be a power of two, at least 16")
