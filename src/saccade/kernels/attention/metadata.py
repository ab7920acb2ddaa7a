"""Attention metadata: the rows (sequences) of a step, made once and passed to every layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The reference reads decode rows together, padded to the longest, as long as padding at most doubles what a
# row longer than SHORT reads, and at most MOST_GATHERED tokens at once: copies of K and V are workspace.
MOST_GATHERED = 1 << 18
SHORT = 256
# torch's memory-efficient attention takes queries in blocks of 64, or 32 for wide heads. Where heads share
# keys by a stride of 0 it is wrong (by 0.16 of the largest value) for a query that is alone in the last
# block, e.g. of 65, in all dtypes (torch 2.11, H200). Such a query is computed by itself.
LONE_QUERY_BLOCK = 32


class DecodeReads(NamedTuple):
    """What decode rows of similar length read, padded to one width; padding repeats a row's last KV slot."""

    rows: Tensor | None  # [rows] int64, which of the decode rows these are; None: all, in order
    slots: Tensor  # [rows * width] int64
    mask: Tensor  # [rows, 1, 1, width] bool: True where there is a token


class ChunkReads(NamedTuple):
    """What neighbouring queries of one row read."""

    start: int  # the queries are start .. stop of the step's tokens
    stop: int
    slots: Tensor  # [context] int64
    causal: bool  # a prompt from its beginning: a causal mask is enough
    mask: Tensor | None  # [queries, context] bool, where `causal` is not


class ReferenceReads(NamedTuple):
    decodes: tuple[DecodeReads, ...]
    chunks: tuple[ChunkReads, ...]


class AttentionMetadata:
    """The rows of one step: the first `num_decodes` have one query each, the others are prompt chunks.

    The reference reads whole sequences by KV slot; it computes those indices once per step and window.
    """

    def __init__(
        self,
        block_tables: Tensor,  # [R, W] int32
        seq_lens: Tensor,  # [R] int32
        query_start_loc: Tensor,  # [R + 1] int32
        query_lens: tuple[int, ...],
        seq_lens_cpu: tuple[int, ...],
        num_decodes: int,
        block_size: int,
    ) -> None:
        if block_tables.dim() != 2 or block_tables.dtype != torch.int32:
            raise ValueError(
                f"block tables are [rows, width] int32, not {tuple(block_tables.shape)} {block_tables.dtype}"
            )
        rows = block_tables.shape[0]
        lines = len(query_lens), len(seq_lens_cpu), seq_lens.shape[0], query_start_loc.shape[0] - 1
        if set(lines) != {rows}:
            raise ValueError(
                f"{rows} tables, {lines[0]} query lengths, {lines[1]} and {lines[2]} sequence lengths and "
                f"{lines[3] + 1} query starts do not describe the same rows"
            )
        needed = -(-max(seq_lens_cpu, default=0) // block_size)
        if needed > block_tables.shape[1]:
            raise ValueError(
                f"a context of {max(seq_lens_cpu)} tokens needs {needed} table entries of {block_size} "
                f"tokens; the tables have {block_tables.shape[1]}"
            )
        for count, context in zip(query_lens, seq_lens_cpu, strict=True):
            if not 1 <= count <= context:
                raise ValueError(f"a row computes {count} tokens of a sequence of {context}")
        if not 0 <= num_decodes <= rows or any(count != 1 for count in query_lens[:num_decodes]):
            raise ValueError(f"the first {num_decodes} of {rows} rows must have one token each")
        self.block_tables, self.seq_lens, self.query_start_loc = block_tables, seq_lens, query_start_loc
        self.query_lens, self.seq_lens_cpu, self.num_decodes = query_lens, seq_lens_cpu, num_decodes
        self.block_size = block_size
        self._reads: dict[int | None, ReferenceReads] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def max_decode_len(self) -> int:
        return max(self.seq_lens_cpu[: self.num_decodes])

    @property
    def chunk_start_loc(self) -> Tensor:
        return self.query_start_loc[self.num_decodes :]

    def tables_of(self, rows: slice) -> tuple[Tensor, Tensor, None]:
        """Block tables and lengths of some rows."""
        return self.block_tables[rows], self.seq_lens[rows], None

    def reference_reads(self, window: int | None) -> ReferenceReads:
        found = self._reads.get(window)
        if found is None:
            found = ReferenceReads(self._decode_reads(window), self._chunk_reads(window))
            self._reads[window] = found
        return found

    def _decode_reads(self, window: int | None) -> tuple[DecodeReads, ...]:
        decodes, tables, lengths = self.num_decodes, self.block_tables, self.seq_lens
        widths = [min(context, window or context) for context in self.seq_lens_cpu[:decodes]]
        groups = group_by_width(widths)
        if len(groups) == 1:
            return (self._gather(None, max(widths), tables[:decodes], lengths[:decodes]),)
        reads = []
        for group in groups:
            rows = torch.tensor(group)
            if tables.is_cuda:
                rows = rows.pin_memory().to(tables.device, non_blocking=True)
            reads.append(self._gather(rows, max(widths[row] for row in group), tables[rows], lengths[rows]))
        return tuple(reads)

    def _gather(self, rows: Tensor | None, width: int, tables: Tensor, lengths: Tensor) -> DecodeReads:
        lengths = lengths[:, None].long()
        steps = torch.arange(width, device=lengths.device)
        positions = (lengths - width).clamp(min=0) + steps  # [rows, width]
        present = positions < lengths
        positions = torch.minimum(positions, lengths - 1)
        blocks = tables.gather(1, positions // self.block_size).long()
        slots = blocks * self.block_size + positions % self.block_size
        return DecodeReads(rows, slots.flatten(), present[:, None, None, :])

    def _chunk_reads(self, window: int | None) -> tuple[ChunkReads, ...]:
        chunks = []
        start = self.num_decodes
        for row in range(self.num_decodes, len(self.query_lens)):
            context = self.seq_lens_cpu[row] - self.query_lens[row]
            for count in split_lone_query(self.query_lens[row]):
                context += count
                chunks.append(self._chunk(row, start, count, context, window))
                start += count
        return tuple(chunks)

    def _chunk(self, row: int, start: int, count: int, context: int, window: int | None) -> ChunkReads:
        stop = start + count
        first = context - count  # position of the first query
        low = 0 if window is None else max(0, first - window + 1)
        positions = torch.arange(low, context, device=self.block_tables.device)
        slots = self.block_tables[row].long()[positions // self.block_size] * self.block_size
        slots += positions % self.block_size
        if count == 1:  # `low` has already cut what the window hides
            return ChunkReads(start, stop, slots, False, None)
        if first == 0 and (window is None or window >= context):
            return ChunkReads(start, stop, slots, True, None)
        queries = positions[first - low :, None]
        mask = positions <= queries
        if window is not None:
            mask &= positions > queries - window
        return ChunkReads(start, stop, slots, False, mask)


def split_lone_query(count: int) -> tuple[int, ...]:
    """How many queries of a row the reference computes in one call, and in the next."""
    return (count - 1, 1) if count > 1 and count % LONE_QUERY_BLOCK == 1 else (count,)


class PaddedAttentionMetadata:
    """Rows of a fixed number whose lengths only the device knows: the metadata of a CUDA graph.

    The first `num_decodes` rows have one query each (padding: of length 0); behind them come `num_tokens` -
    `num_decodes` queries of the other rows by `chunk_start_loc`, the last of them perhaps of no row.
    """

    def __init__(
        self,
        block_tables: Tensor,  # [any, W] int32
        table_index: Tensor,  # [R] int32: row r's line of the tables; not read for padding
        seq_lens: Tensor,  # [R] int32
        chunk_start_loc: Tensor | None,  # [R - num_decodes + 1] int32, if there are such rows
        num_decodes: int,
        num_tokens: int,
        max_decode_len: int,
        block_size: int,
    ) -> None:
        rows = table_index.shape[0]
        starts = 0 if chunk_start_loc is None else chunk_start_loc.shape[0] - 1
        if seq_lens.shape != (rows,) or starts != rows - num_decodes:
            raise ValueError(
                f"{rows} tables and {seq_lens.shape[0]} lengths, {num_decodes} of them of one query, with "
                f"offsets {None if chunk_start_loc is None else tuple(chunk_start_loc.shape)}"
            )
        self.block_tables, self.table_index = block_tables, table_index
        self.seq_lens, self.chunk_start_loc = seq_lens, chunk_start_loc
        self.num_decodes, self.num_tokens = num_decodes, num_tokens
        self.max_decode_len, self.block_size = max_decode_len, block_size
        self._unpadded: tuple[Tensor, AttentionMetadata] | None = None

    def tables_of(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables, and of some rows the lengths and their lines of the tables."""
        return self.block_tables, self.seq_lens[rows], self.table_index[rows]

    def unpadded(self) -> tuple[Tensor, AttentionMetadata]:
        """Which queries are no padding, [n] int64, and their rows. Reads the lengths back: for the CPU."""
        if self._unpadded is None:
            lengths = self.seq_lens.tolist()
            starts = [] if self.chunk_start_loc is None else self.chunk_start_loc.tolist()
            work = [(row, row, row + 1) for row in range(self.num_decodes) if lengths[row]]
            decodes = len(work)
            work += [
                (self.num_decodes + chunk, starts[chunk], starts[chunk + 1])
                for chunk in range(len(starts) - 1)
                if starts[chunk] < starts[chunk + 1]
            ]
            query_lens = tuple(stop - start for _, start, stop in work)
            rows = torch.tensor([row for row, _, _ in work], dtype=torch.int64)
            metadata = AttentionMetadata(
                self.block_tables[self.table_index[rows].long()],
                self.seq_lens[rows],
                torch.tensor([0, *query_lens]).cumsum(0).int(),
                query_lens,
                tuple(lengths[row] for row, _, _ in work),
                decodes,
                self.block_size,
            )
            queries = [query for _, start, stop in work for query in range(start, stop)]
            self._unpadded = torch.tensor(queries, dtype=torch.int64), metadata
        return self._unpadded


def group_by_width(widths: Sequence[int]) -> list[list[int]]:
    """Rows in groups that are worth padding to one width: longest first, in order if one group is enough."""
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


def check_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    if k_pages.dim() != 4 or k_pages.shape != v_pages.shape or k_pages.shape[3] != q.shape[2]:
        raise ValueError(
            f"queries {tuple(q.shape)} over pages {tuple(k_pages.shape)}, {tuple(v_pages.shape)}"
        )
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("attention needs contiguous pages: a slot is an offset into them")
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_pages.shape[2]} kv heads evenly")
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"queries of {q.dtype} over pages of {k_pages.dtype} and {v_pages.dtype}")
