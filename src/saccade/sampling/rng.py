"""Counter-based random numbers: a pure function of seed, output position and token id, alike on every
device."""

import torch
from torch import Tensor

# Odd multipliers of low-bias 32-bit mixers, as signed numbers (found by C. Wellons' search, public domain).
# int32 products wrap on every device; a test holds the bits against whole-number arithmetic.
_FIRST, _SECOND, _THIRD = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x2C1B3C6D
_WORD = (1 << 32) - 1
_STRIDE = 0x9E3779B9 - (1 << 32)  # 2 ** 32 / golden ratio: consecutive ids and positions start far apart


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical right shift of int32."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def mix(bits: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32) in which every input bit reaches every output bit."""
    bits = (bits ^ _shifted(bits, 16)).mul_(_FIRST)
    bits = bits.bitwise_xor_(_shifted(bits, 15)).mul_(_SECOND)
    return bits.bitwise_xor_(_shifted(bits, 16))


def spread(vocab: int, device: torch.device) -> Tensor:
    """[vocab] int32: the token ids, mixed once for all steps."""
    return mix(torch.arange(vocab, dtype=torch.int32, device=device).mul_(_STRIDE))


def key(seed: int) -> tuple[int, int]:
    """The two words, unsigned, that stand for a 64-bit seed; neighbouring seeds have unlike words."""
    low, high = seed & _WORD, seed >> 32 & _WORD
    return _mixed(low), _mixed(high + _THIRD & _WORD)


def _mixed(word: int) -> int:
    """`mix` of one unsigned word, on the host."""
    word = (word ^ word >> 16) * _FIRST & _WORD
    word = (word ^ word >> 15) * _SECOND & _WORD
    return word ^ word >> 16


def words(keys: Tensor, positions: Tensor) -> Tensor:
    """[n, 2] int32: what distinguishes the n draws; from keys [n, 2] (of `key`) and output positions [n]."""
    lanes = mix(keys.to(torch.int32) ^ (positions.to(torch.int32) * _STRIDE).unsqueeze(1))
    return mix(lanes ^ lanes.flip(1) * _THIRD)  # each word hears of both halves of the seed


def random_bits(spread: Tensor, words: Tensor) -> Tensor:
    """[n, vocab] int32: a hash of a draw's words [n, 2] and the token id."""
    first, second = words[:, :1], words[:, 1:]
    bits = (spread ^ first).mul_(_FIRST)
    bits.bitwise_xor_(_shifted(bits, 15)).add_(second).mul_(_SECOND)
    bits.bitwise_xor_(_shifted(bits, 13)).mul_(_THIRD)
    return bits.bitwise_xor_(_shifted(bits, 16))


def log_exponential(bits: Tensor) -> Tensor:
    """float32 log(E), E exponential(1): Gumbel noise, negated. `bits` is used up.

    u in (0, 1) from 31 bits, exact where it is small: that end makes the winners. The other end is kept from
    rounding to 1.
    """
    u = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_()
