"""Device functions of `top_k_top_p`: the random numbers, and where a row of logits is cut by top-k and top-p.

A key is the bits of |x|, x = (logit - best) / temperature, which order it. The threshold of a row is the
greatest key with F(below it) < target, F a count (target k) or a probability mass (target top_p of it). A gap
is best - logit. Rounded division keeps the order, so keys below one key are gaps below one gap (its edge):
passes over the whole row compare gaps and divide nothing.

1. From a sample of the row, two keys that enclose the threshold almost surely. Of the tail (what is at f or
   farther) the sample sees T, a sum of exp(-f), with variance V of R * T, R the tokens per sampled one. The
   mass is exact, so the tail that top-p leaves is R * q, q known: low is below where T = q by SURELY
   deviations, high above, and beyond that by SURELY ** 2 sampled tokens that could have been there. The tail
   has none of the few heavy tokens that make a share of the mass hard to estimate.
2. The exact threshold among the listed tokens between them. An entry is 64 bits: those of the gap, then the
   token. F of a list is a count, or a mass in units of 2 ** -40: sums of integers do not depend on the order.
3. If the two keys do not enclose it, or the list overflows: the whole row by one program, by bisection. This
   is rare, so it is simple rather than fast.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from saccade.kernels.jit import constant, jit, tl

SURELY = constant(4.0)  # deviations: one row of thousands is searched in vain
NONE = constant(2147483647)  # no token
ENDLESS = constant(0x7F800000)  # the key of an infinite gap: never listed, never drawn
UNIT = constant(1099511627776.0)  # of a mass of 1

# -- random numbers: `sampling.rng` is the reference, equal bit for bit up to the logarithm


@jit
def mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit
def words_of(parameters, spot):
    """The two words of a draw; spot: the output position."""
    spot = spot.to(tl.uint32) * 0x9E3779B9
    first = mixed(tl.load(parameters + 7).to(tl.int64).to(tl.uint32) ^ spot)
    second = mixed(tl.load(parameters + 8).to(tl.int64).to(tl.uint32) ^ spot)
    return mixed(first ^ (second * 0x2C1B3C6D)), mixed(second ^ (first * 0x2C1B3C6D))


@jit
def hashed(token, first, second):
    """The 32 bits of a token id under two words."""
    bits = (mixed(token.to(tl.uint32) * 0x9E3779B9) ^ first) * 0x7FEB352D
    bits = ((bits ^ (bits >> 15)) + second) * 0x846CA68B
    bits = (bits ^ (bits >> 13)) * 0x2C1B3C6D
    return bits ^ (bits >> 16)


@jit
def log_exponential(token, first, second):
    """log(E), E = -log(1 - u) an exponential variable; u: those bits as a number between 0 and 1."""
    bits = hashed(token, first, second)
    u = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    u = tl.minimum(u, 1.0 - 2.0**-24)
    rest = 1.0 - u
    # -log(1 - u), exact also where 1 - u rounds: log(rest) * u / (1 - rest)
    lost = 1.0 - rest
    waiting = tl.where(lost > 0, -tl.log(rest) * (u / tl.where(lost > 0, lost, 1.0)), u)
    return tl.log(waiting)


# -- 1. two keys from a sample


@jit
def enclose_top_p(far, weight, left):
    """Two keys: what is left, of the mass of the sample, is beyond the first and not beyond the second."""
    square = weight * weight
    reached = tl.where(far < float("inf"), far, 0.0)
    # Beyond all that is sampled, and so far that what is not sampled either has no more than `left`.
    end = tl.maximum(tl.minimum(tl.max(reached, 0) * 1.00001, 88.0), -tl.log(left / (SURELY * SURELY)))
    low, above = end * 0.0, end
    under, high = end * 0.0, end
    for _ in range(12):
        near = (low + above) * 0.5
        tail = tl.sum(tl.where(far >= near, weight, 0.0), 0)
        spread = tl.sqrt(tl.sum(tl.where(far >= near, square, 0.0), 0))
        sure = tail - spread * SURELY >= left
        low = tl.where(sure, near, low)
        above = tl.where(sure, above, near)
        middle = (under + high) * 0.5
        tail = tl.sum(tl.where(far >= middle, weight, 0.0), 0)
        spread = tl.sqrt(tl.sum(tl.where(far >= middle, square, 0.0), 0))
        sure = tail + spread * SURELY + tl.exp(-middle) * (SURELY * SURELY) <= left
        high = tl.where(sure, middle, high)
        under = tl.where(sure, under, middle)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@jit
def enclose_top_k(far, rank):
    """A key that at least `rank` of the sampled are below."""
    reached = tl.where(far < float("inf"), far, 0.0)
    end = tl.max(reached, 0)
    under, high = end * 0.0, end * 0.0 + float("inf")
    above = end
    for _ in range(12):
        middle = (under + above) * 0.5
        count = tl.sum(tl.where(far < middle, 1.0, 0.0), 0)
        sure = count - tl.sqrt(count) * SURELY >= rank
        high = tl.where(sure, middle, high)
        above = tl.where(sure, middle, above)
        under = tl.where(sure, under, middle)
    return high.to(tl.int32, bitcast=True)


# -- 2. the threshold among listed tokens


@jit
def entries(listed, start, count, temperature, BLOCK: tl.constexpr):
    """Keys and tokens of a block of the list; beyond its end neither."""
    place = start + tl.arange(0, BLOCK)
    both = tl.load(listed + place, mask=place < count, other=0x7F8000007FFFFFFF)
    gap = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.div_rn(gap, temperature).to(tl.int32, bitcast=True), (both & 0x7FFFFFFF).to(tl.int32)


@jit
def _weight(key, MASS: tl.constexpr):
    """What a key counts for: one, or its mass."""
    if MASS:
        return (tl.exp(-key.to(tl.float32, bitcast=True)) * UNIT).to(tl.int64)
    else:
        return (key * 0 + 1).to(tl.int64)


@jit
def total_of_list(listed, count, temperature, low, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of all keys from low to most."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        key, _ = entries(listed, start, count, temperature, BLOCK)
        total += tl.where((key >= low) & (key <= most) & (key < ENDLESS), _weight(key, MASS), 0)
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
        weight = tl.where((key >= least) & (key <= most), _weight(key, MASS), 0)
        under_one += tl.where(key < one, weight, 0)
        under_two += tl.where(key < two, weight, 0)
        under_three += tl.where(key < three, weight, 0)
    by_one = base + tl.sum(under_one, 0) < target
    by_two = base + tl.sum(under_two, 0) < target
    by_three = base + tl.sum(under_three, 0) < target
    lower = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
    upper = tl.where(by_three, high, tl.where(by_two, three, tl.where(by_one, two, one)))
    return lower, upper


@jit
def threshold_of_list(listed, spare, count, temperature, low, high, base, target, most, MASS: tl.constexpr,
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
        tl.debug_barrier()  # an earlier search is no longer read
        under = tl.zeros([BLOCK], tl.int64)
        left = count * 0
        for start in range(0, count, BLOCK):
            key, _ = entries(listed, start, count, temperature, BLOCK)
            under += tl.where((key >= least) & (key < low) & (key <= most), _weight(key, MASS), 0)
            wanted = ((key >= low) & (key < high) & (key <= most)).to(tl.int32)
            tl.store(spare + left + tl.cumsum(wanted, 0) - 1, key, mask=wanted > 0)
            left += tl.sum(wanted, 0)
        base += tl.sum(under, 0)
        tl.debug_barrier()  # other threads' keys are read next
        place = tl.arange(0, BLOCK)
        key = tl.load(spare + place, mask=place < left, other=ENDLESS)
        weight = tl.where(place < left, _weight(key, MASS), 0)
        while high - low > 1:
            middle = low + (high - low) // 2
            short = base + tl.sum(tl.where(key < middle, weight, 0), 0) < target
            low = tl.where(short, middle, low)
            high = tl.where(short, high, middle)
    return tl.minimum(low, most)


# -- 3. the threshold of a whole row


@jit
def distance_of(line, token, inside, best, temperature):
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
def _total_below(line, vocab, best, temperature, limit, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """F of the keys below `limit` and up to `most`."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        far = distance_of(line, token, token < vocab, best, temperature)
        key = far.to(tl.int32, bitcast=True)
        weight = tl.where((token < vocab) & (key < limit) & (key <= most), 1.0, 0.0)
        if MASS:
            weight *= tl.exp(-far)
        total += weight
    return tl.sum(total, 0)


@jit
def _search(line, vocab, best, temperature, target, most, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key with F(below it) < target, at most `most`; target a share of the mass or a count."""
    low, high = vocab * 0, vocab * 0 + 0x7F800001
    if MASS:
        target *= _total_below(line, vocab, best, temperature, high, most, MASS, BLOCK)
    while high - low > 1:
        middle = low + (high - low) // 2
        short = _total_below(line, vocab, best, temperature, middle, most, MASS, BLOCK) < target
        low = tl.where(short, middle, low)
        high = tl.where(short, high, middle)
    return tl.minimum(low, most)


@jit
def threshold_of_row(line, vocab, best, temperature, k, p, kind, BLOCK: tl.constexpr):
    """By kinds as `draw` has them: of top-k (3), of top-p, or both."""
    most = kind * 0 + 0x7F800000
    if kind == 3:
        most = _search(line, vocab, best, temperature, k.to(tl.float32), most, False, BLOCK)
    if p < 1:
        most = _search(line, vocab, best, temperature, p, most, True, BLOCK)
    return most
