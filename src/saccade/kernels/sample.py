"""From logits to tokens without sorting: the greedy choice, and a draw under top-k, top-p and min-p.

`argmax`'s twin is torch's. `draw_triton`'s twin is `runtime.sampler` (scale_and_bar, then noise, then
argmax):

    x = (logit - best) / temperature                                   at most 0
    kept: x >= the k-th best x; x >= the least x of the smallest set of best tokens whose share of the mass of
          what top-k keeps reaches top_p; x >= log(min_p). Ties stay in.
    token = argmax over the kept of  x - log(E),   E = -log(1 - u),  u a hash of (words, token id)

Both bounds have one form: the least v with F(x > v) < target, F a count (target k) or a mass (target top_p
* total). x is never positive, so the bits of |x| order it, and the bound is searched on them: a pass over
the line tallies F below eight pivots at once and keeps the eighth of the interval that holds the bound. The
first pass cuts at powers of two, the second into eighths of one; what is then left inside (a fifth of the
vocabulary for flat logits, a few tokens for a trained model) is copied aside, and the other passes look at
that alone. Sums are in a fixed order and a line belongs to one program: neighbours change nothing.

Bytes: five passes over vocab * itemsize (two without top-k and top-p). 256 lines of 151,936 float32: 156 MB
a pass, 33 us at 4.69 TB/s; tallying takes 24 operations a value and pass, about as long. Prediction 170-250
us at 256 lines, 60-90 us for one (a single multiprocessor works on it); half the bytes with 16-bit logits.
Greedy: one pass, 35 us at 256.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (kernel arguments are pointers and numbers of the device: no type of Python says which)

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.choice import mode, runs_triton
from saccade.kernels.jit import jit, power_of_two, tl, up, wait_for_previous


class ArgmaxTuning(NamedTuple):
    block: int | None = None  # None: 2,048 for few lines, 8,192 for many
    warps: int = 8
    pdl: bool = False


class DrawTuning(NamedTuple):
    block: int = 1024  # values tallied at once, against eight pivots
    tile: int = 4096  # values at once in the other passes
    room: int = 32768  # values kept aside
    warps: int = 16


MANY = DrawTuning(
    512, 2048, 32768, 8
)  # two programs on a multiprocessor, for more lines than there are of those
FEW_LINES = 132


# -- greedy


@jit
def _best_kernel(logits, values, places, vocab, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(value, 0)
    at = row * tl.num_programs(1) + piece
    tl.store(values + at, best)
    tl.store(places + at, tl.min(tl.where(value == best, token, 2147483647), 0))


@jit
def _best_of_kernel(values, places, tokens, pieces, vocab, PIECES_UP: tl.constexpr, PDL: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES_UP)
    wait_for_previous(PDL)
    value = tl.load(values + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    place = tl.load(places + row * pieces + piece, mask=piece < pieces, other=2147483647)
    chosen = tl.min(tl.where(value == tl.max(value, 0), place, 2147483647), 0)
    tl.store(tokens + row, tl.minimum(chosen, vocab - 1).to(tl.int64))  # a line of NaN has no best


def argmax(logits: Tensor) -> Tensor:
    """[S, vocab] to [S] int64: the best token of each line, the first of equals."""
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits are [rows, vocab], not {tuple(logits.shape)}")
    return argmax_triton(logits) if runs_triton("argmax", logits) else logits.argmax(dim=-1)


def argmax_triton(logits: Tensor, tuning: ArgmaxTuning | None = None) -> Tensor:
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"each line of logits must be dense, not of strides {logits.stride()}")
    tuning = tuning or ArgmaxTuning(pdl=mode().early)
    block = tuning.block or (2048 if rows <= 16 else 8192)
    pieces = up(vocab, block)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    pdl = {"launch_pdl": True} if tuning.pdl else {}
    if rows:
        _best_kernel[(rows, pieces)](
            logits, values, places, vocab, logits.stride(0), BLOCK=block, PDL=tuning.pdl,
            num_warps=tuning.warps, **pdl,
        )  # fmt: skip
        _best_of_kernel[(rows,)](
            values,
            places,
            tokens,
            pieces,
            vocab,
            PIECES_UP=power_of_two(pieces),
            PDL=tuning.pdl,
            num_warps=1,
            **pdl,
        )
    return tokens


# -- drawing


@jit
def _distance(line, token, vocab, best, temperature):
    """|x| of a tile of tokens, infinite past the end; divided as torch divides."""
    logit = tl.load(line + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.abs(tl.div_rn(logit - best, temperature))


@jit
def _tally(line, aside, count, best, temperature, pivots, most, RAW: tl.constexpr, MASS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """[8] float32: F of the values below each pivot, none beyond `most`; from the line or what is aside."""
    sums = tl.zeros([8, BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        if RAW:
            far = _distance(line, token, count, best, temperature)
            key = far.to(tl.int32, bitcast=True)
        else:
            key = tl.load(aside + token, mask=token < count, other=0x7F800000)
            far = key.to(tl.float32, bitcast=True)
        weight = tl.where((token < count) & (key <= most), 1.0, 0.0)
        if MASS:
            weight *= tl.exp(-far)
        sums += tl.where(key[None, :] < pivots[:, None], weight[None, :], 0.0)
    return tl.sum(sums, 1)


@jit
def _narrow(pivots, sums, low, high, below, target):
    """The part of low .. high between two pivots that holds the bound, and F below it."""
    short = sums < target
    higher = tl.max(tl.where(short, pivots, low), 0)
    lower = tl.min(tl.where(short, high, pivots), 0)
    return (
        tl.maximum(low, higher),
        tl.minimum(high, lower),
        tl.maximum(below, tl.max(tl.where(short, sums, below), 0)),
    )


@jit
def _eighths(low, high):
    step = (high - low + 7) // 8
    return tl.minimum(low + step * (1 + tl.arange(0, 8)), high)


@jit
def _set_aside(
    line, aside, vocab, best, temperature, low, high, most, ROOM: tl.constexpr, TILE: tl.constexpr
):
    """Copy the keys in low .. high; gives how many there are, of which at most ROOM are kept."""
    count = vocab * 0
    tl.debug_barrier()  # nobody still reads what an earlier attempt left
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        key = _distance(line, token, vocab, best, temperature).to(tl.int32, bitcast=True)
        wanted = ((token < vocab) & (key >= low) & (key < high) & (key <= most)).to(tl.int32)
        place = count + tl.cumsum(wanted, 0) - 1
        tl.store(aside + place, key, mask=(wanted > 0) & (place < ROOM))
        count += tl.sum(wanted, 0)
    tl.debug_barrier()  # other threads' keys are read next
    return count


@jit
def _search(line, aside, vocab, best, temperature, target, most, MASS: tl.constexpr, ROOM: tl.constexpr,
            BLOCK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The greatest key with F(below it) < target * total (MASS) or < target; at most `most`."""
    # 1/4 .. 16 by doubling, then everything: exponents 125 .. 131 of a float
    eighth = tl.arange(0, 8)
    pivots = tl.where(eighth < 7, (125 + eighth) << 23, 0x7F800001)
    sums = _tally(line, aside, vocab, best, temperature, pivots, most, True, MASS, BLOCK)
    if MASS:
        target *= tl.max(sums, 0)
    low, high, below = _narrow(pivots, sums, vocab * 0, vocab * 0 + 0x7F800001, best * 0.0, target)
    count = vocab * 0 + ROOM + 1
    while (count > ROOM) & (high - low > 1):
        pivots = _eighths(low, high)
        sums = _tally(line, aside, vocab, best, temperature, pivots, most, True, MASS, BLOCK)
        low, high, below = _narrow(pivots, sums, low, high, below, target)
        count = _set_aside(line, aside, vocab, best, temperature, low, high, most, ROOM, TILE)
    base = below
    while high - low > 1:
        pivots = _eighths(low, high)
        sums = base + _tally(line, aside, count, best, temperature, pivots, most, False, MASS, BLOCK)
        low, high, below = _narrow(pivots, sums, low, high, below, target)
    return tl.minimum(low, most)


