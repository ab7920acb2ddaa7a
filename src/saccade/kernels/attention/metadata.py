"""The rows of a step, as attention reads them: made once and passed to every layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# One-query rows are read together, padded to the longest among them, as long as that at most doubles what a
# row reads (short ones aside), and never more tokens at once than this: the copies of K and V are workspace.
MOST_GATHERED = 1 << 18
SHORT = 256
# torch's memory-efficient attention goes through queries in blocks of 64, or 32 where heads are wide. Where
# heads share keys by a stride of 0, it gave a wrong answer (0.16 of the largest value) to a query that is
# alone in the last block, of 65 for example, in all dtypes (torch 2.11, H200). That one is attended to by
# itself, which is right.
LONE = 32


class Decodes(NamedTuple):
    """What one-query rows of like length read, padded to one width; padding repeats a row's last slot."""

    rows: Tensor | None  # [rows] int64, which of the one-query rows these are; None: all, in order
    slots: Tensor  # [rows * width] int64
    mask: Tensor  # [rows, 1, 1, width] bool: True where there is a token


class Chunk(NamedTuple):
    """What neighbouring queries of one row read."""

    start: int  # its queries are start .. stop of the step's tokens
    stop: int
    slots: Tensor  # [context] int64
    causal: bool  # a prompt from its beginning: each query sees itself and what is before it
    mask: Tensor | None  # [queries, context] bool, where `causal` does not say it


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
        # Whether its prompts all begin here: their keys and values lie together, nothing has to be found.
        self.fresh = decodes < rows and counts[decodes:] == contexts[decodes:]
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
            context = self.contexts[row] - self.counts[row]
            for count in together(self.counts[row]):
                context += count
                chunks.append(self._chunk(row, start, start + count, count, context, window))
                start += count
        return tuple(chunks)

    def _chunk(self, row: int, start: int, stop: int, count: int, context: int, window: int | None) -> Chunk:
        first = context - count  # place of the first query
        low = 0 if window is None else max(0, first - window + 1)
        places = torch.arange(low, context, device=self.tables.device)
        slots = self.tables[row].long()[places // self.block_size] * self.block_size
        slots += places % self.block_size
        if count == 1:  # `low` has already cut what the window hides
            return Chunk(start, stop, slots, False, None)
        if first == 0 and (window is None or window >= context):
            return Chunk(start, stop, slots, True, None)
        queries = places[first - low :, None]
        mask = places <= queries
        if window is not None:
            mask &= places > queries - window
        return Chunk(start, stop, slots, False, mask)


def together(count: int) -> tuple[int, ...]:
    """How many queries of a row the twin attends to in one call, and in the next."""
    return (count - 1, 1) if count > 1 and count % LONE == 1 else (count,)


class FixedRows:
    """Rows whose number is fixed and whose lengths only the device knows: what a captured step reads.

    The first `decodes` rows have one query each (padding: of length 0); behind them come `tokens - decodes`
    queries of the other rows by `offsets`, the last of them perhaps of no row. Lines of padding mean nothing.
    """

    def __init__(
        self,
        tables: Tensor,  # [any, W] int32
        index: Tensor,  # [R] int32: row r's line of the tables; not read for padding
        lengths: Tensor,  # [R] int32
        offsets: Tensor | None,  # [R - decodes + 1] int32 into the queries, where there are such rows
        decodes: int,
        tokens: int,
        longest: int,  # no one-query row is longer
        block_size: int,
    ) -> None:
        rows = index.shape[0]
        chunks = rows - decodes
        if lengths.shape != (rows,) or (0 if offsets is None else offsets.shape[0] - 1) != chunks:
            raise ValueError(
                f"{rows} tables and {lengths.shape[0]} lengths, {decodes} of them of one query, with "
                f"offsets {None if offsets is None else tuple(offsets.shape)}"
            )
        self.tables, self.index, self.lengths, self.offsets = tables, index, lengths, offsets
        self.decodes, self.tokens, self.longest, self.block_size = decodes, tokens, longest, block_size
        self._real: tuple[Tensor, Rows] | None = None

    def real(self) -> tuple[Tensor, Rows]:
        """Which queries belong to somebody, [n] int64, and their rows as the twin takes them.

        Reads the lengths back: for the CPU, where that costs nothing.
        """
        if self._real is None:
            lengths = self.lengths.tolist()
            ends = [] if self.offsets is None else self.offsets.tolist()
            work = [(row, row, row + 1) for row in range(self.decodes) if lengths[row]]
            decodes = len(work)
            work += [
                (self.decodes + place, ends[place], ends[place + 1])
                for place in range(len(ends) - 1)
                if ends[place] < ends[place + 1]
            ]
            counts = tuple(stop - start for _, start, stop in work)
            which = torch.tensor([row for row, _, _ in work], dtype=torch.int64)
            rows = Rows(
                self.tables[self.index[which].long()],
                self.lengths[which],
                torch.tensor([0, *counts]).cumsum(0).int(),
                counts,
                tuple(lengths[row] for row, _, _ in work),
                decodes,
                self.block_size,
            )
            queries = [query for _, start, stop in work for query in range(start, stop)]
            self._real = torch.tensor(queries, dtype=torch.int64), rows
        return self._real


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
