"""Times candidate tunings of products on this GPU, the model's first, and keeps the fastest.

A timing replays a CUDA graph that multiplies by one copy of W after the other, together larger than L2, with
the epilogue the product has in a decoder. Kernels are compiled side by side before (`compile_only`).
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.cuda_graph import CudaRecorder, Recorder
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.quantize import FP8, QuantizedRows
from saccade.kernels.gemm.quantized_linear import (
    EightBit,
    FourBit,
    eight_bit_partials,
    eight_bit_product,
    four_bit_partials,
    four_bit_product,
)
from saccade.kernels.gemm.skinny import many_rows_tuning, skinny_partials, skinny_triton
from saccade.kernels.gemm.split_k import Epilogue, Norm
from saccade.kernels.gemm.tuning import Entries
from saccade.kernels.gemm.tuning_model import Gpu, Product, ProductTuning, model_tunings
from saccade.kernels.jit import compile_only, device_properties, up
from saccade.kernels.norm_rope.elementwise import add_norm, silu_mul

log = logging.getLogger(__name__)

GAIN = 0.99  # of the first candidate's time: less is taken for noise
ROTATED = 160 << 20  # bytes of all copies of W: three times an H200's L2
REPLAYS = 15
TIMING_S = 0.006  # of device time for one candidate
GROUP = 128  # columns that share a scale of 4-bit weights
EPS = 1e-6

# What a decoder does with the product: qkv, out and down, gate_up, and the output head.
PARTIALS, NORMED, GATED, PLAIN = "partials", "normed", "gated", "plain"

Choice = ProductTuning | None  # None: the library's product
Timer = Callable[[Choice], float]  # seconds; endless if it does not run


class Task(NamedTuple):
    product: Product
    use: str

    @property
    def bytes(self) -> float:
        size = {"bf16": 2.0, "int4": 0.5}.get(self.product.format, 1.0)
        return self.product.columns * self.product.depth * size


class Found(NamedTuple):
    task: Task
    choice: Choice
    seconds: float
    first: Choice  # what the model says
    first_seconds: float


def candidates(product: Product, gpu: Gpu) -> tuple[Choice, ...]:
    """The model's, and for 16-bit weights the library's product."""
    made = model_tunings(product, gpu)
    return (*made, None) if product.format == "bf16" else made


def search(
    task: Task,
    options: Sequence[Choice],
    timer: Timer,
    deadline: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Found | None:
    """The fastest; the first one if no other is faster by more than 1%. None: there was no time to compare
    all, or none runs."""
    taken: dict[Choice, float] = {}
    for option in options:
        if clock() >= deadline:
            return None
        taken[option] = timer(option)
    if min(taken.values()) == float("inf"):
        return None
    first = options[0]
    best = min(taken, key=lambda option: taken[option])
    best = best if taken[best] < GAIN * taken[first] else first
    return Found(task, best, taken[best], first, taken[first])


class ProductRunner:
    """Multiplies by `copies` of a random W as a decoder does; 0: as many as L2 does not hold."""

    def __init__(self, task: Task, device: torch.device, *, pdl: bool, copies: int = 0) -> None:
        self._task, self._mode = task, KernelMode(pdl=pdl)
        name, rows, columns, depth, _ = task.product
        # Not the default generator: a capture that failed may hold it.
        made = torch.Generator(device).manual_seed(0)
        self._x = torch.randn(rows, depth, device=device, dtype=torch.bfloat16, generator=made)
        self._residual = torch.randn(rows, columns, device=device, dtype=torch.bfloat16, generator=made)
        self._weight = torch.ones(columns, device=device, dtype=torch.bfloat16)
        kind = {"fp8": FP8, "int8": torch.int8}.get(name)
        self._rows = None
        if kind is not None:
            self._rows = QuantizedRows(self._x.to(kind), torch.ones(rows, device=device))
        copies = copies or up(ROTATED, int(task.bytes))
        self._copies = [_random_weight(task.product, device, made) for _ in range(copies)]

    def multiply(self, choice: Choice, w: Tensor | EightBit | FourBit) -> None:
        t, use, mode = choice, self._task.use, self._mode
        norm = Norm(self._weight, EPS, None if self._rows is None else self._rows.values.dtype)
        epilogue = Epilogue(gated=use == GATED)
        if use == NORMED:
            epilogue = Epilogue(residual=self._residual, norm=norm)
        if isinstance(w, EightBit) and self._rows is not None:
            if use == PARTIALS:
                eight_bit_partials(self._rows, w, None, torch.bfloat16, mode, t)
            else:
                eight_bit_product(self._rows, w, torch.bfloat16, epilogue, mode, t)
        elif isinstance(w, FourBit):
            if use == PARTIALS:
                four_bit_partials(self._x, w, None, mode, t)
            else:
                four_bit_product(self._x, w, epilogue, mode, t)
        elif isinstance(w, Tensor):
            self._multiply_dense(t, w, epilogue)

    def _multiply_dense(self, choice: Choice, w: Tensor, epilogue: Epilogue) -> None:
        mode = self._mode
        if choice is None:
            y = F.linear(self._x, w)
            if epilogue.gated:
                silu_mul(y, mode)
            elif epilogue.norm is not None:
                add_norm(y, epilogue.residual, self._weight, None, EPS, mode)
            return
        t = many_rows_tuning(choice)._replace(pdl=mode.pdl)
        if self._task.use == PARTIALS and t.splits > 1:
            skinny_partials(self._x, w, None, t)
        else:
            norm, residual = epilogue.norm, epilogue.residual
            plain = None if norm is None else norm._replace(quantized=None)
            skinny_triton(self._x, w, gated=epilogue.gated, residual=residual, norm=plain, tuning=t)

    def compile(self, options: Sequence[Choice]) -> None:
        """Within `compile_only`."""
        for option in options:
            self.multiply(option, self._copies[0])

    def seconds(self, choice: Choice, recorder: Recorder) -> float:
        """Of one product."""
        calls = self._copies * up(8, len(self._copies))

        def multiply_all() -> None:
            for w in calls:
                self.multiply(choice, w)

        try:
            self.multiply(choice, calls[0])
            torch.cuda.synchronize()
            return replay_seconds(recorder.record(multiply_all)) / len(calls)
        except Exception as error:  # it does not fit this GPU: the others are timed
            log.debug("%s by %s: %s", self._task, choice, error)
            return float("inf")


def replay_seconds(replay: Callable[[], None]) -> float:
    replay()
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < TIMING_S and len(taken) < REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def _random_weight(
    product: Product, device: torch.device, generator: torch.Generator
) -> Tensor | EightBit | FourBit:
    name, _, columns, depth, _ = product
    if name == "int4":
        width = up(depth, 512) * 128
        shape = (columns, width)
        packed = torch.randint(-32768, 32768, shape, device=device, dtype=torch.int16, generator=generator)
        scale = torch.full((up(depth, GROUP), columns), 0.01, device=device, dtype=torch.bfloat16)
        return FourBit(packed, scale, None, GROUP, depth)
    if name == "bf16":
        return torch.empty(columns, depth, device=device, dtype=torch.bfloat16).normal_(
            0, 0.02, generator=generator
        )
    values = torch.randint(-64, 64, (columns, depth), device=device, dtype=torch.int8, generator=generator)
    if name == "fp8":
        values = values.to(FP8)
    return EightBit(values, torch.full((columns,), 0.01, device=device))


def search_all(
    tasks: Sequence[Task],
    device: torch.device,
    gpu: Gpu,
    seconds: float,
    *,
    pdl: bool,
    batch: int = 2,
) -> Iterator[Found]:
    """Search the tasks in turn until the time is over, `batch` of them compiled at once."""
    deadline, recorder = time.perf_counter() + seconds, CudaRecorder(device)
    for first in range(0, len(tasks), batch):
        if time.perf_counter() >= deadline:
            return
        some = tasks[first : first + batch]
        compile_tasks(some, device, gpu, pdl=pdl)
        for task in some:
            if time.perf_counter() >= deadline:
                return
            runner = ProductRunner(task, device, pdl=pdl)
            timer = partial(runner.seconds, recorder=recorder)
            found = search(task, candidates(task.product, gpu), timer, deadline)
            if found is not None:
                yield found


def compile_tasks(tasks: Sequence[Task], device: torch.device, gpu: Gpu, *, pdl: bool) -> None:
    """Compile all candidates side by side; shapes that differ in N and K alone share their kernels."""
    with compile_only():
        for task in tasks:
            ProductRunner(task, device, pdl=pdl, copies=1).compile(candidates(task.product, gpu))


def entries(found: Sequence[Found]) -> Entries:
    return {one.task.product.key: one.choice for one in found}


def gpu_of(device: torch.device) -> Gpu:
    """The device's properties, as Triton has them."""
    found = device_properties(device.index or 0)
    return Gpu(found["multiprocessor_count"], found["max_shared_mem"])
