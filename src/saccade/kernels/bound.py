"""Where a line is cut: the greatest key with F(below it) < target, F a count or a mass of what is nearer.

A key is the bits of |x|, x = (logit - best) / temperature, which order it. A gap is |logit - best|: what is
true of keys below one key is true of gaps below one gap (its edge), as rounded division keeps the order; so
passes over a whole line compare gaps and divide nothing. The bound is searched by eighths:
a pass tallies F below eight keys at once and keeps the part between two of them. `draw` says what for.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (kernel arguments are pointers and numbers of the device: no type of Python says which)

from saccade.kernels.jit import jit, tl


@jit
def far_of(line, token, inside, best, temperature):
    """|x| of a tile of tokens, infinite outside; divided as torch divides."""
    logit = tl.load(line + token, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.abs(tl.div_rn(logit - best, temperature))


@jit
def gap_of(line, token, inside, best):
    """|logit - best| of a tile of tokens, infinite outside."""
    return tl.abs(tl.load(line + token, mask=inside, other=float("-inf")).to(tl.float32) - best)


@jit
def edge_of(key, temperature):
    """Bits of the least gap whose key is not below `key`: gaps below it are exactly those of keys below."""
    low, high = key * 0, key * 0 + 0x7F800001
    for _ in range(31):
        middle = low + (high - low) // 2
        far = tl.abs(tl.div_rn(middle.to(tl.float32, bitcast=True), temperature + key.to(tl.float32) * 0.0))
        short = far.to(tl.int32, bitcast=True) < key
        low = tl.where(short, middle + 1, low)
        high = tl.where(short, high, middle)
    return high


@jit
def tally_gaps(line, start, stop, best, temperature, edges, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """[8] float32: F of the values of tokens start .. stop below each edge. Masses by a product in place of
    the division: off by as little as their sum is."""
    scale = -1.4426950408889634 / temperature
    sums = tl.zeros([8, BLOCK], tl.float32)
    for first in range(start, stop, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < stop
        gap = gap_of(line, token, inside, best)
        weight = tl.where(inside, 1.0, 0.0)
        if MASS:
            weight = tl.exp2(gap * scale)  # outside: infinitely far
        below = gap.to(tl.int32, bitcast=True)[None, :] < edges[:, None]
        sums += tl.where(below, weight[None, :], 0.0)
    return tl.sum(sums, 1)


@jit
def narrowed(pivots, sums, low, high, below, target):
    """The part of low .. high between two pivots that holds the bound, and F below it."""
    short = sums < target
    higher = tl.max(tl.where(short, pivots, low), 0)
    lower = tl.min(tl.where(short, high, pivots), 0)
    under = tl.max(tl.where(short, sums, below), 0)
    return tl.maximum(low, higher), tl.minimum(high, lower), tl.maximum(below, under)


@jit
def eighths(low, high):
    step = (high - low + 7) // 8
    return tl.minimum(low + step * (1 + tl.arange(0, 8)), high)


@jit
def tally_line(line, start, stop, best, temperature, pivots, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """[8] float32: F of the values of tokens start .. stop below each pivot, none beyond `most`."""
    sums = tl.zeros([8, BLOCK], tl.float32)
    for first in range(start, stop, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < stop
        far = far_of(line, token, inside, best, temperature)
        key = far.to(tl.int32, bitcast=True)
        weight = tl.where(inside & (key <= most), 1.0, 0.0)
        if MASS:
            weight *= tl.exp(-far)
        sums += tl.where(key[None, :] < pivots[:, None], weight[None, :], 0.0)
    return tl.sum(sums, 1)


@jit
def tally_list(keys, count, pivots, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """[8] int64: F of the listed keys below each pivot, none beyond `most`; masses in units of 2 ** -40."""
    sums = tl.zeros([8, BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0x7F800000)
        weight = tl.where((place < count) & (key <= most), 1, 0).to(tl.int64)
        if MASS:
            weight *= (tl.exp(-key.to(tl.float32, bitcast=True)) * 1099511627776.0).to(tl.int64)
        sums += tl.where(key[None, :] < pivots[:, None], weight[None, :], 0)
    return tl.sum(sums, 1)


@jit
def search_list(keys, spare, count, low, high, below, target, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key with F(below it) < target, at most `most`; all keys in low .. high are listed."""
    base = below
    for _ in range(2):
        if high - low > 1:
            pivots = eighths(low, high)
            sums = base + tally_list(keys, count, pivots, most, MASS, BLOCK)
            low, high, below = narrowed(pivots, sums, low, high, below, target)
    # What is left, aside: a sixty-fourth, unless many are alike.
    left = count * 0
    tl.debug_barrier()  # nobody still reads what an earlier search left
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=0)
        wanted = ((place < count) & (key >= low) & (key < high)).to(tl.int32)
        tl.store(spare + left + tl.cumsum(wanted, 0) - 1, key, mask=wanted > 0)
        left += tl.sum(wanted, 0)
    tl.debug_barrier()  # other threads' keys are read next
    base = below
    while high - low > 1:
        pivots = eighths(low, high)
        sums = base + tally_list(spare, left, pivots, most, MASS, BLOCK)
        low, high, below = narrowed(pivots, sums, low, high, below, target)
    return tl.minimum(low, most)


@jit
def search_line(line, vocab, best, temperature, target, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The same over a whole line, by one program; target a share of the mass (MASS) or a count."""
    low, high = vocab * 0, vocab * 0 + 0x7F800001
    below = temperature * 0.0
    if MASS:
        everything = tl.zeros([8], tl.int32) + 0x7F800001
        sums = tally_line(line, vocab * 0, vocab, best, temperature, everything, most, True, BLOCK)
        target *= tl.max(sums, 0)
    while high - low > 1:
        pivots = eighths(low, high)
        sums = tally_line(line, vocab * 0, vocab, best, temperature, pivots, most, MASS, BLOCK)
        low, high, below = narrowed(pivots, sums, low, high, below, target)
    return tl.minimum(low, most)


@jit
def bound_of_list(keys, spare, count, low, high, below, target, k, p, kind, BLOCK: tl.constexpr):
    most = kind * 0 + 0x7F800000
    if kind == 3:
        zero = kind.to(tl.int64) * 0
        most = search_list(keys, spare, count, low, high, zero, k.to(tl.int64), most, False, BLOCK)
        if p < 1:
            everything = tl.zeros([8], tl.int32) + 0x7F800001
            total = tl.max(tally_list(keys, count, everything, most, True, BLOCK), 0)
            share = (p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            most = search_list(keys, spare, count, low, high, zero, share, most, True, BLOCK)
    else:
        base = (below * 1099511627776.0).to(tl.int64)
        share = (target * 1099511627776.0).to(tl.int64)
        most = search_list(keys, spare, count, low, high, base, share, most, True, BLOCK)
    return most


@jit
def bound_of_line(line, vocab, best, temperature, k, p, kind, BLOCK: tl.constexpr):
    most = kind * 0 + 0x7F800000
    if kind == 3:
        most = search_line(line, vocab, best, temperature, k.to(tl.float32), most, False, BLOCK)
    if p < 1:
        most = search_line(line, vocab, best, temperature, p, most, True, BLOCK)
    return most
