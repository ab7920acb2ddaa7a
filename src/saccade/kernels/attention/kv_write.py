"""Put a step's keys and values where they live:  pages[slots[t]] = new[t]  for K and for V."""

import torch
from torch import Tensor

from saccade.kernels.attention.quantized_kv import Compact, check_compact, compact_write


def kv_write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, compact: Compact | None = None
) -> None:
    """Write k, v [T, kv_heads, head_dim] at flat slots [T] of one layer's pages.

    Pages are [blocks, block_size, kv_heads, head_dim], contiguous; slot = block * block_size + offset. On the
    CPU tokens of negative slots (padding) are left out.
    """
    if k.shape != v.shape or k.dim() != 3:
        raise ValueError(f"kv_write takes k and v as [T, heads, dim], not {tuple(k.shape)}, {tuple(v.shape)}")
    if k_pages.shape != v_pages.shape or k_pages.dim() != 4 or k_pages.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"kv_write of {tuple(k.shape)} into pages of {tuple(k_pages.shape)}, {tuple(v_pages.shape)}"
        )
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("kv_write needs contiguous pages: a slot is an offset into them")
    if slots.shape != k.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(f"kv_write of {k.shape[0]} tokens with slots {tuple(slots.shape)} of {slots.dtype}")
    if compact is not None:
        check_compact(compact, k_pages)
    kv_write_reference(k, v, k_pages, v_pages, slots, compact)


def kv_write_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, compact: Compact | None = None
) -> None:
    if slots.device.type == "cpu" and bool((slots < 0).any()):  # a question that would cost a GPU a wait
        real = slots >= 0
        k, v, slots = k[real], v[real], slots[real]
    if compact is not None:
        compact_write(k, v, compact, slots)
        if not compact.first:
            return
        slots = slots.clamp(max=compact.first * k_pages.shape[1])  # the others' go to the spare one
    k_pages.flatten(0, 1).index_copy_(0, slots, k.to(k_pages.dtype))
    v_pages.flatten(0, 1).index_copy_(0, slots, v.to(v_pages.dtype))
