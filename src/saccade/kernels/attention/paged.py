"""Attention of a step's queries over a paged KV cache.

Row r holds `query_len` queries, the last tokens of a sequence of `seq_len`. With i the position of a query
(seq_len - query_len .. seq_len - 1) and head h reading kv head h // (heads / kv_heads):

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) v[j]     over  max(0, i - window + 1) <= j <= i

Token j is at KV slot block_table[j // block_size] * block_size + j % block_size.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.kernels.attention.decode import decode_attention_triton
from saccade.kernels.attention.metadata import (
    AttentionMetadata,
    ChunkReads,
    DecodeReads,
    PaddedAttentionMetadata,
    check_pages,
)
from saccade.kernels.attention.prefill import prefill_attention_triton
from saccade.kernels.attention.quantized_kv import Compact, check_compact, read_slots
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton

# Shapes differ at every step. cuDNN's attention compiles a plan for each new shape: 50 to 65 ms on an H200,
# for up to half off the attention's time once the shape comes again (most in the vision tower).
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa_any_shape(device: torch.device) -> AbstractContextManager[None]:
    """Within: SDPA backends that cost the same for a new shape. Entered once per step: it takes 30 us."""
    return sdpa_kernel(ANY_SHAPE) if device.type == "cuda" else nullcontext()


def sdpa_recurring_shape(device: torch.device) -> AbstractContextManager[None]:
    """Within: the fastest SDPA backend for shapes that recur; the first time it makes a plan. In the vision
    tower (16 heads of 72, 4,096 patches) an H200 reaches 360 TFLOP/s by cuDNN, 229 by flash."""
    order = [SDPBackend.CUDNN_ATTENTION, *ANY_SHAPE]
    return sdpa_kernel(order, set_priority=True) if device.type == "cuda" else nullcontext()


class LayerKV(NamedTuple):
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
    rows: AttentionMetadata | PaddedAttentionMetadata,
    scale: float,
    window: int | None = None,
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    """q [T, heads, dim] over one layer's pages [blocks, block_size, kv_heads, dim]; gives [T, heads, dim]."""
    _check(q, k_pages, v_pages, rows, window)
    if compact is not None:
        check_compact(compact, k_pages)
    kv = LayerKV(k_pages, v_pages, compact)
    if isinstance(rows, PaddedAttentionMetadata):
        return _padded_attention(q, kv, rows, scale, window, mode)
    if mode.deterministic and use_triton("prefill_attention", q, mode):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        prefill_attention_triton(
            q, k_pages, v_pages, rows.block_tables, rows.seq_lens, rows.query_start_loc, rows.num_tokens, out,
            scale, window, compact=compact,
        )  # fmt: skip
        return out
    decodes_by_kernel = bool(rows.num_decodes) and use_triton("decode_attention", q, mode)
    chunks_by_kernel = rows.num_decodes < len(rows.query_lens) and use_triton("prefill_attention", q, mode)
    if rows.fresh and not use_triton("fresh_attention", q, mode):
        chunks_by_kernel = False
    if not (decodes_by_kernel or chunks_by_kernel):
        return paged_attention_reference(q, k_pages, v_pages, rows, scale, window, compact, mode)
    first = rows.num_decodes
    if decodes_by_kernel and first == len(rows.query_lens):
        return _decode(q, kv, rows, scale, window, mode)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if decodes_by_kernel:
        out[:first] = _decode(q[:first], kv, rows, scale, window, mode)
    elif first:
        out[:first] = _decode_reference(q[:first], kv, rows.reference_reads(window).decodes, scale)
    if chunks_by_kernel:
        prefill_attention_triton(
            q, k_pages, v_pages, rows.block_tables[first:], rows.seq_lens[first:],
            rows.query_start_loc[first:], rows.num_tokens - first, out, scale, window, compact=compact,
        )  # fmt: skip
    else:
        _chunks_reference(q, kv, rows, scale, window, out)
    return out


def _decode(
    q: Tensor, kv: LayerKV, rows: AttentionMetadata, scale: float, window: int | None, mode: KernelMode
) -> Tensor:
    count = rows.num_decodes
    return decode_attention_triton(
        q, kv.k_pages, kv.v_pages, rows.block_tables[:count], rows.seq_lens[:count], scale, window,
        max(rows.seq_lens_cpu[:count]), compact=kv.compact, mode=mode,
    )  # fmt: skip


def _padded_attention(
    q: Tensor, kv: LayerKV, rows: PaddedAttentionMetadata, scale: float, window: int | None, mode: KernelMode
) -> Tensor:
    k_pages, v_pages, compact = kv
    if not (use_triton("decode_attention", q, mode) and use_triton("prefill_attention", q, mode)):
        return padded_attention_reference(q, k_pages, v_pages, rows, scale, window, compact, mode)
    if mode.deterministic:
        return _padded_in_one_order(q, kv, rows, scale, window)
    first, out = rows.num_decodes, None
    if first:
        out = decode_attention_triton(
            q[:first], k_pages, v_pages, rows.block_tables, rows.seq_lens[:first], scale, window,
            rows.max_seq_len, index=rows.table_index[:first], compact=compact, mode=mode,
        )  # fmt: skip
    if rows.query_start_loc is None and out is not None:
        return out
    whole = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out is not None:
        whole[:first] = out
    if rows.query_start_loc is not None:
        prefill_attention_triton(
            q, k_pages, v_pages, rows.block_tables, rows.seq_lens[first:], rows.query_start_loc,
            rows.num_tokens - first, whole, scale, window, index=rows.table_index[first:], compact=compact,
        )  # fmt: skip
    return whole


