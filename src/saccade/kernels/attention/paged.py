"""Attention of a step's queries over a paged KV cache, and the copy of a KV block.

Row r holds `query_len` queries, the last tokens of a sequence of `seq_len`. With i the position of a query
(seq_len - query_len .. seq_len - 1) and head h reading kv head h // (heads / kv_heads):

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) v[j]     over  max(0, i - window + 1) <= j <= i

Token j is at KV slot block_table[j // block_size] * block_size + j % block_size.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
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
from saccade.kernels.jit import jit_unspecialized, power_of_two, tl, up

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
    if use_triton("decode_attention", q, mode) and use_triton("prefill_attention", q, mode):
        return _attend_triton(q, LayerKV(k_pages, v_pages, compact), rows, scale, window, mode)
    if isinstance(rows, AttentionMetadata):
        return paged_attention_reference(q, k_pages, v_pages, rows, scale, window, compact, mode)
    if q.is_cuda:
        raise RuntimeError("a CUDA graph needs the attention kernels; use --graphs off")
    queries, unpadded = rows.unpadded()
    out = torch.zeros(q.shape, dtype=q.dtype)
    if len(queries):
        out[queries] = paged_attention_reference(
            q[queries], k_pages, v_pages, unpadded, scale, window, compact, mode
        )
    return out


def _attend_triton(
    q: Tensor,
    kv: LayerKV,
    rows: AttentionMetadata | PaddedAttentionMetadata,
    scale: float,
    window: int | None,
    mode: KernelMode,
) -> Tensor:
    k_pages, v_pages, compact = kv
    first, decoded = rows.num_decodes, None
    if first and not mode.deterministic:
        tables, lengths, index = rows.tables_of(slice(0, first))
        decoded = decode_attention_triton(
            q[:first], k_pages, v_pages, tables, lengths, scale, window, rows.max_decode_len, index=index,
            compact=compact, mode=mode,
        )  # fmt: skip
        if first == rows.num_tokens:
            return decoded
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = [(slice(first, None), rows.chunk_start_loc, rows.num_tokens - first)]
    if decoded is not None:
        out[:first] = decoded
    elif first:
        # Deterministic: decode rows as prompts of one token. A token's sums are then those of any prompt.
        singles = torch.arange(first + 1, dtype=torch.int32, device=q.device)
        parts.append((slice(0, first), singles, first))
    for part, starts, tokens in parts:
        if starts is not None and tokens:
            tables, lengths, index = rows.tables_of(part)
            prefill_attention_triton(
                q, k_pages, v_pages, tables, lengths, starts, tokens, out, scale, window, index=index,
                compact=compact,
            )  # fmt: skip
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


# -- block copies
#
# The layers of a large pool span more than 2^31 bytes, which torch copies in dozens of launches: for
# Qwen3-VL-8B 0.33 ms of the host before every question about a known image. Here it is one launch of 4.7 MB.

COPY_STEP = 4096  # values of one program, at most


@jit_unspecialized("source", "target", "blocks")
def _copy_kernel(k, v, source, target, blocks, SIZE: tl.constexpr, STEP: tl.constexpr):
    """A part of a block of one layer, of K or of V."""
    part, layer, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = part * STEP + tl.arange(0, STEP)
    inside = at < SIZE
    first = layer.to(tl.int64) * blocks
    read, write = (first + source) * SIZE + at, (first + target) * SIZE + at
    if which == 0:
        tl.store(k + write, tl.load(k + read, mask=inside), mask=inside)
    else:
        tl.store(v + write, tl.load(v + read, mask=inside), mask=inside)


def copy_block(k: Tensor, v: Tensor, source: int, target: int, mode: KernelMode = DEFAULT_MODE) -> None:
    """pages[l, target] = pages[l, source] for k and v [layers, blocks, ...], or other pairs (scales)."""
    if k.shape != v.shape or k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError(
            f"a block is copied in dense tensors that are alike, not {tuple(k.shape)} {k.dtype} of strides "
            f"{k.stride()} and {tuple(v.shape)} {v.dtype} of strides {v.stride()}"
        )
    if not (0 <= source < k.shape[1] and 0 <= target < k.shape[1]):
        raise ValueError(f"block {source} is to be copied to {target}; there are {k.shape[1]}")
    if use_triton("copy_block", k, mode):
        copy_block_triton(k, v, source, target)
    else:
        copy_block_reference(k, v, source, target)


def copy_block_triton(k: Tensor, v: Tensor, source: int, target: int) -> None:
    layers, blocks, *inner = k.shape
    size = math.prod(inner)
    step = min(power_of_two(size), COPY_STEP)
    grid = (up(size, step), layers, 2)
    _copy_kernel[grid](k, v, source, target, blocks, SIZE=size, STEP=step, num_warps=4)


def copy_block_reference(k: Tensor, v: Tensor, source: int, target: int) -> None:
    for one in (k, v):
        one[:, target].copy_(one[:, source])
