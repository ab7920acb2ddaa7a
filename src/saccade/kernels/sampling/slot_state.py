"""What a decode step reads from its slots at its beginning, and writes back at its end.

A slot keeps, for its sequence: the token sampled last, the number of computed tokens (length), the rotary
position of the next token, and the number of output tokens. Step row i is slot r = step_rows[i], or padding
if that is negative:

    gather     token[i] = last[r]    position[i] = positions[r]    output[i] = outputs[r]
               context[i] = lengths[r] + 1,  slot[i] = table[r, length // B] * B + length % B
               padding: token, position and output 0, context 0, slot -1: it reads and writes no page
    advance    last[r] = token[i],  lengths[r] += 1,  positions[r] += 1,  outputs[r] += 1

The buffers have one spare line: the references let padding write there, which needs no synchronisation.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.jit import jit_unspecialized, pdl_options, power_of_two, tl, wait_for_previous


class SlotState(NamedTuple):
    """By device row; one spare line at the end."""

    tables: Tensor  # [rows + 1, W] int32
    last: Tensor  # [rows + 1] int64
    lengths: Tensor  # [rows + 1] int32
    positions: Tensor  # [rows + 1] float32, the same on all three axes
    outputs: Tensor  # [rows + 1] int32


class GatheredSlots(NamedTuple):
    """By step row."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] float32
    contexts: Tensor  # [n] int32
    slots: Tensor  # [n] int64
    outputs: Tensor  # [n] int64


@jit_unspecialized("step_rows", "n", "stride")
def _gather_kernel(step_rows, tables, last, lengths, positions, outputs, tokens, places, contexts, slots,
                   counts, n, stride, BLOCK: tl.constexpr, UP: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    i = tl.arange(0, UP)
    wait_for_previous(PDL)
    row = tl.load(step_rows + i, mask=i < n, other=-1)
    real = row >= 0
    row = tl.where(real, row, 0)
    length = tl.load(lengths + row, mask=real, other=0)
    block = tl.load(tables + row.to(tl.int64) * stride + length // BLOCK, mask=real, other=0)
    slot = block.to(tl.int64) * BLOCK + length % BLOCK
    inside = i < n
    tl.store(tokens + i, tl.load(last + row, mask=real, other=0), mask=inside)
    tl.store(places + i, tl.load(positions + row, mask=real, other=0.0), mask=inside)
    tl.store(contexts + i, tl.where(real, length + 1, 0), mask=inside)
    tl.store(slots + i, tl.where(real, slot, -1), mask=inside)
    tl.store(counts + i, tl.load(outputs + row, mask=real, other=0).to(tl.int64), mask=inside)


@jit_unspecialized("step_rows", "tokens", "n")
def _advance_kernel(step_rows, tokens, last, lengths, positions, outputs, n, UP: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    i = tl.arange(0, UP)
    wait_for_previous(PDL)
    row = tl.load(step_rows + i, mask=i < n, other=-1)
    real = row >= 0
    row = tl.where(real, row, 0)
    tl.store(last + row, tl.load(tokens + i, mask=real, other=0), mask=real)
    tl.store(lengths + row, tl.load(lengths + row, mask=real, other=0) + 1, mask=real)
    tl.store(positions + row, tl.load(positions + row, mask=real, other=0.0) + 1.0, mask=real)
    tl.store(outputs + row, tl.load(outputs + row, mask=real, other=0) + 1, mask=real)


def gather_slots(
    step_rows: Tensor, state: SlotState, block_size: int, mode: KernelMode = DEFAULT_MODE
) -> GatheredSlots:
    """step_rows [n] int32, negative for padding; no device row twice."""
    _check(step_rows, state)
    if use_triton("device_rows", step_rows, mode):
        return gather_slots_triton(step_rows, state, block_size, mode)
    return gather_slots_reference(step_rows, state, block_size)


def gather_slots_triton(
    step_rows: Tensor, state: SlotState, block_size: int, mode: KernelMode = DEFAULT_MODE
) -> GatheredSlots:
    n, device = step_rows.shape[0], step_rows.device
    kinds = (torch.int64, torch.float32, torch.int32, torch.int64, torch.int64)
    new = torch.zeros if mode.compile_only else torch.empty  # others look things up by these numbers
    made = GatheredSlots(*(new(n, dtype=kind, device=device) for kind in kinds))
    _gather_kernel[(1,)](
        step_rows, *state, *made, n, state.tables.stride(0), BLOCK=block_size, UP=_padded(n), num_warps=4,
        **pdl_options(mode.pdl),
    )  # fmt: skip
    return made


def _padded(n: int) -> int:
    """One size for nearly all: each is a compilation, and the masked rest costs nothing."""
    return max(power_of_two(n), 512)


def gather_slots_reference(step_rows: Tensor, state: SlotState, block_size: int) -> GatheredSlots:
    real = step_rows >= 0
    rows = step_rows.clamp(min=0).long()
    lengths = state.lengths[rows]
    blocks = state.tables[rows, (lengths // block_size).long()].long()
    slots = blocks * block_size + lengths % block_size
    return GatheredSlots(
        tokens=torch.where(real, state.last[rows], 0),
        positions=torch.where(real, state.positions[rows], 0.0),
        contexts=torch.where(real, lengths + 1, 0),
        slots=torch.where(real, slots, -1),
        outputs=torch.where(real, state.outputs[rows], 0).long(),
    )


def advance_slots(
    step_rows: Tensor, tokens: Tensor, state: SlotState, mode: KernelMode = DEFAULT_MODE
) -> None:
    """tokens [n] int64, sampled by the step; those of padding are dropped."""
    _check(step_rows, state)
    if tokens.shape != step_rows.shape or tokens.dtype != torch.int64:
        raise ValueError(f"{step_rows.shape[0]} step rows with tokens {tuple(tokens.shape)} {tokens.dtype}")
    if use_triton("device_rows", step_rows, mode):
        return advance_slots_triton(step_rows, tokens, state, mode.pdl)
    return advance_slots_reference(step_rows, tokens, state)


def advance_slots_triton(step_rows: Tensor, tokens: Tensor, state: SlotState, pdl: bool = False) -> None:
    n = step_rows.shape[0]
    _advance_kernel[(1,)](
        step_rows, tokens, state.last, state.lengths, state.positions, state.outputs, n,
        UP=_padded(n), num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


def advance_slots_reference(step_rows: Tensor, tokens: Tensor, state: SlotState) -> None:
    spare = state.last.shape[0] - 1
    rows = torch.where(step_rows < 0, spare, step_rows).long()
    step = (step_rows >= 0).int()
    state.last.index_copy_(0, rows, tokens)
    state.lengths.index_add_(0, rows, step)
    state.positions.index_add_(0, rows, step.float())
    state.outputs.index_add_(0, rows, step)


def _check(step_rows: Tensor, state: SlotState) -> None:
    lines = state.last.shape[0]
    kinds = (torch.int32, torch.int64, torch.int32, torch.float32, torch.int32)
    for tensor, kind in zip(state, kinds, strict=True):
        if tensor.shape[0] != lines or tensor.dtype != kind or not tensor.is_contiguous():
            raise ValueError(f"row state is dense, {lines} lines of {kind}; not {tuple(tensor.shape)}")
    if step_rows.dim() != 1 or step_rows.dtype != torch.int32 or not 1 <= step_rows.shape[0] <= 4096:
        raise ValueError(f"step rows are 1 to 4096 int32, not {tuple(step_rows.shape)} {step_rows.dtype}")
