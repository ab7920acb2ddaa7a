"""Measures the shipped table of tunings (src/saccade/kernels/gemm/tunings.json) on a GPU.

    PYTHONPATH=src:.carry/site python3 -m bench.tune_shapes --seconds 200 --out $OUT/tuning.json
    ... --models qwen3-vl-2b llama-3-70b --formats bf16 --rows 1 32

Products that the shipped table names are left out (`--again`: they are not), so a second run continues where
the time of the first was over. The file has the shipped entries and the new ones: it replaces the shipped
table. Candidates are those of the model of the kernels, compiled by `--workers` processes first. The last
lines compare a layer's products of each model with reading their bytes at 4.69 TB/s.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from saccade.kernels.compile_pool import CompilePool
from saccade.kernels.gemm import skinny
from saccade.kernels.gemm.tuning import Entries, TuningTable, entries_to_json, shipped_entries
from saccade.kernels.gemm.tuning_model import LIMITS, Product
from saccade.kernels.gemm.tuning_search import (
    GATED,
    NORMED,
    PARTIALS,
    PLAIN,
    Choice,
    Found,
    Task,
    entries,
    gpu_of,
    search_all,
)
from saccade.quantization.weights import FOUR_BIT_ROWS
from saccade.worker.product_tuning import ORDER, TIMED_ROWS

MEMORY = 4.69e12  # bytes per second
FORMATS = ("bf16", "fp8", "int4")


class Shape(NamedTuple):
    """Of a decoder."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    head_dim: int = 128

    def products(self) -> dict[str, tuple[int, int, str]]:
        """Rows of W, columns of W and what follows the product."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (qkv, self.hidden, PARTIALS),
            "out": (self.hidden, self.heads * self.head_dim, NORMED),
            "gate_up": (2 * self.intermediate, self.hidden, GATED),
            "down": (self.hidden, self.intermediate, NORMED),
            "head": (self.vocabulary, self.hidden, PLAIN),
        }


MODELS = {
    "qwen3-vl-2b": Shape(2048, 16, 8, 6144, 151_936),
    "qwen3-vl-4b": Shape(2560, 32, 8, 9728, 151_936),
    "qwen3-vl-8b": Shape(4096, 32, 8, 12288, 151_936),
    "qwen3-vl-32b": Shape(5120, 64, 8, 25600, 151_936),
    "llama-3-8b": Shape(4096, 32, 8, 14336, 128_256),
    "llama-3-70b": Shape(8192, 64, 8, 28672, 128_256),
    "qwen2.5-7b": Shape(3584, 28, 4, 18944, 152_064),
}


def tasks_of(model: str, form: str, limit: int) -> dict[str, Task]:
    """By the name of the product; the head is not quantised."""
    if form == "int4" and limit > FOUR_BIT_ROWS:
        return {}
    rows = TIMED_ROWS.get(limit, limit)
    return {
        name: Task(Product(form, rows, columns, depth, use == GATED), use)
        for name, (columns, depth, use) in MODELS[model].products().items()
        if name != "head" or form == "bf16"
    }


def wanted(options: argparse.Namespace, limit: int, known: Entries) -> list[Task]:
    made: dict[Product, Task] = {}
    for form in options.formats:
        for model in options.models:
            for task in tasks_of(model, form, limit).values():
                if (options.again or task.product.key not in known) and not skinny.has_measured(task.product):
                    made.setdefault(task.product.key, task)
    return list(made.values())


def shown(choice: Choice) -> str:
    if choice is None:
        return "library"
    return f"{choice.piece}x{choice.lines} d{choice.depth} k{choice.splits} s{choice.stages} w{choice.warps}"


def line(found: Found) -> str:
    form, rows, columns, depth, gated = found.task.product
    floor = found.task.bytes / MEMORY
    return (
        f"{form:5} {rows:4} {columns:7} x {depth:<6}{'gated' if gated else '':6}"
        f"{found.first_seconds * 1e6:8.1f} us model  {found.seconds * 1e6:8.1f} best "
        f"{found.seconds / floor:6.2f} of floor  won {1 - found.seconds / found.first_seconds:6.1%}  "
        f"{shown(found.first)} -> {shown(found.choice)}"
    )


def layers(models: list[str], formats: list[str], found: dict[Product, Found]) -> Iterator[str]:
    """Of each model: a layer's products, where all four were timed now."""
    for form in formats:
        for model in models:
            for limit in LIMITS:
                layer = {name: task for name, task in tasks_of(model, form, limit).items() if name != "head"}
                done = [found.get(task.product.key) for task in layer.values()]
                timed = [one for one in done if one is not None]
                if not timed or len(timed) < len(done):
                    continue
                best, model_s = (sum(getattr(f, key) for f in timed) for key in ("seconds", "first_seconds"))
                floor = sum(one.task.bytes for one in timed) / MEMORY
                yield (
                    f"{form:5} {model:13} {limit:4} rows: model {model_s * 1e6:7.1f} us "
                    f"({model_s / floor:.2f} of floor), best {best * 1e6:7.1f} ({best / floor:.2f})"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no product is begun")
    parser.add_argument("--out", type=Path, default=Path("tuning.json"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=[*FORMATS, "int8"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ORDER), choices=LIMITS)
    parser.add_argument("--workers", type=int, default=14, help="compiling processes")
    parser.add_argument("--again", action="store_true", help="measure what the shipped table has, too")
    options = parser.parse_args()
    device, began = torch.device("cuda"), time.perf_counter()
    gpu, known = gpu_of(device), shipped_entries()
    print(f"{torch.cuda.get_device_name()}, {gpu}, {len(known)} entries shipped", flush=True)
    found: dict[Product, Found] = {}
    with CompilePool(options.workers) as pool:
        pool.start()
        for limit in options.rows:
            tasks, left = wanted(options, limit, known), options.seconds - (time.perf_counter() - began)
            print(f"\n{limit} rows: {len(tasks)} products, {left:.0f} s left", flush=True)
            for one in search_all(tasks, device, gpu, left, pdl=True, batch=len(tasks) or 1):
                found[one.task.product.key] = one
                print(line(one), flush=True)
            table = TuningTable(known, gpu).extended(entries(list(found.values())))
            options.out.write_text(entries_to_json(table.entries))
    print("\n" + "\n".join(layers(options.models, options.formats, found)))
    print(f"{len(found)} products in {time.perf_counter() - began:.0f} s: {options.out}")


if __name__ == "__main__":
    main()
