"""Where a line is cut, by the list of those of its tokens that stand near the cut: `draw` makes it.

An entry is 64 bits: those of the gap, then the token. F of a list is a count, or a mass in units of 2 ** -40:
whole numbers, whose sums are the same in any order. `bound` says what keys and gaps are.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (kernel arguments are pointers and numbers of the device: no type of Python says which)

from saccade.kernels.jit import constant, jit, tl

NONE = constant(2147483647)  # no token
ENDLESS = constant(0x7F800000)  # the key of what is infinitely far: never listed, never drawn
UNIT = constant(1099511627776.0)  # of a mass of 1


@jit
def entries(listed, start, count, temperature, BLOCK: tl.constexpr):
    """Keys and tokens of a block of the list; beyond its end neither."""
    place = start + tl.arange(0, BLOCK)
    both = tl.load(listed + place, mask=place < count, other=0x7F8000007FFFFFFF)
    gap = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.div_rn(gap, temperature).to(tl.int32, bitcast=True), (both & 0x7FFFFFFF).to(tl.int32)


@jit
def _heft(key, MASS: tl.constexpr):
    """What a key counts for: one, or its mass."""
    if MASS:
        return (tl.exp(-key.to(tl.float32, bitcast=True)) * UNIT).to(tl.int64)
    else:
        return (key * 0 + 1).to(tl.int64)


@jit
def heft_of_list(listed, count, temperature, low, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of all keys from low to most."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        key, _ = entries(listed, start, count, temperature, BLOCK)
        total += tl.where((key >= low) & (key <= most) & (key < ENDLESS), _heft(key, MASS), 0)
    return tl.sum(total, 0)


@jit
def _quartered(listed, count, temperature, low, high, least, most, base, target, MASS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """The quarter of low .. high that holds the bound, and how many keys it has."""
    step = (high - low + 3) // 4
    one, two, three = low + step, tl.minimum(low + step * 2, high), tl.minimum(low + step * 3, high)
    under_one = tl.zeros([BLOCK], tl.int64)
    under_two = tl.zeros([BLOCK], tl.int64)
    under_three = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        key, _ = entries(listed, start, count, temperature, BLOCK)
        heft = tl.where((key >= least) & (key <= most), _heft(key, MASS), 0)
        under_one += tl.where(key < one, heft, 0)
        under_two += tl.where(key < two, heft, 0)
        under_three += tl.where(key < three, heft, 0)
    by_one = base + tl.sum(under_one, 0) < target
    by_two = base + tl.sum(under_two, 0) < target
    by_three = base + tl.sum(under_three, 0) < target
    lower = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
    upper = tl.where(by_three, high, tl.where(by_two, three, tl.where(by_one, two, one)))
    return lower, upper


@jit
def bound_of_list(listed, spare, count, temperature, low, high, base, target, most, MASS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """The greatest key with F(below it) < target, at most `most`; F is `base` below low, and all keys from
    low to high are listed."""
    least, left = low, count
    while (left > BLOCK) & (high - low > 1):
        low, high = _quartered(listed, count, temperature, low, high, least, most, base, target, MASS, BLOCK)
        few = tl.zeros([BLOCK], tl.int32)
        for start in range(0, count, BLOCK):
            key, _ = entries(listed, start, count, temperature, BLOCK)
            few += ((key >= low) & (key < high)).to(tl.int32)
        left = tl.sum(few, 0)
    if high - low > 1:
        # No more than a block between them: aside, and into registers.
        tl.debug_barrier()  # nobody still reads what an earlier search left
        under = tl.zeros([BLOCK], tl.int64)
        left = count * 0
        for start in range(0, count, BLOCK):
            key, _ = entries(listed, start, count, temperature, BLOCK)
            under += tl.where((key >= least) & (key < low) & (key <= most), _heft(key, MASS), 0)
            wanted = ((key >= low) & (key < high) & (key <= most)).to(tl.int32)
            tl.store(spare + left + tl.cumsum(wanted, 0) - 1, key, mask=wanted > 0)
            left += tl.sum(wanted, 0)
        base += tl.sum(under, 0)
        tl.debug_barrier()  # other threads' keys are read next
        place = tl.arange(0, BLOCK)
        key = tl.load(spare + place, mask=place < left, other=ENDLESS)
        heft = tl.where(place < left, _heft(key, MASS), 0)
        while high - low > 1:
            middle = low + (high - low) // 2
            short = base + tl.sum(tl.where(key < middle, heft, 0), 0) < target
            low = tl.where(short, middle, low)
            high = tl.where(short, high, middle)
    return tl.minimum(low, most)
