"""Worker processes build batches into shared memory; the trainer takes them in the order it asked.

Start the feed before CUDA is touched: workers are forked.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import Spec, build

SLOT = 96 << 20  # bytes per batch
Layout = list[tuple[str, str, tuple[int, ...], int]]


def _work(jobs: Any, done: Any, memory: mmap.mmap) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        job = jobs.get()
        if job is None:
            return
        number, slot, spec, seed = job
        layout: Layout = []
        at = slot * SLOT
        for name, array in build(spec, seed).items():
            array = np.ascontiguousarray(array)
            size = array.nbytes
            if at + size > (slot + 1) * SLOT:
                raise ValueError(f"a batch of {spec} does not fit in a slot of {SLOT} bytes")
            np.frombuffer(memory, np.uint8, size, at)[:] = array.reshape(-1).view(np.uint8)
            layout.append((name, array.dtype.str, array.shape, at))
            at += -(-size // 64) * 64
        done.put((number, slot, spec, layout))


class Feed:
    """Takes: a function from batch number to (spec, seed), asked ahead of time. Gives: tensors on the
    device."""

    def __init__(self, plan: Callable[[int], tuple[Spec, int]], workers: int, ahead: int) -> None:
        context = mp.get_context("fork")
        self.plan, self.ahead = plan, ahead
        self.memory = mmap.mmap(-1, SLOT * ahead)
        self.jobs, self.done = context.SimpleQueue(), context.SimpleQueue()
        self.processes = [
            context.Process(target=_work, args=(self.jobs, self.done, self.memory), daemon=True)
            for _ in range(workers)
        ]
        for process in self.processes:
            process.start()
        self.asked = 0
        self.ready: deque[tuple[int, int, Spec, Layout]] = deque()
        self.stream: torch.cuda.Stream | None = None

    def begin(self, device: torch.device) -> None:
        """After CUDA is up: pins the memory and asks for the first batches."""
        self.device = device
        if device.type == "cuda":
            self.stream = torch.cuda.Stream()
            address = np.frombuffer(self.memory, np.uint8).ctypes.data
            torch.cuda.cudart().cudaHostRegister(address, SLOT * self.ahead, 0)
        for slot in range(self.ahead):
            self._ask(slot)

    def _ask(self, slot: int) -> None:
        spec, seed = self.plan(self.asked)
        self.jobs.put((self.asked, slot, spec, seed))
        self.asked += 1

    def next(self) -> tuple[Spec, dict[str, Tensor]]:
        """The next finished batch (order of finishing: sizes mix by themselves)."""
        _, slot, spec, layout = self.done.get()
        out = {}
        for name, dtype, shape, at in layout:
            count = int(np.prod(shape))
            source = torch.from_numpy(np.frombuffer(self.memory, np.dtype(dtype), count, at).reshape(shape))
            if self.stream is None:
                out[name] = source.clone()
            else:
                with torch.cuda.stream(self.stream):
                    out[name] = source.to(self.device, non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
            for tensor in out.values():
                tensor.record_stream(torch.cuda.current_stream())
        self._ask(slot)
        return spec, out

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
