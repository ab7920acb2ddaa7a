"""Where a line is cut: the greatest key with F(below it) < target, F a count (target k) or a mass (target
top_p of it) of what is nearer.

A key is the bits of |x|, x = (logit - best) / temperature, which order it. A gap is best - logit: what is
true of keys below one key is true of gaps below one gap (its edge), as rounded division keeps the order; so
`draw` compares gaps where it goes over all of a line, and divides nothing there.

Here a whole line is searched by one program: what is left to do where a guess was wrong or a list too long
(`bound_listed` does the others). A pass tallies F below three keys and keeps the quarter that holds the
bound, from its least key to its greatest: of many tokens alike no bits are searched that none of them has.
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
def _tallied(line, vocab, best, temperature, low, high, one, two, three, most, MASS: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """F below three keys and of all to `most`; the least and the greatest key from low to high."""
    under_one = tl.zeros([BLOCK], tl.float32)
    under_two = tl.zeros([BLOCK], tl.float32)
    under_three = tl.zeros([BLOCK], tl.float32)
    every = tl.zeros([BLOCK], tl.float32)
    first = tl.full([BLOCK], 0x7F800001, tl.int32)
    last = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        far = far_of(line, token, inside, best, temperature)
        key = far.to(tl.int32, bitcast=True)
        weight = tl.where(inside & (key <= most), 1.0, 0.0)
        if MASS:
            weight *= tl.exp(-far)
        under_one += tl.where(key < one, weight, 0.0)
        under_two += tl.where(key < two, weight, 0.0)
        under_three += tl.where(key < three, weight, 0.0)
        every += weight
        between = inside & (key >= low) & (key < high)
        first = tl.minimum(first, tl.where(between, key, 0x7F800001))
        last = tl.maximum(last, tl.where(between, key, -1))
    return (
        tl.sum(under_one, 0),
        tl.sum(under_two, 0),
        tl.sum(under_three, 0),
        tl.sum(every, 0),
        tl.min(first, 0),
        tl.max(last, 0),
    )


@jit
def _search(line, vocab, best, temperature, target, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key with F(below it) < target, at most `most`; target a share of the mass or a count."""
    low, high = vocab * 0, vocab * 0 + 0x7F800001
    _, _, _, every, first, last = _tallied(
        line, vocab, best, temperature, low, high, low, low, low, most, MASS, BLOCK
    )
    if MASS:
        target *= every
    low, high = tl.maximum(low, first), tl.minimum(high, last + 1)
    while high - low > 1:
        step = (high - low + 3) // 4
        one, two, three = low + step, tl.minimum(low + step * 2, high), tl.minimum(low + step * 3, high)
        by_one, by_two, by_three, _, first, last = _tallied(
            line, vocab, best, temperature, low, high, one, two, three, most, MASS, BLOCK
        )
        lower = tl.where(by_one < target, one, low)
        lower = tl.where(by_two < target, two, lower)
        lower = tl.where(by_three < target, three, lower)
        upper = tl.where(by_three < target, high, three)
        upper = tl.where(by_two < target, upper, two)
        upper = tl.where(by_one < target, upper, one)
        # Nothing is below the least key or above the greatest: F is the same there.
        low, high = tl.maximum(lower, first), tl.minimum(upper, tl.maximum(last, lower) + 1)
        high = tl.maximum(high, low + 1)
    return tl.minimum(low, most)


@jit
def bound_of_line(line, vocab, best, temperature, k, p, kind, BLOCK: tl.constexpr):
    """By kinds as `draw` has them: of top-k (3), of top-p, or both."""
    most = kind * 0 + 0x7F800000
    if kind == 3:
        most = _search(line, vocab, best, temperature, k.to(tl.float32), most, False, BLOCK)
    if p < 1:
        most = _search(line, vocab, best, temperature, p, most, True, BLOCK)
    return most
