"""Keys and values in 8 bits: what a compact block holds, and the references that write and read it.

A head's vector x of one token becomes int8 or float8_e4m3 values and one scale:

    s = max |x| / m,   c = round(x / s)   (m: 127 for int8, 448 for float8_e4m3fn);   read back:  c * s

Rounding is to nearest even. A vector of zeros has s = 0; a NaN or infinity in x makes s one too, so that it
is never hidden.

Blocks below `first` are in the model's dtype, the others compact. With both kinds, each kind's tensors have a
spare block behind their last: a write that belongs to the other kind goes there, without synchronisation.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.jit import jit, tl

FORMATS: dict[str, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


# Which kinds of blocks a launch reads, so that it does not pay for one that is absent.
PLAIN, BOTH, SMALL = 0, 1, 2
SCALE_BYTES = 4  # a head's scale of one token


class Compact(NamedTuple):
    """The compact blocks of one layer, or (one axis more, in front) of all layers."""

    k: Tensor  # [blocks, block_size, kv_heads, dim], int8 or float8_e4m3fn
    v: Tensor
    k_scale: Tensor  # [blocks, kv_heads, block_size] float32: the scales of a head's neighbours lie together
    v_scale: Tensor
    first: int  # the number of the first compact block; 0: all are

    def layer(self, index: int) -> "Compact":
        return Compact(self.k[index], self.v[index], self.k_scale[index], self.v_scale[index], self.first)


class Pointers(NamedTuple):
    """What the kernels take of compact blocks; anything in their place where there are none."""

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    first: int
    kind: int


def pointers(compact: Compact | None, instead: Tensor) -> Pointers:
    if compact is None:
        return Pointers(instead, instead, instead, instead, 0, PLAIN)
    return Pointers(*compact, kind=BOTH if compact.first else SMALL)


@jit
def load_kv_tile(plain, small, at, small_at, is_small, mask, KIND: tl.constexpr):
    """A tile of K or V before its scales, in the plain pages' dtype; masked loads move nothing."""
    if KIND == 0:
        return tl.load(plain + at, mask=mask, other=0.0)
    elif KIND == 2:
        return tl.load(small + small_at, mask=mask, other=0.0).to(plain.dtype.element_ty)
    else:
        own = tl.load(plain + at, mask=mask & (is_small == 0), other=0.0)
        theirs = tl.load(small + small_at, mask=mask & is_small, other=0.0)
        return tl.where(is_small, theirs.to(plain.dtype.element_ty), own)


@jit
def kv_offsets(block, place, border, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
           KIND: tl.constexpr):  # fmt: skip
    """Where the tokens at `place` of their sequence, in `block`, have their first kv head: in plain pages, in
    compact ones, its scale; and which tokens are compact."""
    block = block.to(tl.int64)
    within = place % BLOCK
    at = (block * BLOCK + within) * (KV_HEADS * DIM)
    if KIND == 0:
        return at, at, at, place < 0
    theirs = block - border
    return at, (theirs * BLOCK + within) * (KV_HEADS * DIM), theirs * (KV_HEADS * BLOCK) + within, theirs >= 0


@jit
def quantize_halves(first, second, FORM: tl.constexpr, WHOLE: tl.constexpr):
    """Heads as two tiles, their lower and upper halves, in 8 bits (WHOLE: integers); and their scales."""
    low, high = first.to(tl.float32), second.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    largest += tl.sum(low * 0.0, 1) + tl.sum(high * 0.0, 1)  # a value that is no number stays seen
    LARGEST: tl.constexpr = 127.0 if WHOLE else 448.0
    inverse = tl.div_rn(LARGEST + largest * 0.0, tl.where(largest == 0, 1.0, largest))[:, None]
    low, high = low * inverse, high * inverse
    if WHOLE:
        NEAREST: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves no place for a fraction
        low, high = (low + NEAREST) - NEAREST, (high + NEAREST) - NEAREST
    return low.to(FORM), high.to(FORM), tl.div_rn(largest, LARGEST + largest * 0.0)


def check_compact(compact: Compact, k_pages: Tensor) -> None:
    """Raise unless a layer's compact blocks go with its plain ones [blocks, block_size, kv_heads, dim]."""
    k, v = compact.k, compact.v
    if k.dtype not in LARGEST or v.dtype != k.dtype:
        raise ValueError(f"compact pages hold int8 or float8_e4m3fn, alike; not {k.dtype} and {v.dtype}")
    if k.dim() != 4 or k.shape != v.shape or k.shape[1:] != k_pages.shape[1:]:
        raise ValueError(
            f"compact pages {tuple(k.shape)}, {tuple(v.shape)} beside plain ones {tuple(k_pages.shape)}"
        )
    scales = (k.shape[0], k.shape[2], k.shape[1])
    for scale in (compact.k_scale, compact.v_scale):
        if scale.shape != scales or scale.dtype != torch.float32:
            raise ValueError(f"compact pages {tuple(k.shape)} with scales {tuple(scale.shape)} {scale.dtype}")
    if not all(tensor.is_contiguous() for tensor in compact[:4]):
        raise ValueError("compact pages must be contiguous: a slot is an offset into them")
    if compact.first and k_pages.shape[0] != compact.first + 1:
        raise ValueError(
            f"compact blocks begin at {compact.first}, so {compact.first + 1} plain ones are needed, "
            f"the spare one included; there are {k_pages.shape[0]}"
        )


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., dim] to c [..., dim] and s [...] float32."""
    x = x.float()
    largest = x.abs().amax(-1)
    scale = largest / LARGEST[dtype]
    inverse = LARGEST[dtype] / torch.where(largest == 0, 1.0, largest)
    value = x * inverse[..., None]
    return (value.round() if dtype == torch.int8 else value).to(dtype), scale


def dequantise(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (value.float() * scale[..., None]).to(dtype)


def compact_write(k: Tensor, v: Tensor, compact: Compact, slots: Tensor) -> None:
    """k, v [T, kv_heads, dim] at slots [T] of one layer; slots of plain blocks write to the spare block."""
    block_size = compact.k.shape[1]
    slots = slots - compact.first * block_size
    if compact.first:
        slots = torch.where(slots < 0, (compact.k.shape[0] - 1) * block_size, slots)
    blocks, places = slots // block_size, slots % block_size
    for x, pages, scales in ((k, compact.k, compact.k_scale), (v, compact.v, compact.v_scale)):
        value, scale = quantise(x, pages.dtype)
        # As bytes: not every device has an index_copy of 8-bit floats.
        pages.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, value.view(torch.uint8))
        scales.transpose(1, 2)[blocks, places] = scale


def read_slots(plain: Tensor, compact: Tensor, scales: Tensor, first: int, slots: Tensor) -> Tensor:
    """What a layer's K (or V) has at slots [n], in the plain pages' dtype: [n, kv_heads, dim]."""
    block_size = compact.shape[1]
    theirs = slots - first * block_size
    there = theirs.clamp(min=0) if first else theirs
    value = compact.view(torch.uint8).flatten(0, 1).index_select(0, there).view(compact.dtype)
    scale = scales.transpose(1, 2)[there // block_size, there % block_size]
    found = dequantise(value, scale, plain.dtype)
    if not first:
        return found
    own = plain.flatten(0, 1).index_select(0, slots.clamp(max=first * block_size))
    return torch.where((theirs >= 0)[:, None, None], found, own)
