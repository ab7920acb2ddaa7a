"""INT8 on a CPU against bfloat16 and float32: linear layers, and tokens a second of one sequence.

    python -m bench.cpu_int8 [MODEL ...] [--threads 1] [--tokens 32] [--rounds 5]

What is compared runs in turns, and the best round of each counts: other processes disturb all alike.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from saccade import LLM, SamplingParams
from saccade.kernels.dispatch import DEFAULT_MODE
from saccade.quantization.linear import for_device
from saccade.quantization.online import RoundToNearest

SHAPES = ((2048, 2048), (3072, 576), (576, 1536), (49152, 576))  # N, K
ROWS = (1, 8, 64)
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}


def best_of(calls: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, float]:
    """Microseconds a call, measured for so long in each round."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds or not count:
                call()
                count += 1
            found[name] = min(found[name], (time.perf_counter() - began) / count * 1e6)
    return found


def linears(rounds: int) -> None:
    print("us a product: float32, bfloat16, int8 with bfloat16 activations, and bfloat16 / int8")
    for shape in SHAPES:
        wide = torch.randn(shape)
        half = wide.bfloat16()
        weight = for_device(RoundToNearest("int8").quantize(half), half.device, half.dtype)
        for rows in ROWS:
            x = torch.randn(rows, shape[1])
            y = x.bfloat16()
            calls: dict[str, Callable[[], object]] = {
                "float32": partial(F.linear, x, wide),
                "bfloat16": partial(F.linear, y, half),
                "int8": partial(weight.partials, y, None, DEFAULT_MODE),
            }
            took = best_of(calls, rounds, 0.02)
            ratio = took["bfloat16"] / took["int8"]
            print(shape, rows, *(f"{us:8.0f}" for us in took.values()), f"{ratio:.2f}x", flush=True)


def decode(model: str, tokens: int, rounds: int) -> None:
    """Tokens a second behind the first one."""
    llms = {name: LLM(model, progress=False, kv_cache_bytes=1 << 28, **way) for name, way in WAYS.items()}
    found = dict.fromkeys(llms, 0.0)
    for _ in range(rounds):
        for name, llm in llms.items():
            first, whole = (_seconds(llm, count) for count in (1, tokens + 1))
            found[name] = max(found[name], tokens / (whole - first))
    shown = ", ".join(f"{name} {speed:.1f}" for name, speed in found.items())
    print(f"{model}, tokens/s: {shown}: {found['int8'] / found['float32']:.2f}x", flush=True)


def _seconds(llm: LLM, tokens: int) -> float:
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    llm.generate(["The eye jumps to what matters, because"], sampling, progress=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["embedded"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.inference_mode():
        linears(given.rounds)
    for model in given.models:
        decode(model, given.tokens, given.rounds)


if __name__ == "__main__":
    main()
