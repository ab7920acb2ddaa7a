"""Attention of a step's queries over paged keys and values.

Row r holds `count` queries, the last tokens of a sequence of `length`. With i its query's place in the
sequence (length - count .. length - 1) and head h reading kv head h // (heads / kv_heads):

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) v[j]     over  max(0, i - window + 1) <= j <= i

where token j of the sequence lives at slot table[j // block_size] * block_size + j % block_size.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.kernels.attention.decode import decode_attention_triton
from saccade.kernels.attention.metadata import Chunk, Decodes, FixedRows, Rows
from saccade.kernels.attention.prefill import prefill_attention_triton
from saccade.kernels.attention.quantized_kv import Compact, check_compact, read_slots
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton

# Shapes differ at every step. cuDNN's attention compiles a plan for each new shape: 50 to 65 ms on an H200,
# for up to half off the attention's time once the shape comes again (most in the vision tower).
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa_any_shape(device: torch.device) -> AbstractContextManager[None]:
    """Within: attention that costs the same for a shape never seen before. Once per step: it takes 30 us."""
    return sdpa_kernel(ANY_SHAPE) if device.type == "cuda" else nullcontext()


def sdpa_recurring_shape(device: torch.device) -> AbstractContextManager[None]:
    """Within: the fastest attention for a shape that comes again; the first time a plan is made for it. In
    the vision tower (16 heads of 72, 4,096 patches) an H200 reaches 360 TFLOP/s by cuDNN, 229 by flash."""
    order = [SDPBackend.CUDNN_ATTENTION, *ANY_SHAPE]
    return sdpa_kernel(order, set_priority=True) if device.type == "cuda" else nullcontext()


class Stored(NamedTuple):
    """One layer's keys and values."""

    k_pages: Tensor  # [blocks, block_size, kv_heads, dim]
    v_pages: Tensor
    compact: Compact | None

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at slots [n]: [n, kv_heads, dim] each, in the plain pages' dtype."""
        k, v, compact = self
        if compact is None:
            return k.flatten(0, 1).index_select(0, slots), v.flatten(0, 1).index_select(0, slots)
        return (
            read_slots(k, compact.k, compact.k_scale, compact.first, slots),
            read_slots(v, compact.v, compact.v_scale, compact.first, slots),
        )


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Rows | FixedRows,
    scale: float,
    window: int | None = None,
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    """q [T, heads, dim] over one layer's pages [blocks, block_size, kv_heads, dim]; gives [T, heads, dim]."""
    _check(q, k_pages, v_pages, rows, window)
    if compact is not None:
        check_compact(compact, k_pages)
    stored = Stored(k_pages, v_pages, compact)
    if isinstance(rows, FixedRows):
        return _fixed_attention(q, stored, rows, scale, window, mode)
    if mode.deterministic and use_triton("prefill_attention", q, mode):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        prefill_attention_triton(
            q, k_pages, v_pages, rows.tables, rows.lengths, rows.offsets, rows.tokens, out, scale, window,
            compact=compact,
        )  # fmt: skip
        return out
    decodes_by_kernel = bool(rows.decodes) and use_triton("decode_attention", q, mode)
    chunks_by_kernel = rows.decodes < len(rows.counts) and use_triton("prefill_attention", q, mode)
    if rows.fresh and not use_triton("fresh_attention", q, mode):
        chunks_by_kernel = False
    if not (decodes_by_kernel or chunks_by_kernel):
        return paged_attention_reference(q, k_pages, v_pages, rows, scale, window, compact, mode)
    if decodes_by_kernel and rows.decodes == len(rows.counts):
        return _decodes_by_kernel(q, stored, rows, scale, window, mode)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows.decodes:
        attend = partial(_decodes_by_kernel, mode=mode) if decodes_by_kernel else _decodes_by_twin
        out[: rows.decodes] = attend(q[: rows.decodes], stored, rows, scale, window)
    if chunks_by_kernel:
        first = rows.decodes
        prefill_attention_triton(
            q,
            k_pages,
            v_pages,
            rows.tables[first:],
            rows.lengths[first:],
            rows.offsets[first:],
            rows.tokens - first,
            out,
            scale,
            window,
            compact=compact,
        )
    else:
        _chunks_by_twin(q, stored, rows, scale, window, out)
    return out


