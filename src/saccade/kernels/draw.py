"""A draw under top-k, top-p and min-p without sorting, several programs to a line.

The twin is `runtime.sampler` (scale_and_bar, then noise, then argmax):

    x = (logit - best) / temperature                                   at most 0
    kept: x >= the k-th best x; x >= the least x of the smallest set of best tokens whose share of the mass of
          what top-k keeps reaches top_p; x >= log(min_p). Ties stay in.
    token = argmax over the kept of  x - log(E),   E = -log(1 - u),  u a hash of (words, token id)

Both bounds have one form: the least v with F(x > v) < target, F a count (target k) or a mass (target top_p
* total). x is never positive, so the bits of |x| (its key) order it. Five kernels:

    best     each piece of a line: its best logit, and whether all are numbers
    pivots   each line: the best of its pieces, which is the greedy token; the two words of its noise; eight
             keys around the place where 2,048 of its tokens say the bound is
    tally    each piece: F below the eight keys
    sift     each piece: which two keys hold the bound is known now; tokens this side of both are scored,
             those between them written to the line's list
    settle   each line: the exact bound among its list, by eighths of eighths; the kept ones scored, and the
             best of all scores taken

So a line is read three times (twice where nothing is barred) by as many programs as it has pieces. A line
whose list does not fit (tokens all alike, or k in the tens of thousands) is searched whole by one program, in
its own time. Sums over a list are of whole numbers: the order an atomic counter leaves it in changes nothing.

Bytes: 256 lines of 151,936 in 16 bits are 78 MB, 17 us a pass at 4.69 TB/s. Tallying takes some 40 operations
a value, scoring 50. On an H200, 256 lines: 310 us where logits are peaked as a trained model's, 610 us
where they are flat; by kernel 27 (best), 28 (pivots), 129 (tally), 111 or 356 (sift), 22 or 68 (settle). That
is with two exact divisions a value; `gaps` has none, and the same tokens: 274 and 530 us; with fewer lines
they take longer than dividing.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (kernel arguments are pointers and numbers of the device: no type of Python says which)

import torch
from torch import Tensor

from saccade.kernels.bound import (
    bound_of_line,
    bound_of_list,
    edge_of,
    far_of,
    gap_of,
    narrowed,
    tally_gaps,
    tally_line,
)
from saccade.kernels.choice import mode
from saccade.kernels.draw_by_guess import GuessTuning, draw_by_guess
from saccade.kernels.draw_noise import log_exponential, log_waiting, uniform, words_of
from saccade.kernels.greedy import DrawTuning, best_of_line, best_of_pieces
from saccade.kernels.jit import constant, jit, jit_for_any, power_of_two, tl, up, wait_for_previous

# Whole lines are compared by their gaps, without a division (`bound`), and scored where they may win; or
# every value is divided. Written by `python -m bench.kernels --choose --write`.
GAPS = False
# By `draw_by_guess`, in two passes; or by the five kernels here. Written as GAPS is.
GUESS = False
COLUMNS = 9  # of the parameter table; `runtime.bars` names them
# u lies between 2^-32 and 1 - 2^-24, so log(E) between -22.2 and 2.812: the best token scores at least this,
SURE = constant(-2.85)
# and what is further away than that cannot win.
HOPELESS = constant(26.0)


@jit
def _store_four(to, keys, temperature, GAPS: tl.constexpr):
    tl.store(to, keys)
    if GAPS:
        tl.store(to + 8, edge_of(keys, temperature))


@jit_for_any("rows", "outputs")
def _pivot_kernel(logits, values, places, sounds, rows, parameters, outputs, tokens, sound, frame, numbers,
                  pivots, counters, vocab, stride, pieces, UP: tl.constexpr, SAMPLE: tl.constexpr,
                  GAPS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """frame [4] float32: best, temperature, top_p, farthest |x| that min_p keeps and that can win; numbers
    [4] int32: kind (0 greedy, 1 unbarred, 2 by top_p, 3 by top_k), k, the two words; pivots [17] int32: eight
    keys, their edges, the edge of what is too far."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    best, _ = best_of_line(values, places, sounds, tokens, sound, row, pieces, vocab, UP)
    asked = parameters + tl.maximum(tl.load(rows + row), 0).to(tl.int64) * 9
    temperature = tl.load(asked).to(tl.float32)
    k = tl.load(asked + 1).to(tl.int32)
    p = tl.load(asked + 2).to(tl.float32)
    first, second = words_of(asked, tl.load(outputs + row))
    by_k = (k > 0) & (k < vocab)
    kind = tl.where(by_k, 3, tl.where(p < 1, 2, 1))
    kind = tl.where((temperature > 0) & (tl.load(rows + row) >= 0), kind, 0)
    tl.store(frame + row * 4, best)
    tl.store(frame + row * 4 + 1, temperature)
    tl.store(frame + row * 4 + 2, p)
    farthest = tl.minimum(tl.abs(tl.log(tl.load(asked + 3).to(tl.float32))), HOPELESS)
    tl.store(frame + row * 4 + 3, farthest)
    tl.store(numbers + row * 4, kind)
    tl.store(numbers + row * 4 + 1, k)
    tl.store(numbers + row * 4 + 2, first.to(tl.int32, bitcast=True))
    tl.store(numbers + row * 4 + 3, second.to(tl.int32, bitcast=True))
    tl.store(counters + row, 0)
    if GAPS:
        tl.store(pivots + row * 17 + 16, edge_of(farthest.to(tl.int32, bitcast=True) + 1, temperature))
    if kind >= 2:
        step = tl.maximum(vocab // SAMPLE, 1)
        token = tl.arange(0, SAMPLE) * step
        inside = token < vocab
        far = far_of(logits + row * stride, token, inside, best, temperature)
        key = far.to(tl.int32, bitcast=True)
        taken = tl.sum(inside.to(tl.float32), 0)
        quarter = tl.arange(0, 4)
        # Masses a little below and above top_p; or places well beyond the k-th: its list holds all before it.
        off = tl.where(quarter == 0, -0.03, tl.where(quarter == 1, -0.008, 0.0))
        rest = 1.0 - p
        off = tl.where(quarter == 2, tl.minimum(0.008, rest * 0.4), off)
        off = tl.where(quarter == 3, tl.minimum(0.03, rest * 0.8), off)
        mean = k.to(tl.float32) * taken / vocab
        ranks = (mean + 4.0 * tl.sqrt(mean) + 4.0) * (1 + quarter * quarter).to(tl.float32)
        weight = tl.where(inside, tl.where(by_k, 1.0, tl.exp(-far)), 0.0)
        target = tl.where(by_k, ranks, (p + off) * tl.sum(weight, 0))
        low = quarter * 0
        high = quarter * 0 + 0x7F800001
        for _ in range(18):  # of 31 bits: a guess needs no more
            middle = low + (high - low) // 2
            under = tl.sum(tl.where(key[None, :] < middle[:, None], weight[None, :], 0.0), 1)
            low = tl.where(under < target, middle, low)
            high = tl.where(under < target, high, middle)
        _store_four(pivots + row * 17 + quarter, high, temperature, GAPS)
        # 1, 4 and 16 (exponents 127, 129, 131 of a float) where a few tokens hold all mass; then everything
        fixed = tl.where(quarter < 3, (127 + 2 * quarter) << 23, 0x7F800001)
        _store_four(pivots + row * 17 + 4 + quarter, fixed, temperature, GAPS)


@jit
def _tally_kernel(logits, frame, numbers, pivots, partial, vocab, stride, pieces, PIECE: tl.constexpr,
                  BLOCK: tl.constexpr, GAPS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(PDL)
    kind = tl.load(numbers + row * 4)
    if kind < 2:
        return
    best, temperature = tl.load(frame + row * 4), tl.load(frame + row * 4 + 1)
    bounds = tl.load(pivots + row * 17 + (8 if GAPS else 0) + tl.arange(0, 8))
    line, start = logits + row * stride, piece * PIECE
    stop = tl.minimum(start + PIECE, vocab)
    if GAPS:
        if kind == 2:
            sums = tally_gaps(line, start, stop, best, temperature, bounds, True, BLOCK)
        else:
            sums = tally_gaps(line, start, stop, best, temperature, bounds, False, BLOCK)
    elif kind == 2:
        sums = tally_line(line, start, stop, best, temperature, bounds, 0x7F800000, True, BLOCK)
    else:
        sums = tally_line(line, start, stop, best, temperature, bounds, 0x7F800000, False, BLOCK)
    tl.store(partial + (row * pieces + piece) * 8 + tl.arange(0, 8), sums)


@jit
def _bracket(frame, numbers, pivots, partial, row, pieces, kind, UP: tl.constexpr):
    """Keys low and high that hold the bound, F below low, the target; the edges of both keys (of no meaning
    where there are none). Nothing barred: all is below low."""
    low, high = kind * 0, kind * 0 + 0x7F800001
    below = kind.to(tl.float32) * 0.0
    target, near, over = below, low, high
    if kind >= 2:
        piece, eight = tl.arange(0, UP), tl.arange(0, 8)
        at = partial + (row * pieces + piece)[:, None] * 8 + eight[None, :]
        sums = tl.sum(tl.load(at, mask=(piece < pieces)[:, None], other=0.0), 0)
        keys = tl.load(pivots + row * 17 + eight)
        edges = tl.load(pivots + row * 17 + 8 + eight)
        target = tl.load(frame + row * 4 + 2) * tl.max(sums, 0)
        target = tl.where(kind == 3, tl.load(numbers + row * 4 + 1).to(tl.float32), target)
        near, over, _ = narrowed(edges, sums, low, high, below, target)
        low, high, below = narrowed(keys, sums, low, high, below, target)
        low = tl.where(kind == 3, 0, low)  # top-p may look at all that top-k keeps
        near = tl.where(kind == 3, 0, near)
        below = tl.where(kind == 3, 0.0, below)
    else:
        low = high
        near = high
    return low, high, below, target, near, over


@jit
def _scored(x, kept, token, first, second, top, at, hope, scale, temperature, GAPS: tl.constexpr):
    """The best score of each place and its token, with those of one more tile; GAPS: x is a gap, and a token
    is scored only where it may win. -log(E) is at most -log(u), and `hope` is what the best so far has; the
    bound is a hundredth wider than that, rounding far less: nothing better is missed."""
    u = uniform(token, first, second)
    if GAPS:
        kept = kept & (u < tl.exp2(x * scale - hope * 1.4426950408889634) * 1.01)
        if tl.max(kept.to(tl.int32), 0) > 0:
            score = tl.where(kept, -tl.div_rn(x, temperature) - log_waiting(u), float("-inf"))
            at = tl.where(score > top, token, at)
            top = tl.maximum(top, score)
            hope = tl.maximum(hope, tl.max(score, 0))
    else:
        score = tl.where(kept, -x - log_waiting(u), float("-inf"))
        at = tl.where(score > top, token, at)
        top = tl.maximum(top, score)
    return top, at, hope


@jit
def _sift_kernel(logits, frame, numbers, pivots, partial, counters, keys, listed, tops, chosen, vocab, stride,
                 pieces, PIECE: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr, UP: tl.constexpr,
                 GAPS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_previous(PDL)
    kind = tl.load(numbers + row * 4)
    if kind == 0:
        return
    low, high, _, _, near, over = _bracket(frame, numbers, pivots, partial, row, pieces, kind, UP)
    best, temperature = tl.load(frame + row * 4), tl.load(frame + row * 4 + 1)
    beyond = tl.load(frame + row * 4 + 3).to(tl.int32, bitcast=True) + 1
    if GAPS:
        low, high, beyond = near, over, tl.load(pivots + row * 17 + 16)
    first = tl.load(numbers + row * 4 + 2).to(tl.uint32, bitcast=True)
    second = tl.load(numbers + row * 4 + 3).to(tl.uint32, bitcast=True)
    scale, hope = -1.4426950408889634 / temperature, temperature * 0.0 + SURE
    top = tl.full([TILE], float("-inf"), tl.float32)
    at = tl.full([TILE], 2147483647, tl.int32)
    for start in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, vocab), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < vocab
        if GAPS:
            x = gap_of(logits + row * stride, token, inside, best)
        else:
            x = far_of(logits + row * stride, token, inside, best, temperature)
        bits = x.to(tl.int32, bitcast=True)
        kept = inside & (bits < low) & (bits < beyond)
        if tl.max(kept.to(tl.int32), 0) > 0:  # most tiles of a trained model's line keep nothing
            top, at, hope = _scored(x, kept, token, first, second, top, at, hope, scale, temperature, GAPS)
        wanted = (inside & (bits >= low) & (bits < high)).to(tl.int32)
        count = tl.sum(wanted, 0)
        if count > 0:
            place = tl.atomic_add(counters + row, count, sem="relaxed") + tl.cumsum(wanted, 0) - 1
            fits = (wanted > 0) & (place < ROOM)
            far = tl.div_rn(x, temperature) if GAPS else x
            tl.store(keys + row * ROOM + place, far.to(tl.int32, bitcast=True), mask=fits)
            tl.store(listed + row * ROOM + place, token, mask=fits)
    winner = tl.max(top, 0)
    tl.store(tops + row * pieces + piece, winner)
    tl.store(chosen + row * pieces + piece, tl.min(tl.where(top == winner, at, 2147483647), 0))


@jit
def _settle_kernel(logits, frame, numbers, pivots, partial, counters, keys, spares, listed, tops, chosen,
                   tokens, vocab, stride, pieces, ROOM: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    kind, k = tl.load(numbers + row * 4), tl.load(numbers + row * 4 + 1)
    if kind == 0:
        return
    low, high, below, target, _, _ = _bracket(frame, numbers, pivots, partial, row, pieces, kind, UP)
    best, temperature = tl.load(frame + row * 4), tl.load(frame + row * 4 + 1)
    p, line = tl.load(frame + row * 4 + 2), logits + row * stride
    farthest = tl.load(frame + row * 4 + 3).to(tl.int32, bitcast=True)
    first = tl.load(numbers + row * 4 + 2).to(tl.uint32, bitcast=True)
    second = tl.load(numbers + row * 4 + 3).to(tl.uint32, bitcast=True)
    piece = tl.arange(0, UP)
    score = tl.load(tops + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    token = tl.load(chosen + row * pieces + piece, mask=piece < pieces, other=2147483647)
    top = tl.max(score, 0)
    winner = tl.min(tl.where(score == top, token, 2147483647), 0)
    if kind >= 2:
        count = tl.load(counters + row)
        mine = keys + row * ROOM
        bests = tl.full([BLOCK], float("-inf"), tl.float32)
        at = tl.full([BLOCK], 2147483647, tl.int32)
        if count <= ROOM:
            most = bound_of_list(
                mine, spares + row * ROOM, count, low, high, below, target, k, p, kind, BLOCK
            )
            most = tl.minimum(most, farthest)
            for start in range(0, count, BLOCK):
                place = start + tl.arange(0, BLOCK)
                key = tl.load(mine + place, mask=place < count, other=0x7FFFFFFF)
                one = tl.load(listed + row * ROOM + place, mask=place < count, other=2147483647)
                noise = log_exponential(one, first, second)
                value = tl.where(key <= most, -key.to(tl.float32, bitcast=True) - noise, float("-inf"))
                # The list is in any order: of equal scores the first token, as argmax has it.
                better = (value > bests) | ((value == bests) & (one < at))
                at = tl.where(better, one, at)
                bests = tl.maximum(bests, value)
        else:
            most = tl.minimum(bound_of_line(line, vocab, best, temperature, k, p, kind, BLOCK), farthest)
            for start in range(0, vocab, BLOCK):
                one = start + tl.arange(0, BLOCK)
                far = far_of(line, one, one < vocab, best, temperature)
                key = far.to(tl.int32, bitcast=True)
                kept = (one < vocab) & (key >= low) & (key <= most)
                value = tl.where(kept, -far - log_exponential(one, first, second), float("-inf"))
                at = tl.where(value > bests, one, at)
                bests = tl.maximum(bests, value)
        late = tl.max(bests, 0)
        other = tl.min(tl.where(bests == late, at, 2147483647), 0)
        winner = tl.where(late > top, other, tl.where(late == top, tl.minimum(other, winner), winner))
    tl.store(tokens + row, tl.minimum(winner, vocab - 1).to(tl.int64))  # a line of NaN has no winner


def draw_triton(
    logits: Tensor,  # [S, vocab] of any float dtype
    rows: Tensor,  # [S] int32: lines of the parameters; negative: nobody's, which is as good as greedy
    parameters: Tensor,  # [any, 9] float64, as `runtime.bars` names them; temperature 0: greedy
    outputs: Tensor,  # [S] int64: output positions
    tuning: DrawTuning | GuessTuning | None = None,
) -> tuple[Tensor, Tensor]:
    """The drawn (or greedy) token of each line, [S] int64; and whether the line was of numbers, [S] bool."""
    lines, vocab = logits.shape
    for name, tensor, dtype, shape in (
        ("rows", rows, torch.int32, (lines,)),
        ("parameters", parameters, torch.float64, (parameters.shape[0], COLUMNS)),
        ("outputs", outputs, torch.int64, (lines,)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {shape} of {dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )
    early = mode().early
    t = tuning or (GuessTuning(pdl=early) if GUESS else DrawTuning(pdl=early, gaps=GAPS))
    if isinstance(t, GuessTuning):
        return draw_by_guess(logits, rows, parameters, outputs, t)

    def made(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(lines, *shape, dtype=kind, device=logits.device)

    tokens, sound = made(torch.int64), made(torch.bool)
    if not lines:
        return tokens, sound
    best, size = best_of_pieces(logits, t)
    pieces = up(vocab, size)
    frame, numbers, pivots = made(torch.float32, 4), made(torch.int32, 4), made(torch.int32, 17)
    counters, partial = made(torch.int32), made(torch.float32, pieces, 8)
    keys, spares, listed = (made(torch.int32, t.room) for _ in range(3))
    tops, chosen = made(torch.float32, pieces), made(torch.int32, pieces)
    of_line = vocab, logits.stride(0), pieces
    more = {"PDL": t.pdl, "num_warps": t.warps, **({"launch_pdl": True} if t.pdl else {})}
    ways, tile = power_of_two(pieces), min(t.tile, power_of_two(size))
    _pivot_kernel[(lines,)](
        logits, *best, rows, parameters, outputs, tokens, sound, frame, numbers, pivots, counters, *of_line,
        UP=ways, SAMPLE=t.sample, GAPS=t.gaps, **more,
    )  # fmt: skip
    _tally_kernel[(lines, pieces)](
        logits, frame, numbers, pivots, partial, *of_line, PIECE=size, BLOCK=t.block, GAPS=t.gaps, **more
    )
    _sift_kernel[(lines, pieces)](
        logits, frame, numbers, pivots, partial, counters, keys, listed, tops, chosen, *of_line, PIECE=size,
        TILE=tile, ROOM=t.room, UP=ways, GAPS=t.gaps, **more,
    )  # fmt: skip
    _settle_kernel[(lines,)](
        logits, frame, numbers, pivots, partial, counters, keys, spares, listed, tops, chosen, tokens,
        *of_line, ROOM=t.room, BLOCK=t.block, UP=ways, **more,
    )  # fmt: skip
    return tokens, sound
