"""Tunings of a model's products: the tables, and a short search for shapes that they do not name."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from saccade.kernels.dispatch import TORCH, KernelMode
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.tuning import TuningTable, cache_path, read_cache, shipped_entries, write_cache
from saccade.kernels.gemm.tuning_model import LIMITS, Product
from saccade.kernels.gemm.tuning_search import (
    GATED,
    NORMED,
    PARTIALS,
    PLAIN,
    Found,
    Task,
    entries,
    gpu_of,
    search_all,
)
from saccade.kernels.jit import TRITON
from saccade.models.linear import LinearMethod, UnquantizedLinear
from saccade.quantization.linear import QuantizedLinear
from saccade.quantization.stages import stage_of
from saccade.quantization.weights import FOUR_BIT_ROWS

SECONDS = 10.0  # of a start, at most; the next start continues
SHIPPED_CAPABILITY = (9, 0)  # compute capability of the GPU the shipped table was measured on
ORDER = (1, 32, 16, 64, 128, 256)  # of rows: what matters most first
TIMED_ROWS = {16: 8}  # rows that speak for a limit, where it is not the limit itself
USES = {"qkv": PARTIALS, "out": NORMED, "gate_up": GATED, "down": NORMED}


def load_tunings(device: torch.device, *, cached: bool) -> TuningTable:
    """Of this GPU: the shipped table where it applies, and what was measured on this machine."""
    if device.type != "cuda" or not TRITON:
        return TuningTable()
    table = TuningTable(gpu=gpu_of(device))
    if torch.cuda.get_device_capability(device) == SHIPPED_CAPABILITY:
        table = table.extended(shipped_entries())
    return table.extended(read_cache(_cache(device))) if cached else table


def model_tasks(model: nn.Module, max_seqs: int) -> list[Task]:
    """The products of decode steps of the decoder and its head, by rows and shape."""
    found: dict[Product, Task] = {}
    for path, module in model.named_modules():
        form = _format(module) if isinstance(module, LinearMethod) else None
        if form is None or not isinstance(module, LinearMethod) or stage_of(path) == "vision":
            continue
        use = USES.get(path.rpartition(".")[2], PLAIN)
        for limit in limits_of(max_seqs, form):
            rows = TIMED_ROWS.get(limit, limit)
            columns, depth = sum(module.spec.partitions), module.spec.in_features
            product = Product(form, rows, columns, depth, use == GATED)
            found.setdefault(product, Task(product, use))
    order = {TIMED_ROWS.get(limit, limit): place for place, limit in enumerate(ORDER)}
    return sorted(found.values(), key=lambda task: (order[task.product.rows], -task.bytes))


def limits_of(max_seqs: int, form: str) -> list[int]:
    """Of the rows that steps of up to `max_seqs` sequences have."""
    below = (0, *LIMITS)
    most = FOUR_BIT_ROWS if form == "int4" else LIMITS[-1]
    return [
        limit for limit, before in zip(LIMITS, below, strict=False) if before < max_seqs and limit <= most
    ]


def _format(module: LinearMethod) -> str | None:
    """None: its products have no tunings."""
    if isinstance(module, UnquantizedLinear):
        return "bf16" if module.spec.dtype.itemsize == 2 else None
    if isinstance(module, QuantizedLinear) and len(module.schemes) == 1:
        scheme = next(iter(module.schemes))
        return None if scheme == "none" else scheme
    return None


def untuned(tasks: Sequence[Task], tunings: TuningTable) -> list[Task]:
    """Those that no table names."""
    return [task for task in tasks if task.product not in tunings and not skinny.has_measured(task.product)]


def can_tune(device: torch.device, mode: KernelMode) -> bool:
    """The deterministic mode has one tuning for each shape."""
    return device.type == "cuda" and TRITON and mode.kernels != TORCH and not mode.deterministic


def tune(
    tasks: Sequence[Task], tunings: TuningTable, device: torch.device, seconds: float, *, pdl: bool
) -> Iterator[Found]:
    """Search, and keep every result on disk. Needs about 200 MB of the GPU's memory, or the bytes of the
    largest weight twice."""
    try:
        for found in search_all(tasks, device, tunings.gpu, seconds, pdl=pdl):
            write_cache(_cache(device), entries([found]))
            yield found
    finally:
        torch.cuda.empty_cache()


def _cache(device: torch.device) -> Path:
    return cache_path(cache_folder(), torch.cuda.get_device_name(device))


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "saccade" / "tuning"