def _fixed_attention(
    q: Tensor, stored: Stored, rows: FixedRows, scale: float, window: int | None, mode: KernelMode
) -> Tensor:
    k_pages, v_pages, compact = stored
    if not (use_triton("decode_attention", q, mode) and use_triton("prefill_attention", q, mode)):
        return fixed_attention_reference(q, k_pages, v_pages, rows, scale, window, compact, mode)
    if mode.deterministic:
        return _fixed_in_one_order(q, stored, rows, scale, window)
    first, out = rows.decodes, None
    if first:
        out = decode_attention_triton(
            q[:first],
            k_pages,
            v_pages,
            rows.tables,
            rows.lengths[:first],
            scale,
            window,
            rows.longest,
            index=rows.index[:first],
            compact=compact,
            mode=mode,
        )
    if rows.offsets is None and out is not None:
        return out
    whole = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out is not None:
        whole[:first] = out
    if rows.offsets is not None:
        prefill_attention_triton(
            q,
            k_pages,
            v_pages,
            rows.tables,
            rows.lengths[first:],
            rows.offsets,
            rows.tokens - first,
            whole,
            scale,
            window,
            index=rows.index[first:],
            compact=compact,
        )
    return whole


def _fixed_in_one_order(
    q: Tensor, stored: Stored, rows: FixedRows, scale: float, window: int | None
) -> Tensor:
    """Rows of one query as prompts of one token: a token's sums are then those it has in any prompt."""
    k_pages, v_pages, compact = stored
    first, out = rows.decodes, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    singles = torch.arange(first + 1, dtype=torch.int32, device=q.device)
    parts = [(slice(0, first), singles, first), (slice(first, None), rows.offsets, rows.tokens - first)]
    for part, offsets, tokens in parts:
        if offsets is not None and tokens:
            prefill_attention_triton(
                q, k_pages, v_pages, rows.tables, rows.lengths[part], offsets, tokens, out, scale, window,
                index=rows.index[part], compact=compact,
            )  # fmt: skip
    return out


def fixed_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: FixedRows,
    scale: float,
    window: int | None,
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    if q.is_cuda:
        raise RuntimeError("a captured step needs the attention kernels on CUDA; use --graphs off")
    queries, real = rows.real()
    out = torch.zeros(q.shape, dtype=q.dtype)
    if len(queries):
        seen = paged_attention_reference(q[queries], k_pages, v_pages, real, scale, window, compact, mode)
        out[queries] = seen
    return out


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows | FixedRows, window: int | None) -> None:
    if q.dim() != 3 or q.shape[0] != rows.tokens:
        raise ValueError(f"queries are [{rows.tokens}, heads, dim] for these rows, not {tuple(q.shape)}")
    if k_pages.dim() != 4 or k_pages.shape != v_pages.shape or k_pages.shape[3] != q.shape[2]:
        raise ValueError(
            f"queries {tuple(q.shape)} over pages {tuple(k_pages.shape)} and {tuple(v_pages.shape)}"
        )
    if k_pages.shape[1] != rows.block_size:
        raise ValueError(f"pages hold {k_pages.shape[1]} tokens a block, the rows say {rows.block_size}")
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_pages.shape[2]} kv heads evenly")
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"queries of {q.dtype} over pages of {k_pages.dtype} and {v_pages.dtype}")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("paged_attention needs contiguous pages: a slot is an offset into them")
    if window is not None and window < 1:
        raise ValueError(f"a sliding window of {window} tokens sees nothing; it must be at least 1")


