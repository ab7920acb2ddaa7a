"""The noise of a draw on the device: the twin is `runtime.noise`, bit for bit up to the logarithm."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (kernel arguments are pointers and numbers of the device: no type of Python says which)

from saccade.kernels.jit import jit, tl


@jit
def mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit
def words_of(asked, spot):
    """The two words of a draw; asked: the line's parameters, spot: its output position."""
    spot = spot.to(tl.uint32) * 0x9E3779B9
    first = mixed(tl.load(asked + 7).to(tl.int64).to(tl.uint32) ^ spot)
    second = mixed(tl.load(asked + 8).to(tl.int64).to(tl.uint32) ^ spot)
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
