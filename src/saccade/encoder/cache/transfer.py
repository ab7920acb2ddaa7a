"""Features between device and host memory: tensors, a copy stream, pinned buffers.

takes   feature tensors of the device; host copies of them
gives   the other of the two, without the host waiting for a copy
owns    the copy stream
never   frees or overwrites what a copy still reads: both allocators are told of the stream

On CUDA a copy down begins behind whatever the compute stream has been given so far, a copy up ahead of the
step that will need it; the compute stream waits for it where the features are first read. On a CPU the
"device" is host memory already, and a copy is a plain copy.

The CUDA half has not run on a chip yet; the store around it, and the CPU's half, have been tested.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.encoder.cache.transfer_api import Arriving, Mover, Slab
from saccade.host.allocator import copy_to_own_mapping, empty_in_own_mapping

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Kept:
    """Features in host memory; complete once the event has happened."""

    tensor: Tensor
    ready: torch.cuda.Event | None = None


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: NDArray[np.uint8] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return flat.data


class HostMover:
    """For a CPU."""

    def down(self, features: Tensor) -> Kept:
        return Kept(copy_to_own_mapping(features))

    def up(self, kept: Kept) -> Tensor | Arriving[Tensor]:
        return copy_to_own_mapping(kept.tensor)

    def weigh(self, nbytes: int) -> int:
        return nbytes

    def slab(self, kept: Kept) -> Slab:
        if kept.ready is not None:
            kept.ready.synchronize()
        return Slab(_NAMES[kept.tensor.dtype], tuple(kept.tensor.shape), _bytes_of(kept.tensor))

    def blank(self, dtype: str, shape: tuple[int, ...]) -> tuple[Kept, memoryview]:
        tensor = empty_in_own_mapping(shape, _DTYPES[dtype])
        return Kept(tensor), _bytes_of(tensor)


class CudaMover(HostMover):
    """For a CUDA device. Called from the thread that launches steps, `slab` and `blank` from any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def down(self, features: Tensor) -> Kept:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what is still being computed
        with torch.cuda.stream(self._stream):
            host = torch.empty(features.shape, dtype=features.dtype, pin_memory=True)
            host.copy_(features, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        features.record_stream(self._stream)  # its memory is reused once the copy is over
        return Kept(host, ready)

    def up(self, kept: Kept) -> Arriving[Tensor]:
        with torch.cuda.stream(self._stream):
            # Behind a copy down of the same features that may be going on: one stream keeps the order.
            features = torch.empty(kept.tensor.shape, dtype=kept.tensor.dtype, device=self._device)
            features.copy_(kept.tensor, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)

        def arrive() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            features.record_stream(current)
            return features

        return Arriving(arrive)

    def weigh(self, nbytes: int) -> int:
        """The allocator of pinned memory hands out powers of two."""
        return 1 << (nbytes - 1).bit_length() if nbytes else 0

    def blank(self, dtype: str, shape: tuple[int, ...]) -> tuple[Kept, memoryview]:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype], pin_memory=True)
        return Kept(tensor), _bytes_of(tensor)


def mover_for(device: torch.device) -> Mover[Tensor]:
    return CudaMover(device) if device.type == "cuda" else HostMover()