def _padded_in_one_order(
    q: Tensor, kv: LayerKV, rows: PaddedAttentionMetadata, scale: float, window: int | None
) -> Tensor:
    """Decode rows as prompts of one token: a token's sums are then the same as in any prompt."""
    k_pages, v_pages, compact = kv
    first, out = rows.num_decodes, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    singles = torch.arange(first + 1, dtype=torch.int32, device=q.device)
    chunks = slice(first, None), rows.query_start_loc, rows.num_tokens - first
    for part, starts, tokens in ((slice(0, first), singles, first), chunks):
        if starts is not None and tokens:
            prefill_attention_triton(
                q, k_pages, v_pages, rows.block_tables, rows.seq_lens[part], starts, tokens, out, scale,
                window, index=rows.table_index[part], compact=compact,
            )  # fmt: skip
    return out


def padded_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: PaddedAttentionMetadata,
    scale: float,
    window: int | None,
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    if q.is_cuda:
        raise RuntimeError("a CUDA graph needs the attention kernels; use --graphs off")
    queries, unpadded = rows.unpadded()
    out = torch.zeros(q.shape, dtype=q.dtype)
    if len(queries):
        seen = paged_attention_reference(q[queries], k_pages, v_pages, unpadded, scale, window, compact, mode)
        out[queries] = seen
    return out


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: AttentionMetadata | PaddedAttentionMetadata,
    window: int | None,
) -> None:
    if q.dim() != 3 or q.shape[0] != rows.num_tokens:
        raise ValueError(f"queries are [{rows.num_tokens}, heads, dim] for these rows, not {tuple(q.shape)}")
    check_pages(q, k_pages, v_pages)
    if k_pages.shape[1] != rows.block_size:
        raise ValueError(f"pages hold {k_pages.shape[1]} tokens a block, the rows say {rows.block_size}")
    if window is not None and window < 1:
        raise ValueError(f"a sliding window of {window} tokens sees nothing; it must be at least 1")


# -- reference


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: AttentionMetadata,
    scale: float,
    window: int | None,
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    kv = LayerKV(k_pages, v_pages, compact)
    if mode.deterministic:
        return _one_by_one(q, kv, rows, scale, window)
    first = rows.num_decodes
    if first == len(rows.query_lens) > 0:
        return _decode_reference(q, kv, rows.reference_reads(window).decodes, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if first:
        out[:first] = _decode_reference(q[:first], kv, rows.reference_reads(window).decodes, scale)
    _chunks_reference(q, kv, rows, scale, window, out)
    return out


def _chunks_reference(
    q: Tensor, kv: LayerKV, rows: AttentionMetadata, scale: float, window: int | None, out: Tensor
) -> None:
    for chunk in rows.reference_reads(window).chunks:
        part = slice(chunk.start, chunk.stop)
        out[part] = _attend_chunk(q[part], kv, chunk, scale)


def _one_by_one(q: Tensor, kv: LayerKV, rows: AttentionMetadata, scale: float, window: int | None) -> Tensor:
    """Each query alone over its context: nothing else in the step can change the order of its sums."""
    _, heads, dim = q.shape
    kv_heads, out, at = kv.k_pages.shape[2], torch.empty_like(q), 0
    for row, (count, context) in enumerate(zip(rows.query_lens, rows.seq_lens_cpu, strict=True)):
        positions = torch.arange(context, device=q.device)
        blocks = rows.block_tables[row].long()[positions // rows.block_size]
        slots = blocks * rows.block_size + positions % rows.block_size
        k, v = (x.transpose(0, 1)[None] for x in kv.read(slots))
        for stop in range(context - count + 1, context + 1):
            low = 0 if window is None else max(0, stop - window)
            grouped = q[at].reshape(1, kv_heads, heads // kv_heads, dim)
            seen = k[:, :, low:stop], v[:, :, low:stop]
            out[at] = F.scaled_dot_product_attention(grouped, *seen, scale=scale).reshape(heads, dim)
            at += 1
    return out


def _decode_reference(q: Tensor, kv: LayerKV, reads: tuple[DecodeReads, ...], scale: float) -> Tensor:
    """One batched call for each group of rows of similar length."""
    if len(reads) == 1:
        return _attend_group(q, kv, reads[0], scale)
    out = torch.empty_like(q)
    for group in reads:
        if group.rows is not None:
            part = _attend_group(q.index_select(0, group.rows), kv, group, scale)
            out.index_copy_(0, group.rows, part)
    return out


def _attend_group(q: Tensor, kv: LayerKV, reads: DecodeReads, scale: float) -> Tensor:
    """The heads that share a kv head take the axis of query positions: K is never repeated."""
    rows, heads, dim = q.shape
    kv_heads = kv.k_pages.shape[2]
    k, v = (x.view(rows, -1, kv_heads, dim).transpose(1, 2) for x in kv.read(reads.slots))
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=reads.mask, scale=scale)
    return out.reshape(rows, heads, dim)


def _attend_chunk(q: Tensor, kv: LayerKV, chunk: ChunkReads, scale: float) -> Tensor:
    """One row. Each kv head is a batch entry, the query heads that share it its heads (K by stride 0)."""
    count, heads, dim = q.shape
    kv_heads = kv.k_pages.shape[2]
    group = heads // kv_heads
    k, v = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in kv.read(chunk.slots))
    grouped = q.reshape(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=chunk.mask, is_causal=chunk.causal, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(count, heads, dim)
