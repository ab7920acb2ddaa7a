"""Recording: a function over static buffers becomes something that repeats it with one launch.

takes   a function of no arguments that has been called before (so that nothing is left to compile or to make)
gives   what repeats it: a CUDA graph, or on the CPU the function itself
owns    the memory pool that all graphs of one recorder share: no two of them run at the same time
never   runs the function's work while recording it
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)

Replay = Callable[[], None]


class Recorder(Protocol):
    def record(self, function: Replay) -> Replay:
        """Raises a RuntimeError where that is not possible."""
        ...


class PlainRecorder:
    """The twin: the same bookkeeping, and every repetition is a call."""

    def record(self, function: Replay) -> Replay:
        return function


class CudaRecorder:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # The libraries keep a workspace per stream. Made inside a capture it would belong to that graph.
        with torch.cuda.stream(self._stream):
            for dtype in (torch.float32, torch.bfloat16):
                some = torch.zeros(16, 16, dtype=dtype, device=device)
                F.linear(some @ some, some, some[0])
        torch.cuda.synchronize(device)

    def record(self, function: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # thread_local: other threads may go on with what they do to the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what is wrong has been said
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay
