"""KV blocks outside of attention: a block copied in every layer, and the reference of writing new tokens.

The layers of a large pool span more than 2^31 bytes, which torch copies in dozens of launches: for
Qwen3-VL-8B 0.33 ms of the host before every question about a known image. Here it is one launch of 4.7 MB.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import math

from torch import Tensor

from saccade.kernels.attention.quantized_kv import Compact, compact_write
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.jit import jit_unspecialized, power_of_two, tl, up

STEP = 4096  # values of one program, at most


@jit_unspecialized("source", "target", "blocks")
def _copy_kernel(k, v, source, target, blocks, SIZE: tl.constexpr, STEP: tl.constexpr):
    """A part of a block of one layer, of K or of V."""
    part, layer, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = part * STEP + tl.arange(0, STEP)
    inside = at < SIZE
    first = layer.to(tl.int64) * blocks
    read, write = (first + source) * SIZE + at, (first + target) * SIZE + at
    if which == 0:
        tl.store(k + write, tl.load(k + read, mask=inside), mask=inside)
    else:
        tl.store(v + write, tl.load(v + read, mask=inside), mask=inside)


def copy_block(k: Tensor, v: Tensor, source: int, target: int, mode: KernelMode = DEFAULT_MODE) -> None:
    """pages[l, target] = pages[l, source] for k and v [layers, blocks, ...], or other pairs (scales)."""
    if k.shape != v.shape or k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError(
            f"a block is copied in dense tensors that are alike, not {tuple(k.shape)} {k.dtype} of strides "
            f"{k.stride()} and {tuple(v.shape)} {v.dtype} of strides {v.stride()}"
        )
    if not (0 <= source < k.shape[1] and 0 <= target < k.shape[1]):
        raise ValueError(f"block {source} is to be copied to {target}; there are {k.shape[1]}")
    if use_triton("copy_block", k, mode):
        copy_block_triton(k, v, source, target)
    else:
        copy_block_reference(k, v, source, target)


def copy_block_triton(k: Tensor, v: Tensor, source: int, target: int) -> None:
    layers, blocks, *inner = k.shape
    size = math.prod(inner)
    step = min(power_of_two(size), STEP)
    grid = (up(size, step), layers, 2)
    _copy_kernel[grid](k, v, source, target, blocks, SIZE=size, STEP=step, num_warps=4)


def copy_block_reference(k: Tensor, v: Tensor, source: int, target: int) -> None:
    for one in (k, v):
        one[:, target].copy_(one[:, source])


def kv_write_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, compact: Compact | None = None
) -> None:
    """pages[slots[t]] = new[t] for k and v [T, kv_heads, dim]; slots [T] int64: block * block_size + offset.
    On the CPU negative slots (padding) write nothing."""
    if slots.device.type == "cpu" and bool((slots < 0).any()):  # a GPU would have to synchronise
        real = slots >= 0
        k, v, slots = k[real], v[real], slots[real]
    if compact is not None:
        compact_write(k, v, compact, slots)
        if not compact.first:
            return
        slots = slots.clamp(max=compact.first * k_pages.shape[1])  # quantised tokens go to the spare block
    k_pages.flatten(0, 1).index_copy_(0, slots, k.to(k_pages.dtype))
    v_pages.flatten(0, 1).index_copy_(0, slots, v.to(v_pages.dtype))
