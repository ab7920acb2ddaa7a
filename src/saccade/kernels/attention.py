"""Attention of a step's queries over paged keys and values.

Row r holds `count` queries, the last tokens of a sequence of `length`. With i its query's place in the
sequence (length - count .. length - 1) and head h reading kv head h // (heads / kv_heads):

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) v[j]     over  max(0, i - window + 1) <= j <= i

where token j of the sequence lives at slot table[j // block_size] * block_size + j % block_size.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from saccade.kernels.choice import runs_triton
from saccade.kernels.paged_decode import decode_attention_triton
from saccade.kernels.paged_prefill import prefill_attention_triton

# Shapes differ at every step. cuDNN's attention compiles a plan for each new shape: 50 to 65 ms on an H200,
# for up to half off the attention's time once the shape comes again (most in the vision tower).
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def any_shape(device: torch.device) -> AbstractContextManager[None]:
    """Within: attention that costs the same for a shape never seen before. Once per step: it takes 30 us."""
    return sdpa_kernel(ANY_SHAPE) if device.type == "cuda" else nullcontext()


# One-query rows are read together, padded to the longest among them, as long as that at most doubles what a
# row reads (short ones aside), and never more tokens at once than this: the copies of K and V are workspace.
MOST_GATHERED = 1 << 18
SHORT = 256


class Decodes(NamedTuple):
    """What one-query rows of like length read, padded to one width; padding repeats a row's last slot."""

    rows: Tensor | None  # [rows] int64, which of the one-query rows these are; None: all, in order
    slots: Tensor  # [rows * width] int64
    mask: Tensor  # [rows, 1, 1, width] bool: True where there is a token


class Chunk(NamedTuple):
    """What one row of several queries reads."""

    start: int  # its queries are start .. stop of the step's tokens
    stop: int
    slots: Tensor  # [context] int64
    causal: bool  # the last query sees everything, each one before it one token less
    mask: Tensor | None  # [queries, context] bool, where `causal` alone does not say it or is slower


class Reads(NamedTuple):
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


