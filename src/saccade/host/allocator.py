"""CPU tensors in mappings of their own, outside the malloc heap, returned to the system when they are freed.

For tensors that outlive a step, such as cached features and tables. A few kilobytes kept among activations
fragment the heap: five minutes of mixed traffic grew it to 420 MiB with 195 in use; with tables and features
outside, to 295 MiB with 174 in use. Short-lived tensors belong in the heap: a new mapping costs a page fault
per page.
"""

import mmap
from collections.abc import Sequence
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

# Linux allows a process 65,530 mappings, which threads and libraries need too. Beyond this, the heap is used.
MOST_MAPPINGS = 16384
_mappings: WeakSet[mmap.mmap] = WeakSet()  # the limit is per process


def empty_in_own_mapping(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor with unspecified values."""
    count = prod(shape)
    if not count or len(_mappings) >= MOST_MAPPINGS:
        return torch.empty(tuple(shape), dtype=dtype)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # the system's limit is lower
        return torch.empty(tuple(shape), dtype=dtype)
    _mappings.add(memory)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))


def copy_to_own_mapping(tensor: Tensor) -> Tensor:
    """A copy to keep. Tensors of other devices are returned as they are: their allocators have size bins."""
    if tensor.device.type != "cpu":
        return tensor
    return empty_in_own_mapping(tensor.shape, tensor.dtype).copy_(tensor.detach())
