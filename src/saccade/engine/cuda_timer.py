"""Moments in the work of a CUDA device, for `stopwatch.DeviceStopwatch`."""

import torch

from saccade.engine.step_timer import Mark


class CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def until(self, later: Mark) -> float:
        if not isinstance(later, CudaMark):
            raise TypeError(f"a {type(later).__name__} is no moment of a CUDA device")
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3