class Rows:
    """The rows of one step, as the kernel takes them; made once and passed to every layer.

    The twin reads whole sequences by slot; those indexes are worked out on first use and kept here,
    so that they are computed once per step and window, not once per layer.
    """

    def __init__(
        self,
        tables: Tensor,  # [R, W] int32
        lengths: Tensor,  # [R] int32
        offsets: Tensor,  # [R + 1] int32
        counts: tuple[int, ...],
        contexts: tuple[int, ...],
        decodes: int,
        block_size: int,
    ) -> None:
        if tables.dim() != 2 or tables.dtype != torch.int32:
            raise ValueError(
                f"block tables are [rows, width] int32, not {tuple(tables.shape)} {tables.dtype}"
            )
        rows = tables.shape[0]
        if not rows == len(counts) == len(contexts) == lengths.shape[0] == offsets.shape[0] - 1:
            raise ValueError(
                f"{rows} tables, {len(counts)} counts, {len(contexts)} contexts, {lengths.shape[0]} lengths "
                f"and {offsets.shape[0]} offsets do not describe the same rows"
            )
        wanted = -(-max(contexts, default=0) // block_size)
        if wanted > tables.shape[1]:
            raise ValueError(
                f"a context of {max(contexts)} tokens needs {wanted} table entries of {block_size} tokens; "
                f"the tables have {tables.shape[1]}"
            )
        for count, context in zip(counts, contexts, strict=True):
            if not 1 <= count <= context:
                raise ValueError(f"a row computes {count} tokens of a sequence of {context}")
        if not 0 <= decodes <= rows or any(count != 1 for count in counts[:decodes]):
            raise ValueError(f"the first {decodes} of {rows} rows must have one token each")
        self.tables, self.lengths, self.offsets = tables, lengths, offsets
        self.counts, self.contexts, self.decodes = counts, contexts, decodes
        self.block_size = block_size
        self._reads: dict[int | None, Reads] = {}

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def reads(self, window: int | None) -> Reads:
        found = self._reads.get(window)
        if found is None:
            found = Reads(self._decode_reads(window), self._chunk_reads(window))
            self._reads[window] = found
        return found

    def _decode_reads(self, window: int | None) -> tuple[Decodes, ...]:
        widths = [min(context, window or context) for context in self.contexts[: self.decodes]]
        groups = alike(widths)
        if len(groups) == 1:
            return (
                self._gather(None, max(widths), self.tables[: self.decodes], self.lengths[: self.decodes]),
            )
        device = self.tables.device
        reads = []
        for group in groups:
            rows = torch.tensor(group)
            rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows
            width = max(widths[row] for row in group)
            reads.append(self._gather(rows, width, self.tables[rows], self.lengths[rows]))
        return tuple(reads)

    def _gather(self, rows: Tensor | None, width: int, tables: Tensor, lengths: Tensor) -> Decodes:
        lengths = lengths[:, None].long()
        steps = torch.arange(width, device=lengths.device)
        places = (lengths - width).clamp(min=0) + steps  # [rows, width]
        present = places < lengths
        places = torch.minimum(places, lengths - 1)
        blocks = tables.gather(1, places // self.block_size).long()
        slots = blocks * self.block_size + places % self.block_size
        return Decodes(rows, slots.flatten(), present[:, None, None, :])

    def _chunk_reads(self, window: int | None) -> tuple[Chunk, ...]:
        chunks = []
        start = self.decodes
        for row in range(self.decodes, len(self.counts)):
            count, context = self.counts[row], self.contexts[row]
            stop = start + count
            chunks.append(self._chunk(row, start, stop, count, context, window))
            start = stop
        return tuple(chunks)

    def _chunk(self, row: int, start: int, stop: int, count: int, context: int, window: int | None) -> Chunk:
        first = context - count  # place of the first query
        low = 0 if window is None else max(0, first - window + 1)
        places = torch.arange(low, context, device=self.tables.device)
        slots = self.tables[row].long()[places // self.block_size] * self.block_size
        slots += places % self.block_size
        if count == 1:  # `low` has already cut what the window hides
            return Chunk(start, stop, slots, False, None)
        unhidden = window is None or window >= context
        if unhidden and (first == 0 or slots.is_cuda):
            return Chunk(start, stop, slots, True, None)
        queries = places[first - low :, None]
        mask = places <= queries
        if window is not None:
            mask &= places > queries - window
        return Chunk(start, stop, slots, False, mask)


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    """q [T, heads, dim] over one layer's pages [blocks, block_size, kv_heads, dim]; gives [T, heads, dim]."""
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
    decodes_by_kernel = bool(rows.decodes) and runs_triton("decode_attention", q)
    chunks_by_kernel = rows.decodes < len(rows.counts) and runs_triton("prefill_attention", q)
    if not (decodes_by_kernel or chunks_by_kernel):
        return paged_attention_reference(q, k_pages, v_pages, rows, scale, window)
    if decodes_by_kernel and rows.decodes == len(rows.counts):
        return _decodes_by_kernel(q, k_pages, v_pages, rows, scale, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows.decodes:
        attend = _decodes_by_kernel if decodes_by_kernel else _decodes_by_twin
        out[: rows.decodes] = attend(q[: rows.decodes], k_pages, v_pages, rows, scale, window)
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
        )
    else:
        _chunks_by_twin(q, k_pages, v_pages, rows, scale, window, out)
    return out


def _decodes_by_kernel(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, scale: float, window: int | None
) -> Tensor:
    tables, lengths = rows.tables[: rows.decodes], rows.lengths[: rows.decodes]
    longest = max(rows.contexts[: rows.decodes])
    return decode_attention_triton(q, k_pages, v_pages, tables, lengths, scale, window, longest)


def _decodes_by_twin(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, scale: float, window: int | None
) -> Tensor:
    reads = rows.reads(window).decodes
    return _attend_decodes(q, k_pages.flatten(0, 1), v_pages.flatten(0, 1), reads, scale)


def _chunks_by_twin(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, scale: float, window: int | None, out: Tensor
) -> None:
    for chunk in rows.reads(window).chunks:
        part = slice(chunk.start, chunk.stop)
        out[part] = _attend_chunk(q[part], k_pages.flatten(0, 1), v_pages.flatten(0, 1), chunk, scale)


def paged_attention_reference(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, scale: float, window: int | None
) -> Tensor:
    if rows.decodes == len(rows.counts) > 0:
        return _decodes_by_twin(q, k_pages, v_pages, rows, scale, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows.decodes:
        out[: rows.decodes] = _decodes_by_twin(q[: rows.decodes], k_pages, v_pages, rows, scale, window)
    _chunks_by_twin(q, k_pages, v_pages, rows, scale, window, out)
    return out


def alike(widths: Sequence[int]) -> list[list[int]]:
    """Rows in groups that are worth padding to one width: longest first, in order where one group does."""
    order = sorted(range(len(widths)), key=lambda row: -widths[row])
    groups: list[list[int]] = []
    widest = 0
    for row in order:
        needed = max(widths[row], SHORT)
        if not groups or 2 * needed < widest or (len(groups[-1]) + 1) * widest > MOST_GATHERED:
            groups.append([])
            widest = needed
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _attend_decodes(
    q: Tensor, k_slots: Tensor, v_slots: Tensor, reads: tuple[Decodes, ...], scale: float
) -> Tensor:
    """One batched call for each group of rows of like length."""
    if len(reads) == 1:
        return _attend_group(q, k_slots, v_slots, reads[0], scale)
    out = torch.empty_like(q)
    for group in reads:
        if group.rows is not None:
            part = _attend_group(q.index_select(0, group.rows), k_slots, v_slots, group, scale)
            out.index_copy_(0, group.rows, part)
    return out


def _attend_group(q: Tensor, k_slots: Tensor, v_slots: Tensor, reads: Decodes, scale: float) -> Tensor:
    """The heads that share a kv head stand in for query positions: K is never repeated."""
    rows, heads, dim = q.shape
    kv_heads = k_slots.shape[1]
    k = k_slots.index_select(0, reads.slots).view(rows, -1, kv_heads, dim).transpose(1, 2)
    v = v_slots.index_select(0, reads.slots).view(rows, -1, kv_heads, dim).transpose(1, 2)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=reads.mask, scale=scale)
    return out.reshape(rows, heads, dim)


def _attend_chunk(q: Tensor, k_slots: Tensor, v_slots: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """One row. Each kv head is a batch entry, the query heads that share it its heads (K by stride 0)."""
    count, heads, dim = q.shape
    kv_heads = k_slots.shape[1]
    group = heads // kv_heads
    k = k_slots.index_select(0, chunk.slots).transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    v = v_slots.index_select(0, chunk.slots).transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    grouped = q.reshape(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    if chunk.causal and q.is_cuda:  # a mask that is only a rule: kernels skip the hidden half
        rule = causal_lower_right(count, len(chunk.slots))
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=rule, scale=scale)
    else:
        out = F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=chunk.mask, is_causal=chunk.causal, scale=scale
        )
    return out.permute(2, 0, 1, 3).reshape(count, heads, dim)
