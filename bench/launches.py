"""One launch of each kernel at the sizes of Qwen3-VL-8B: what the compile check compiles."""

from collections.abc import Callable
from typing import Any

import torch

from saccade.kernels.paged_decode import DecodeTuning, decode_attention_triton
from saccade.kernels.paged_prefill import PrefillTuning, prefill_attention_triton

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
}