def _decodes_by_kernel(
    q: Tensor, stored: Stored, rows: Rows, scale: float, window: int | None, mode: KernelMode
) -> Tensor:
    tables, lengths = rows.tables[: rows.decodes], rows.lengths[: rows.decodes]
    longest = max(rows.contexts[: rows.decodes])
    k_pages, v_pages, compact = stored
    return decode_attention_triton(
        q, k_pages, v_pages, tables, lengths, scale, window, longest, compact=compact, mode=mode
    )


def _decodes_by_twin(q: Tensor, stored: Stored, rows: Rows, scale: float, window: int | None) -> Tensor:
    return _attend_decodes(q, stored, rows.reads(window).decodes, scale)


def _chunks_by_twin(
    q: Tensor, stored: Stored, rows: Rows, scale: float, window: int | None, out: Tensor
) -> None:
    for chunk in rows.reads(window).chunks:
        part = slice(chunk.start, chunk.stop)
        out[part] = _attend_chunk(q[part], stored, chunk, scale)


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    stored = Stored(k_pages, v_pages, compact)
    if mode.deterministic:
        return _one_by_one(q, stored, rows, scale, window)
    if rows.decodes == len(rows.counts) > 0:
        return _decodes_by_twin(q, stored, rows, scale, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows.decodes:
        out[: rows.decodes] = _decodes_by_twin(q[: rows.decodes], stored, rows, scale, window)
    _chunks_by_twin(q, stored, rows, scale, window, out)
    return out


def _one_by_one(q: Tensor, stored: Stored, rows: Rows, scale: float, window: int | None) -> Tensor:
    """Each query alone over what it sees: nothing else in the step can change the order of its sums."""
    _, heads, dim = q.shape
    kv_heads, out, at = stored.k_pages.shape[2], torch.empty_like(q), 0
    for row, (count, context) in enumerate(zip(rows.counts, rows.contexts, strict=True)):
        places = torch.arange(context, device=q.device)
        blocks = rows.tables[row].long()[places // rows.block_size]
        k, v = (
            x.transpose(0, 1)[None] for x in stored.read(blocks * rows.block_size + places % rows.block_size)
        )
        for stop in range(context - count + 1, context + 1):
            low = 0 if window is None else max(0, stop - window)
            grouped = q[at].reshape(1, kv_heads, heads // kv_heads, dim)
            seen = k[:, :, low:stop], v[:, :, low:stop]
            out[at] = F.scaled_dot_product_attention(grouped, *seen, scale=scale).reshape(heads, dim)
            at += 1
    return out


def _attend_decodes(q: Tensor, stored: Stored, reads: tuple[Decodes, ...], scale: float) -> Tensor:
    """One batched call for each group of rows of like length."""
    if len(reads) == 1:
        return _attend_group(q, stored, reads[0], scale)
    out = torch.empty_like(q)
    for group in reads:
        if group.rows is not None:
            part = _attend_group(q.index_select(0, group.rows), stored, group, scale)
            out.index_copy_(0, group.rows, part)
    return out


def _attend_group(q: Tensor, stored: Stored, reads: Decodes, scale: float) -> Tensor:
    """The heads that share a kv head stand in for query positions: K is never repeated."""
    rows, heads, dim = q.shape
    kv_heads = stored.k_pages.shape[2]
    k, v = (x.view(rows, -1, kv_heads, dim).transpose(1, 2) for x in stored.read(reads.slots))
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=reads.mask, scale=scale)
    return out.reshape(rows, heads, dim)


def _attend_chunk(q: Tensor, stored: Stored, chunk: Chunk, scale: float) -> Tensor:
    """One row. Each kv head is a batch entry, the query heads that share it its heads (K by stride 0)."""
    count, heads, dim = q.shape
    kv_heads = stored.k_pages.shape[2]
    group = heads // kv_heads
    k, v = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in stored.read(chunk.slots))
    grouped = q.reshape(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=chunk.mask, is_causal=chunk.causal, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(count, heads, dim)
