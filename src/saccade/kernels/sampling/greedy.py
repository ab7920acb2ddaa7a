"""The argmax of each row of logits, and whether all of the row is finite.

Two kernels: the best of each piece of a row, then of each row. One pass: 256 rows of 151,936 in 16 bits are
78 MB, 17 us at 4.69 TB/s.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.jit import jit, pdl_options, power_of_two, tl, up, wait_for_previous


class GreedyTuning(NamedTuple):
    piece: int | None = None  # values of one program; None: 2,048 for few lines, 8,192 for many
    tile: int = 1024  # values at once
    warps: int = 4
    pdl: bool = False


@jit
def _best_kernel(logits, values, places, sounds, vocab, stride, pieces, PIECE: tl.constexpr,
                 TILE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = logits + row * stride
    top = tl.full([TILE], float("-inf"), tl.float32)
    at = tl.zeros([TILE], tl.int32)
    sound = tl.full([TILE], 1, tl.int32)
    wait_for_previous(PDL)
    for start in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, vocab), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < vocab
        value = tl.load(line + token, mask=inside, other=float("-inf")).to(tl.float32)
        sound = tl.where(inside & ((value - value) != 0.0), 0, sound)  # infinite or NaN
        at = tl.where(value > top, token, at)
        top = tl.maximum(top, value)
    best = tl.max(top, 0)
    first = tl.min(tl.where(top == best, at, 2147483647), 0)
    tl.store(values + row * pieces + piece, best)
    tl.store(places + row * pieces + piece, first)
    tl.store(sounds + row * pieces + piece, tl.min(sound, 0))


@jit
def best_of_line(values, places, sounds, tokens, sound, row, pieces, vocab, UP: tl.constexpr):
    """Best of the pieces: writes the token and whether the line was of numbers; gives the best logit and its
    token."""
    piece = tl.arange(0, UP)
    there = piece < pieces
    value = tl.load(values + row * pieces + piece, mask=there, other=float("-inf"))
    place = tl.load(places + row * pieces + piece, mask=there, other=2147483647)
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, place, 2147483647), 0)
    ok = tl.min(tl.load(sounds + row * pieces + piece, mask=there, other=1), 0)
    token = tl.minimum(token, vocab - 1)  # a line of NaN has no best
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(sound + row, ok != 0)
    return best, token


@jit
def _greedy_kernel(values, places, sounds, tokens, sound, pieces, vocab, UP: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    wait_for_previous(PDL)
    best_of_line(values, places, sounds, tokens, sound, tl.program_id(0).to(tl.int64), pieces, vocab, UP)


def greedy(logits: Tensor, mode: KernelMode = DEFAULT_MODE) -> tuple[Tensor, Tensor]:
    """[S, vocab] to the best token of each line, the first of equals, [S] int64; and whether the line was of
    numbers, [S] bool."""
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits are [rows, vocab], not {tuple(logits.shape)}")
    if use_triton("argmax", logits, mode):
        return greedy_triton(logits, GreedyTuning(pdl=mode.pdl))
    # One NaN or infinity among them spoils the sum.
    return logits.argmax(dim=-1), logits.sum(dim=-1, dtype=torch.float32).isfinite()


def greedy_triton(logits: Tensor, tuning: GreedyTuning | None = None) -> tuple[Tensor, Tensor]:
    t = tuning or GreedyTuning()
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or not logits.is_floating_point() or vocab < 1:
        raise ValueError(f"logits are dense lines of floats, not {logits.dtype} of strides {logits.stride()}")

    def made(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=kind, device=logits.device)

    tokens, sound = made(torch.int64), made(torch.bool)
    if not rows:
        return tokens, sound
    size = t.piece or (2048 if rows <= 16 else 8192)
    pieces = up(vocab, size)
    values, places, sounds = (made(kind, pieces) for kind in (torch.float32, torch.int32, torch.int32))
    more = pdl_options(t.pdl)
    _best_kernel[(rows, pieces)](
        logits, values, places, sounds, vocab, logits.stride(0), pieces, PIECE=size,
        TILE=min(t.tile, power_of_two(size)), num_warps=t.warps, **more,
    )  # fmt: skip
    _greedy_kernel[(rows,)](
        values, places, sounds, tokens, sound, pieces, vocab, UP=power_of_two(pieces), num_warps=1, **more
    )
    return tokens, sound
