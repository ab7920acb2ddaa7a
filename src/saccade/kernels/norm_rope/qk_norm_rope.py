"""Between the qkv projection and attention, in one pass: q/k norm, rotary embedding, KV cache write.

    for a head x of q or k:   n = w * cast(x / sqrt(mean(x^2) + eps))        (omitted if there is no norm)
                              y = n * C + swap(n) * S                        (swap exchanges the halves)
    q's y is returned; k's y and v are written to slot slots[t] of the pages.

C and S come from `rope.rotary_angles`. Each step rounds where the reference does: to x's dtype after the norm
and after the weight, to the wider of x and C after each product. Split-K partial sums of the projection are
added here in their order and rounded to the dtype first: the same bits, one launch less.

Bytes: 2 * (heads + 2 * kv_heads) * dim * itemsize per token, 24 KiB on Qwen3-VL-8B; 8,192 tokens move 201 MB,
47 us at the copy ceiling. The reference takes nine launches and moves five times as much.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.attention.quantized_kv import (
    Compact,
    check_compact,
    compact_write,
    pointers,
    quantize_halves,
)
from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.gemm.split_k import SplitKPartials
from saccade.kernels.jit import jit, jit_unspecialized, pdl_options, power_of_two, tl, up, wait_for_previous
from saccade.kernels.norm_rope.elementwise import rms_norm_reference
from saccade.kernels.norm_rope.rope import apply_rotary_reference, rotated


class HeadNorm(NamedTuple):
    """The weights of q's and k's norm, [dim] each."""

    q: Tensor
    k: Tensor
    eps: float


class QkNormRopeTuning(NamedTuple):
    heads: int = 8  # heads of one program: more for large steps, fewer to spread a single token
    warps: int = 4
    pdl: bool = False


@jit
def _store_small(low, high, slot, head, place, k_small, v_small, k_scale, v_scale, is_k, is_v,
                 HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
                 WHOLE: tl.constexpr):  # fmt: skip
    """The key and value heads among the tile's to the slot of a compact block."""
    HALF: tl.constexpr = DIM // 2
    low, high, scales = quantize_halves(low, high, k_small.dtype.element_ty, WHOLE)
    k_to = k_small + (slot * KV_HEADS - HEADS) * DIM + place
    v_to = v_small + (slot * KV_HEADS - HEADS - KV_HEADS) * DIM + place
    tl.store(k_to, low, mask=is_k)
    tl.store(k_to + HALF, high, mask=is_k)
    tl.store(v_to, low, mask=is_v)
    tl.store(v_to + HALF, high, mask=is_v)
    at = (slot // BLOCK * KV_HEADS + head - HEADS) * BLOCK + slot % BLOCK
    tl.store(k_scale + at, scales, mask=(head >= HEADS) & (head < HEADS + KV_HEADS))
    tl.store(v_scale + at - KV_HEADS * BLOCK, scales,
             mask=(head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))  # fmt: skip


@jit
def _projected(qkv, bias, at, place, step, real, kind: tl.constexpr, SPLITS: tl.constexpr,
               BIAS: tl.constexpr):  # fmt: skip
    """A tile of the projection at `at` and on; of parts: their sum, each `step` further on than the last."""
    if SPLITS:
        total = tl.zeros(place.shape, tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(qkv + at + split * step + place, mask=real, other=0.0)
        if BIAS:
            total += tl.load(bias + place, mask=real, other=0.0).to(tl.float32)
        tile = total.to(kind)
    else:
        tile = tl.load(qkv + at + place, mask=real, other=0.0)
    return tile


@jit_unspecialized("slots", "border", "step")
def _finish_kernel(qkv, bias, q_weight, k_weight, cos, sin, slots, q, k_pages, v_pages, k_small, v_small,
                   k_scale, v_scale, border, eps, qkv_stride, step, SPLITS: tl.constexpr, BIAS: tl.constexpr,
                   HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_UP: tl.constexpr,
                   LINES: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
                   WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """LINES heads of one token, as two tiles: the lower and the upper half of each head."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    head = tl.program_id(1) * LINES + tl.arange(0, LINES)
    d = tl.arange(0, HALF_UP)
    real = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < HALF)[None, :]
    place = head[:, None] * DIM + d[None, :]
    wait_for_previous(PDL)
    kind = q.dtype.element_ty
    low = _projected(qkv, bias, token * qkv_stride, place, step, real, kind, SPLITS, BIAS)
    high = _projected(qkv, bias, token * qkv_stride, place + HALF, step, real, kind, SPLITS, BIAS)
    first, second = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        is_q = (head < HEADS)[:, None]
        for_k = real & (head >= HEADS)[:, None]
        at = d[None, :] + head[:, None] * 0
        w_low = tl.load(q_weight + at, mask=real & is_q, other=0.0) + tl.load(
            k_weight + at, mask=for_k, other=0.0
        )
        w_high = tl.load(q_weight + at + HALF, mask=real & is_q, other=0.0) + tl.load(
            k_weight + at + HALF, mask=for_k, other=0.0
        )
        first = ((first * factor).to(kind).to(tl.float32) * w_low.to(tl.float32)).to(kind)
        second = ((second * factor).to(kind).to(tl.float32) * w_high.to(tl.float32)).to(kind)
    y_low, y_high = rotated(first, second, cos + token * DIM, sin + token * DIM, d, kind, DIM)

    is_k = real & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_v = real & (head >= HEADS + KV_HEADS)[:, None]
    own = real & (head < HEADS)[:, None]
    tl.store(q + token * (HEADS * DIM) + place, y_low, mask=own)
    tl.store(q + token * (HEADS * DIM) + place + HALF, y_high, mask=own)
    slot = tl.load(slots + token)
    if KIND:
        theirs = slot - border * BLOCK
        if theirs >= 0:
            is_value = (head >= HEADS + KV_HEADS)[:, None]
            _store_small(tl.where(is_value, low, y_low), tl.where(is_value, high, y_high), theirs, head,
                         place, k_small, v_small, k_scale, v_scale, is_k, is_v, HEADS, KV_HEADS, DIM, BLOCK,
                         WHOLE)  # fmt: skip
            slot = slot * 0 - 1
    if slot >= 0 and KIND != 2:
        k_at = k_pages + (slot * KV_HEADS - HEADS) * DIM + place
        v_at = v_pages + (slot * KV_HEADS - HEADS - KV_HEADS) * DIM + place
        tl.store(k_at, y_low, mask=is_k)
        tl.store(k_at + HALF, y_high, mask=is_k)
        tl.store(v_at, low, mask=is_v)
        tl.store(v_at + HALF, high, mask=is_v)


def qk_norm_rope(
    qkv: Tensor | SplitKPartials,  # [T, (heads + 2 * kv_heads) * dim]
    heads: int,
    norm: HeadNorm | None,
    cos: Tensor,  # [T, dim]
    sin: Tensor,
    slots: Tensor,  # [T] int64
    k_pages: Tensor,  # [blocks, block_size, kv_heads, dim]
    v_pages: Tensor,
    compact: Compact | None = None,
    mode: KernelMode = DEFAULT_MODE,
) -> Tensor:
    """Queries [T, heads, dim], normalised and rotated; keys and values are in their pages."""
    if k_pages.dim() != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(f"pages are alike, of four axes; not {tuple(k_pages.shape)}, {tuple(v_pages.shape)}")
    kv_heads, dim = k_pages.shape[2:]
    tokens, width = qkv.shape[0], (heads + 2 * kv_heads) * dim
    if len(qkv.shape) != 2 or qkv.shape[1] != width or _lines(qkv).stride(-1) != 1:
        raise ValueError(f"{heads} + 2 * {kv_heads} heads of {dim} need [T, {width}], not {tuple(qkv.shape)}")
    if dim % 2 or cos.shape != (tokens, dim) or sin.shape != cos.shape or cos.dtype != sin.dtype:
        raise ValueError(f"{tokens} tokens, heads of {dim}: angles {tuple(cos.shape)}, {tuple(sin.shape)}")
    if slots.shape != (tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"{tokens} tokens with slots {tuple(slots.shape)} of {slots.dtype}")
    if not qkv.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"{qkv.dtype} into pages of {k_pages.dtype} and {v_pages.dtype}")
    for tensor in (k_pages, v_pages, cos, sin, slots):
        if not tensor.is_contiguous():
            raise ValueError("pages, angles and slots must be contiguous: offsets are counted into them")
    if norm is not None and not (norm.q.shape == norm.k.shape == (dim,) and norm.q.dtype == qkv.dtype):
        raise ValueError(f"heads of {dim} in {qkv.dtype} need norm weights of the same, not {norm.q.shape}")
    if compact is not None:
        check_compact(compact, k_pages)
    if use_triton("qk_norm_rope", k_pages, mode):
        return qk_norm_rope_triton(
            qkv, heads, norm, cos, sin, slots, k_pages, v_pages, QkNormRopeTuning(pdl=mode.pdl), compact
        )
    whole = qkv.reduce() if isinstance(qkv, SplitKPartials) else qkv
    return qk_norm_rope_reference(whole, heads, norm, cos, sin, slots, k_pages, v_pages, compact)


def _lines(qkv: Tensor | SplitKPartials) -> Tensor:
    return qkv.sums if isinstance(qkv, SplitKPartials) else qkv


def qk_norm_rope_triton(
    qkv: Tensor | SplitKPartials,
    heads: int,
    norm: HeadNorm | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tuning: QkNormRopeTuning | None = None,
    compact: Compact | None = None,
) -> Tensor:
    """As `qk_norm_rope`; a negative slot (padding) writes nothing."""
    kv_heads, dim = k_pages.shape[2:]
    q = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=k_pages.device)
    tuning = tuning or QkNormRopeTuning()
    lines = power_of_two(min(tuning.heads, heads + 2 * kv_heads))
    small, values = pointers(compact, k_pages), _lines(qkv)
    parts = qkv if isinstance(qkv, SplitKPartials) else None
    bias = None if parts is None else parts.bias
    if qkv.shape[0]:
        _finish_kernel[(qkv.shape[0], up(heads + 2 * kv_heads, lines))](
            values, q if bias is None else bias, norm.q if norm else q, norm.k if norm else q, cos, sin,
            slots, q, k_pages, v_pages, *small[:5], norm.eps if norm else 0.0, values.stride(-2),
            values.stride(0), SPLITS=0 if parts is None else values.shape[0], BIAS=bias is not None,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
            HALF_UP=power_of_two(dim // 2), LINES=lines, NORM=norm is not None, BLOCK=k_pages.shape[1],
            KIND=small.kind, WHOLE=small.k.dtype == torch.int8, num_warps=tuning.warps,
            **pdl_options(tuning.pdl),
        )  # fmt: skip
    return q


def qk_norm_rope_reference(
    qkv: Tensor,
    heads: int,
    norm: HeadNorm | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    compact: Compact | None = None,
) -> Tensor:
    kv_heads, dim = k_pages.shape[2:]
    split = qkv.view(-1, heads + 2 * kv_heads, dim)
    qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    if norm is not None:  # one pass over q and k: each head scaled by its kind's weight
        weights = torch.cat((norm.q.expand(heads, -1), norm.k.expand(kv_heads, -1)))
        qk = rms_norm_reference(qk, weights, norm.eps)
    qk = apply_rotary_reference(qk, cos, sin)
    kv_write_reference(qk[:, heads:], v, k_pages, v_pages, slots, compact)
    return qk[:, :heads]


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
