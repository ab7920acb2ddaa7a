"""Between which two keys a line is cut, as good as surely, by a sample of its tokens: `draw` proves it later.

How sure: of a line's tail (what is at f or farther) the sample sees T, a sum of exp(-f), with variance V of
R * T, R the tokens for each sampled one. The mass is exact, so the tail that top-p leaves is R * q, q known:
low is far below where T = q by SURELY deviations, high far above, and beyond that by SURELY ** 2 sampled
tokens that could have been there and were not. The tail has none of the few heavy tokens that make a share of
the mass hard to guess from a sample, so lines flat and peaked go the same way. `bound` says what keys are.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (kernel arguments are pointers and numbers of the device: no type of Python says which)

from saccade.kernels.jit import constant, jit, tl

SURELY = constant(4.0)  # deviations: one line of thousands is searched for nothing


@jit
def around_share(far, weight, left):
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
def beyond_rank(far, rank):
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
