"""Host memory for what is kept, apart from the C library's heap.

takes   tensors of a CPU that outlive the step that made them; shapes to be filled
gives   tensors that are each a mapping of their own, given back to the system when nobody refers to them
never   serves what lives shortly: a new mapping costs a fault per page

Activations of a CPU come and go in the heap by the megabyte. A few kilobytes kept among them cut the room
they leave in two, and the next large one goes to the heap's end: five minutes of mixed traffic made a heap of
420 MiB of 195 in use, and with tables and features apart one of 295 MiB of 174.
"""

import mmap
from collections.abc import Sequence
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

# Linux gives a process 65,530 mappings, which threads and libraries need too. Beyond these, the heap.
MOST_MAPPINGS = 16384
_mappings: WeakSet[mmap.mmap] = WeakSet()  # a limit of the process, so counted for the process


def empty_in_own_mapping(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Not filled, or zeros."""
    count = prod(shape)
    if not count or len(_mappings) >= MOST_MAPPINGS:
        return torch.empty(tuple(shape), dtype=dtype)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # this system gives fewer
        return torch.empty(tuple(shape), dtype=dtype)
    _mappings.add(memory)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))


def copy_to_own_mapping(tensor: Tensor) -> Tensor:
    """A copy to be kept. On other devices than a CPU it is the tensor: their allocators have bins by size."""
    if tensor.device.type != "cpu":
        return tensor
    return empty_in_own_mapping(tensor.shape, tensor.dtype).copy_(tensor.detach())
