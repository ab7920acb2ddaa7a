"""Sampling with temperature, top-k, top-p and min-p without sorting, in two passes over the logits.

The reference is `sampling.sampler` (scale and filter, then noise, then argmax):

    x = (logit - best) / temperature                                   at most 0
    kept: x >= the k-th best x; x >= the least x of the smallest set of best tokens whose share of the mass of
          what top-k keeps reaches top_p; x >= log(min_p). Ties stay in.
    token = argmax over the kept of  x - log(E),   E = -log(1 - u),  u a hash of (words, token id)

`threshold` says what keys, gaps and edges are. Kernels:

    look     each piece of a row: its best logit, whether all are finite, the mass of exp(x) against that
             best, and every EVERY-th logit as the row's sample
    guess    each row: its best (the greedy token) and its mass, both exact; the words of its noise; from the
             sample two keys, low and high, that enclose the threshold almost surely; the best score among the
             sampled below low, which the winner reaches at least
    gather   each piece: the mass below low; it lists the tokens between low and high, and those below low
             whose noise lets them win: one hash and no logarithm per value, some dozens of tokens a row
    settle   each row: checks that low and high enclose the threshold, finds it exactly among the listed keys,
             scores the kept tokens and takes the best
    search   a row whose guess was wrong or whose list overflows (all tokens alike, k in the tens of
             thousands): the whole of it by one program

Sums over a list are of integers and scores need no order, so the atomic counter changes nothing. 256 rows of
151,936 in 16 bits are 78 MB, 17 us a pass.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.jit import (
    constant,
    jit,
    jit_unspecialized,
    pdl_options,
    power_of_two,
    tl,
    up,
    wait_for_previous,
)
from saccade.kernels.sampling.greedy import best_of_line
from saccade.kernels.sampling.threshold import (
    ENDLESS,
    NONE,
    UNIT,
    distance_of,
    edge_of,
    enclose_top_k,
    enclose_top_p,
    entries,
    hashed,
    log_exponential,
    threshold_of_list,
    threshold_of_row,
    total_of_list,
    words_of,
)

COLUMNS = 9  # of the parameter table; `sampling.filters` names them
LOG2_E = constant(1.4426950408889634)
# u lies between 2^-32 and 1 - 2^-24: the best token scores at least -2.82, others at most 22.2 less |x|
HOPELESS = constant(26.0)


class DrawTuning(NamedTuple):
    piece: int = 2048  # values of one program; a line's sums depend on it, so it is the same for any rows
    tile: int = 1024  # values at once
    every: int = 38  # values for each sampled one; 75 pieces of 53 of them fill a tile of 4,096
    room: int = 16384  # of a line's list
    block: int = 1024  # values of a list at once; twice as many of a line that is searched
    warps: int = 1  # of the programs that read logits
    pdl: bool = False


@jit_unspecialized("rows")
def _look_kernel(logits, rows, parameters, values, places, sounds, masses, sample, vocab, stride, pieces,
                 PIECE: tl.constexpr, TILE: tl.constexpr, EVERY: tl.constexpr, MANY: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """MANY: no less than the sampled ones of a piece."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = logits + row * stride
    wait_for_previous(PDL)
    temperature = tl.load(parameters + tl.maximum(tl.load(rows + row), 0).to(tl.int64) * 9).to(tl.float32)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0) * LOG2_E
    best = scale * 0.0 - 3.4028234663852886e38  # the least finite: from infinity nothing can be taken
    mass, spoiled = scale * 0.0, scale * 0.0
    at = piece * 0 + NONE
    for start in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, vocab), TILE):
        token = start + tl.arange(0, TILE)
        value = tl.load(line + token, mask=token < vocab, other=0.0).to(tl.float32)
        spoiled += tl.sum(value * 0.0, 0)  # NaN from infinity and NaN
        value = tl.where(token < vocab, value, float("-inf"))
        top = tl.max(value, 0)
        if top > best:
            at = tl.min(tl.where(value == top, token, NONE), 0)
            mass *= tl.exp2((best - top) * scale)
            best = top
        mass += tl.sum(tl.exp2((value - best) * scale), 0)
    place = row * pieces + piece
    tl.store(values + place, best)
    tl.store(places + place, at)
    tl.store(sounds + place, (spoiled == 0.0).to(tl.int32))
    tl.store(masses + place, mass)
    FEW: tl.constexpr = PIECE // EVERY
    few = tl.arange(0, MANY)
    token = piece * PIECE + few * EVERY
    value = tl.load(line + token, mask=(token < vocab) & (few < FEW), other=float("-inf"))
    tl.store(sample + place * FEW + few, value, mask=few < FEW)


@jit_unspecialized("rows", "outputs")
def _guess_kernel(values, places, sounds, masses, sample, rows, parameters, outputs, tokens, sound, frame,
                  numbers, counters, vocab, pieces, UP: tl.constexpr, SAMPLES: tl.constexpr,
                  PIECE: tl.constexpr, EVERY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """frame [6] float32: best, temperature, top_p, the mass that top_p asks for, exp(-the score to beat), the
    farthest |x| that min_p keeps and that can win; numbers [10] int32: kind (0 greedy, 1 unbarred, 2 by
    top_p, 3 by top_k), k, the two words, the keys low and high, the edges of both and of what is too far."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    best, greedy = best_of_line(values, places, sounds, tokens, sound, row, pieces, vocab, UP)
    best = tl.where(best == 0.0, 0.0, best)  # never -0: from that, 0 would be a negative gap away
    user = tl.load(rows + row)
    settings = parameters + tl.maximum(user, 0).to(tl.int64) * 9
    temperature = tl.load(settings).to(tl.float32)
    k, p = tl.load(settings + 1).to(tl.int32), tl.load(settings + 2).to(tl.float32)
    farthest = tl.minimum(tl.abs(tl.log(tl.load(settings + 3).to(tl.float32))), HOPELESS)
    first, second = words_of(settings, tl.load(outputs + row))
    kind = tl.where((k > 0) & (k < vocab), 3, tl.where(p < 1, 2, 1))
    kind = tl.where((temperature > 0) & (user >= 0), kind, 0)
    tl.store(numbers + row * 10, kind)
    tl.store(counters + row, 0)
    if kind > 0:
        piece = tl.arange(0, UP)
        value = tl.load(values + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
        mass = tl.load(masses + row * pieces + piece, mask=piece < pieces, other=0.0)
        mass = tl.sum(mass * tl.exp2((value - best) * (1.0 / temperature * LOG2_E)), 0)
        FEW: tl.constexpr = PIECE // EVERY
        drawn, samples = tl.arange(0, SAMPLES), pieces * FEW
        token = drawn // FEW * PIECE + drawn % FEW * EVERY
        logit = tl.load(sample + row * samples + drawn, mask=drawn < samples, other=float("-inf"))
        far = tl.div_rn(best - logit.to(tl.float32), temperature)
        each = tl.sum((token < vocab).to(tl.float32), 0) / vocab
        low, high = kind * 0 + ENDLESS, kind * 0 + ENDLESS
        if kind == 2:
            low, high = enclose_top_p(far, tl.exp(-far), (1.0 - p) * mass * each)
        elif kind == 3:
            low = kind * 0  # top-p may look at all that top-k keeps
            high = enclose_top_k(far, k.to(tl.float32) * each)
        high = tl.minimum(tl.maximum(high, 1), ENDLESS)
        low = tl.maximum(tl.minimum(low, high), 0)
        key = far.to(tl.int32, bitcast=True)
        beyond = farthest.to(tl.int32, bitcast=True) + 1
        score = -far - log_exponential(token, first, second)
        score = tl.max(tl.where((key < low) & (key < beyond), score, float("-inf")), 0)
        score = tl.maximum(score, -log_exponential(greedy, first, second))
        tl.store(frame + row * 6, best)
        tl.store(frame + row * 6 + 1, temperature)
        tl.store(frame + row * 6 + 2, p)
        tl.store(frame + row * 6 + 3, p * mass)
        tl.store(frame + row * 6 + 4, tl.exp(-score))
        tl.store(frame + row * 6 + 5, farthest)
        tl.store(numbers + row * 10 + 1, k)
        tl.store(numbers + row * 10 + 2, first.to(tl.int32, bitcast=True))
        tl.store(numbers + row * 10 + 3, second.to(tl.int32, bitcast=True))
        tl.store(numbers + row * 10 + 4, low)
        tl.store(numbers + row * 10 + 5, high)
        four = tl.arange(0, 4)
        keys = tl.where(four == 0, low, tl.where(four == 1, high, beyond))
        tl.store(numbers + row * 10 + 6 + four, edge_of(keys, temperature), mask=four < 3)


@jit
def _gather_kernel(logits, frame, numbers, counters, below, listed, vocab, stride, pieces,
                   PIECE: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """listed [ROOM] int64: the bits of the gap, then the token."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(PDL)
    if tl.load(numbers + row * 10) == 0:
        return
    best, scale = tl.load(frame + row * 6), -1.0 / tl.load(frame + row * 6 + 1) * LOG2_E
    # A token may win where u < exp(-|x|) * exp(-the score to beat), as -log(E) is at most -log(u). Here u has
    # lost its last bits and stands above 1; the limit is wider by that and a hundredth: nothing is missed.
    chance = tl.load(frame + row * 6 + 4) * 1.01
    first = tl.load(numbers + row * 10 + 2).to(tl.uint32, bitcast=True)
    second = tl.load(numbers + row * 10 + 3).to(tl.uint32, bitcast=True)
    low, high = tl.load(numbers + row * 10 + 6), tl.load(numbers + row * 10 + 7)
    reach = tl.minimum(low, tl.load(numbers + row * 10 + 8))
    mass = best * 0.0
    for start in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, vocab), TILE):
        token = start + tl.arange(0, TILE)
        gap = best - tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(
            tl.float32
        )
        bits = gap.to(tl.int32, bitcast=True)
        least = tl.min(bits, 0)
        if least < high:  # most tiles of a trained model's line have nothing here
            wanted = ((bits >= low) & (bits < high)).to(tl.int32)
            if least < low:
                weight = tl.exp2(gap * scale)
                mass += tl.sum(tl.where(bits < low, weight, 0.0), 0)
                u = ((hashed(token, first, second) >> 8) & 0x7FFFFF) | 0x3F800000
                lucky = u.to(tl.float32, bitcast=True) < weight * chance + (1.0 + 2.0**-22)
                wanted = tl.where((bits < reach) & lucky, 1, wanted)
            count = tl.sum(wanted, 0)
            if count > 0:
                place = tl.atomic_add(counters + row, count, sem="relaxed") + tl.cumsum(wanted, 0) - 1
                both = (bits.to(tl.int64) << 32) | token.to(tl.int64)
                tl.store(listed + row * ROOM + place, both, mask=(wanted > 0) & (place < ROOM))
    tl.store(below + row * pieces + piece, mass)


