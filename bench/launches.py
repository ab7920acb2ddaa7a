"""One launch of each kernel at the sizes of Qwen3-VL-8B: what the compile check compiles."""

from collections.abc import Callable
from typing import Any

import torch

from saccade.kernels.activation import gelu_triton, silu_mul_triton
from saccade.kernels.add_norm import add_norm_triton
from saccade.kernels.paged_decode import DecodeTuning, decode_attention_triton
from saccade.kernels.paged_prefill import PrefillTuning, prefill_attention_triton
from saccade.kernels.qkv_finish import HeadNorm, qkv_finish_triton
from saccade.kernels.rope import apply_rotary_triton, rotary_angles_triton
from saccade.kernels.sample import argmax_triton, draw_triton
from saccade.kernels.skinny import CANDIDATES, Norm, SkinnyTuning, skinny_triton

BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


def decode(device: torch.device, dtype: torch.dtype, dim: int, tuning: DecodeTuning) -> Any:
    pages = torch.zeros(4, BLOCK, KV_HEADS, dim, dtype=dtype, device=device)
    q = torch.zeros(2, HEADS, dim, dtype=dtype, device=device)
    tables = torch.zeros(2, 64, dtype=torch.int32, device=device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    return decode_attention_triton(q, pages, pages, tables, lengths, 0.1, None, 1024, tuning)


def _decode(
    dtype: torch.dtype, dim: int, tuning: DecodeTuning = DecodeTuning()
) -> Callable[[torch.device], Any]:
    return lambda device: decode(device, dtype, dim, tuning)


def _prefill(
    dtype: torch.dtype, dim: int, tuning: PrefillTuning = PrefillTuning()
) -> Callable[[torch.device], Any]:
    def launch(device: torch.device) -> None:
        pages = torch.zeros(4, BLOCK, KV_HEADS, dim, dtype=dtype, device=device)
        q = torch.zeros(2, HEADS, dim, dtype=dtype, device=device)
        tables = torch.zeros(2, 64, dtype=torch.int32, device=device)
        lengths = torch.ones(2, dtype=torch.int32, device=device)
        offsets = torch.arange(3, dtype=torch.int32, device=device)
        out = torch.empty_like(q)
        prefill_attention_triton(q, pages, pages, tables, lengths, offsets, 2, out, 0.1, None, tuning)

    return launch


def _finish(device: torch.device) -> None:
    pages = torch.zeros(4, BLOCK, KV_HEADS, DIM, dtype=BF16, device=device)
    qkv = torch.zeros(2, (HEADS + 2 * KV_HEADS) * DIM, dtype=BF16, device=device)
    weight = torch.zeros(DIM, dtype=BF16, device=device)
    angles = torch.zeros(2, DIM, dtype=BF16, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    qkv_finish_triton(qkv, HEADS, HeadNorm(weight, weight, 1e-6), angles, angles, slots, pages, pages)


def _points(device: torch.device) -> None:
    x = torch.zeros(2, 24576, dtype=BF16, device=device)
    silu_mul_triton(x)
    gelu_triton(x[:, :4304].contiguous(), None, "tanh")
    gelu_triton(x[:, :4304].contiguous(), x[0, :4304], "none")


def _norms(device: torch.device) -> None:
    x = torch.zeros(2, 4096, dtype=BF16, device=device)
    add_norm_triton(x, x, x[0], None, 1e-6, pdl=True)
    add_norm_triton(x[:, :1152].contiguous(), None, x[0, :1152], x[0, :1152], 1e-6)


def _rotary(device: torch.device) -> None:
    angles = torch.zeros(2, 72, device=device)
    apply_rotary_triton(torch.zeros(2, 32, 72, dtype=BF16, device=device), angles, angles)
    positions = torch.zeros(3, 2, dtype=torch.int64, device=device)
    rotary_angles_triton(positions, torch.zeros(64, device=device), torch.zeros(64, dtype=torch.int64), BF16)


def _skinny(
    rows: int, tuning: SkinnyTuning, gated: bool = False, normed: bool = False
) -> Callable[[torch.device], Any]:
    def launch(device: torch.device) -> None:
        x = torch.zeros(rows, 4096, dtype=BF16, device=device)
        weight = torch.zeros(8192 if gated else 4096, 4096, dtype=BF16, device=device)
        if normed:
            skinny_triton(x, weight, residual=x, norm=Norm(x[0], 1e-6), tuning=tuning)
        else:
            skinny_triton(x, weight, gated=gated, tuning=tuning)

    return launch


def _sample(device: torch.device) -> None:
    logits = torch.zeros(2, 151936, device=device)
    argmax_triton(logits)
    one, index = torch.ones(2, device=device), torch.arange(2, device=device)
    words = torch.zeros(2, 2, dtype=torch.int32, device=device)
    draw_triton(logits, index, one, one.int(), one, one, words, torch.zeros_like(index))


LAUNCHES: dict[str, Callable[[torch.device], Any]] = {
    "decode bf16 128": _decode(torch.bfloat16, 128),
    "decode bf16 128 tile 32": _decode(torch.bfloat16, 128, DecodeTuning(tile=32)),
    "decode bf16 128 pdl": _decode(torch.bfloat16, 128, DecodeTuning(pdl=True)),
    "decode bf16 72": _decode(torch.bfloat16, 72),
    "decode fp32 64": _decode(torch.float32, 64),
    "prefill bf16 128": _prefill(torch.bfloat16, 128),
    "prefill bf16 128 n128": _prefill(torch.bfloat16, 128, PrefillTuning(tile=128, stages=2)),
    "prefill bf16 128 m64": _prefill(torch.bfloat16, 128, PrefillTuning(lines=64, warps=4)),
    "prefill bf16 72": _prefill(torch.bfloat16, 72),
    "qkv finish": _finish,
    "activations": _points,
    "norms": _norms,
    "rotation": _rotary,
    **{f"skinny 1 {tuple(t)[:6]}": _skinny(1, t) for t in CANDIDATES},
    **{f"skinny 32 {tuple(t)[:6]}": _skinny(32, t) for t in CANDIDATES if t.mode != "fma"},
    "skinny gated 1": _skinny(1, SkinnyTuning(32, 128, 1, 4, 5), gated=True),
    "skinny gated 32": _skinny(32, SkinnyTuning(32, 128, 1, 4, 5), gated=True),
    "skinny normed 32": _skinny(32, SkinnyTuning(32, 256, 4, ahead=1024, pdl=True), normed=True),
    "sample": _sample,
}