@jit
def _mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit
def _log_exponential(token, first, second):
    """`runtime.noise`: the hash of a token id under two words, as log of an exponential variable."""
    bits = (_mixed(token.to(tl.uint32) * 0x9E3779B9) ^ first) * 0x7FEB352D
    bits = ((bits ^ (bits >> 15)) + second) * 0x846CA68B
    bits = (bits ^ (bits >> 13)) * 0x2C1B3C6D
    bits = bits ^ (bits >> 16)
    u = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    u = tl.minimum(u, 1.0 - 2.0**-24)
    rest = 1.0 - u
    # -log(1 - u), exact also where 1 - u rounds: log(rest) * u / (1 - rest)
    lost = 1.0 - rest
    waiting = tl.where(lost > 0, -tl.log(rest) * (u / tl.where(lost > 0, lost, 1.0)), u)
    return tl.log(waiting)


@jit
def _draw_kernel(logits, index, temperatures, ks, ps, least, words, tokens, asides, vocab, stride,
                 ROOM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    row = tl.load(index + pid)
    line = logits + row * stride
    aside = asides + pid.to(tl.int64) * ROOM
    temperature, k, p = tl.load(temperatures + row), tl.load(ks + row), tl.load(ps + row)
    high = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        value = tl.load(line + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        high = tl.maximum(high, value)
    best = tl.max(high, 0)

    most = (-tl.load(least + row)).to(tl.int32, bitcast=True)
    if (k > 0) & (k < vocab):
        target = k.to(tl.float32)
        kth = _search(line, aside, vocab, best, temperature, target, 0x7F800000, False, ROOM, BLOCK, TILE)
        if p < 1:
            kth = _search(line, aside, vocab, best, temperature, p, kth, True, ROOM, BLOCK, TILE)
        most = tl.minimum(most, kth)
    elif p < 1:
        most = tl.minimum(
            most, _search(line, aside, vocab, best, temperature, p, 0x7F800000, True, ROOM, BLOCK, TILE)
        )

    first = tl.load(words + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(words + 2 * row + 1).to(tl.uint32, bitcast=True)
    top = tl.full([TILE], float("-inf"), tl.float32)
    chosen = tl.full([TILE], 2147483647, tl.int32)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        far = _distance(line, token, vocab, best, temperature)
        kept = (token < vocab) & (far.to(tl.int32, bitcast=True) <= most)
        if tl.max(kept.to(tl.int32), 0) > 0:  # most tiles of a trained model's line keep nothing
            score = tl.where(kept, -far - _log_exponential(token, first, second), float("-inf"))
            chosen = tl.where(score > top, token, chosen)
            top = tl.maximum(top, score)
    winner = tl.min(tl.where(top == tl.max(top, 0), chosen, 2147483647), 0)
    tl.store(tokens + row, tl.minimum(winner, vocab - 1).to(tl.int64))  # a line of NaN has no winner


def draw_triton(
    logits: Tensor,  # [S, vocab] of any float dtype
    index: Tensor,  # [n] int64: which lines draw
    temperature: Tensor,  # [S] float32, above 0
    top_k: Tensor,  # [S] int32; 0, or the vocabulary and more: off
    top_p: Tensor,  # [S] float32; 1 is off
    min_p: Tensor,  # [S] float32; 0 is off
    words: Tensor,  # [S, 2] int32 of `noise.words`
    tokens: Tensor,  # [S] int64; lines of `index` are written
    tuning: DrawTuning | None = None,
) -> None:
    rows, vocab = logits.shape
    for name, tensor, dtype, shape in (
        ("temperature", temperature, torch.float32, (rows,)),
        ("top_k", top_k, torch.int32, (rows,)),
        ("top_p", top_p, torch.float32, (rows,)),
        ("min_p", min_p, torch.float32, (rows,)),
        ("words", words, torch.int32, (rows, 2)),
        ("tokens", tokens, torch.int64, (rows,)),
        ("index", index, torch.int64, tuple(index.shape[:1])),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {shape} of {dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )
    if logits.stride(1) != 1 or not logits.is_floating_point():
        raise ValueError(f"logits are dense lines of floats, not {logits.dtype} of strides {logits.stride()}")
    tuning = tuning or (DrawTuning() if len(index) <= FEW_LINES else MANY)
    if len(index):
        asides = torch.empty(len(index), tuning.room, dtype=torch.int32, device=logits.device)
        _draw_kernel[(len(index),)](
            logits, index, temperature, top_k, top_p, min_p.log(), words, tokens, asides, vocab,
            logits.stride(0), ROOM=tuning.room, BLOCK=tuning.block, TILE=tuning.tile, num_warps=tuning.warps,
        )  # fmt: skip