@jit
def _settle_kernel(frame, numbers, counters, below, listed, spares, late, tokens, vocab, pieces,
                   ROOM: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """late [lines] int32: whether the line has to be searched."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    kind, count = tl.load(numbers + row * 10), tl.load(counters + row)
    wrong = (count > ROOM).to(tl.int32)
    if (kind > 0) & (wrong == 0):
        temperature, p = tl.load(frame + row * 6 + 1), tl.load(frame + row * 6 + 2)
        low, high = tl.load(numbers + row * 10 + 4), tl.load(numbers + row * 10 + 5)
        mine, spare = listed + row * ROOM, spares + row * ROOM
        most = kind * 0 + ENDLESS
        base = kind.to(tl.int64) * 0
        if kind == 3:
            target = tl.load(numbers + row * 10 + 1).to(tl.int64)
            if count < target:
                wrong = count * 0 + 1
            else:
                most = threshold_of_list(
                    mine, spare, count, temperature, low, high, base, target, most, False, BLOCK
                )
                if p < 1:
                    total = total_of_list(mine, count, temperature, low, most, True, BLOCK)
                    share = (p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                    most = threshold_of_list(
                        mine, spare, count, temperature, low, high, base, share, most, True, BLOCK
                    )
        elif kind == 2:
            piece = tl.arange(0, UP)
            part = tl.load(below + row * pieces + piece, mask=piece < pieces, other=0.0)
            base = (tl.sum(part, 0) * UNIT).to(tl.int64)
            share = (tl.load(frame + row * 6 + 3) * UNIT).to(tl.int64)
            total = total_of_list(mine, count, temperature, low, most, True, BLOCK)
            if ((base >= share) & (low > 0)) | (base + total < share):
                wrong = count * 0 + 1
            else:
                most = threshold_of_list(
                    mine, spare, count, temperature, low, high, base, share, most, True, BLOCK
                )
        if wrong == 0:
            most = tl.minimum(most, tl.load(frame + row * 6 + 5).to(tl.int32, bitcast=True))
            first = tl.load(numbers + row * 10 + 2).to(tl.uint32, bitcast=True)
            second = tl.load(numbers + row * 10 + 3).to(tl.uint32, bitcast=True)
            bests = tl.full([BLOCK], float("-inf"), tl.float32)
            at = tl.full([BLOCK], NONE, tl.int32)
            for start in range(0, count, BLOCK):
                key, one = entries(mine, start, count, temperature, BLOCK)
                score = -key.to(tl.float32, bitcast=True) - log_exponential(one, first, second)
                score = tl.where(key <= most, score, float("-inf"))
                # The list is in any order: of equal scores the first token, as argmax has it.
                at = tl.where((score > bests) | ((score == bests) & (one < at)), one, at)
                bests = tl.maximum(bests, score)
            winner = tl.min(tl.where(bests == tl.max(bests, 0), at, NONE), 0)
            tl.store(tokens + row, tl.minimum(winner, vocab - 1).to(tl.int64))  # a line of NaN has none
    tl.store(late + row, tl.where(kind > 0, wrong, 0))


@jit
def _search_kernel(logits, frame, numbers, late, tokens, vocab, stride, BLOCK: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    if tl.load(late + row) == 0:
        return
    kind, k, p = tl.load(numbers + row * 10), tl.load(numbers + row * 10 + 1), tl.load(frame + row * 6 + 2)
    best, temperature = tl.load(frame + row * 6), tl.load(frame + row * 6 + 1)
    first = tl.load(numbers + row * 10 + 2).to(tl.uint32, bitcast=True)
    second = tl.load(numbers + row * 10 + 3).to(tl.uint32, bitcast=True)
    line = logits + row * stride
    most = threshold_of_row(line, vocab, best, temperature, k, p, kind, BLOCK)
    most = tl.minimum(most, tl.load(frame + row * 6 + 5).to(tl.int32, bitcast=True))
    bests = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], NONE, tl.int32)
    for start in range(0, vocab, BLOCK):
        one = start + tl.arange(0, BLOCK)
        far = distance_of(line, one, one < vocab, best, temperature)
        kept = (one < vocab) & (far.to(tl.int32, bitcast=True) <= most)
        score = tl.where(kept, -far - log_exponential(one, first, second), float("-inf"))
        at = tl.where(score > bests, one, at)
        bests = tl.maximum(bests, score)
    winner = tl.min(tl.where(bests == tl.max(bests, 0), at, NONE), 0)
    tl.store(tokens + row, tl.minimum(winner, vocab - 1).to(tl.int64))


def _check(logits: Tensor, rows: Tensor, parameters: Tensor, outputs: Tensor) -> None:
    lines, vocab = logits.shape
    if logits.stride(1) != 1 or not logits.is_floating_point() or vocab < 1:
        raise ValueError(f"logits are dense lines of floats, not {logits.dtype} of strides {logits.stride()}")
    for name, tensor, dtype, shape in (
        ("rows", rows, torch.int32, (lines,)),
        ("parameters", parameters, torch.float64, (parameters.shape[0], COLUMNS)),
        ("outputs", outputs, torch.int64, (lines,)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {shape} of {dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )


def draw_triton(
    logits: Tensor,  # [S, vocab] of any float dtype
    rows: Tensor,  # [S] int32: lines of the parameters; negative: padding, sampled greedily
    parameters: Tensor,  # [any, 9] float64, as `sampling.filters` names them; temperature 0: greedy
    outputs: Tensor,  # [S] int64: output positions
    tuning: DrawTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """The drawn (or greedy) token of each line, [S] int64; and whether the line was of numbers, [S] bool."""
    lines, vocab = logits.shape
    _check(logits, rows, parameters, outputs)
    t = tuning or DrawTuning()

    def made(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(lines, *shape, dtype=kind, device=logits.device)

    tokens, sound = made(torch.int64), made(torch.bool)
    if not lines:
        return tokens, sound
    piece, tile, every, pieces = t.piece, min(t.tile, t.piece), t.every, up(vocab, t.piece)
    values, masses, below = (made(torch.float32, pieces) for _ in range(3))
    places, sounds = made(torch.int32, pieces), made(torch.int32, pieces)
    samples = pieces * (piece // every)
    sample = made(logits.dtype, samples)
    frame, numbers = made(torch.float32, 6), made(torch.int32, 10)
    counters, late = made(torch.int32), made(torch.int32)
    listed, spares = made(torch.int64, t.room), made(torch.int32, t.room)
    ways = power_of_two(pieces)
    more = pdl_options(t.pdl)
    _look_kernel[(lines, pieces)](
        logits, rows, parameters, values, places, sounds, masses, sample, vocab, logits.stride(0), pieces,
        PIECE=piece, TILE=tile, EVERY=every, MANY=power_of_two(piece // every), num_warps=t.warps, **more,
    )  # fmt: skip
    _guess_kernel[(lines,)](
        values, places, sounds, masses, sample, rows, parameters, outputs, tokens, sound, frame, numbers,
        counters, vocab, pieces, UP=ways, SAMPLES=power_of_two(samples), PIECE=piece, EVERY=every,
        num_warps=8, **more,
    )  # fmt: skip
    _gather_kernel[(lines, pieces)](
        logits, frame, numbers, counters, below, listed, vocab, logits.stride(0), pieces, PIECE=piece,
        TILE=tile, ROOM=t.room, num_warps=t.warps, **more,
    )  # fmt: skip
    _settle_kernel[(lines,)](
        frame, numbers, counters, below, listed, spares, late, tokens, vocab, pieces, ROOM=t.room,
        BLOCK=t.block, UP=ways, num_warps=8, **more,
    )  # fmt: skip
    _search_kernel[(lines,)](
        logits, frame, numbers, late, tokens, vocab, logits.stride(0), BLOCK=t.block * 2, num_warps=16, **more
    )
    return tokens, sound
