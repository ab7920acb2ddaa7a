"""Which implementation of a kernel runs where: one table, changed by measurement alone, and one switch.

takes   the name of a kernel and the tensor it is about to read
gives   whether its Triton form runs; else the torch twin does
never   reads the environment: what ran is what this file and the mode in force say

An entry says "triton" only once bench/kernels.py has shown it right and faster on the chip; the line then
names the figure. Triton forms run on CUDA tensors alone, and those that multiply matrices on 16-bit ones
alone, whatever the table says: in exact float32 they leave the tensor cores and spill. In Triton's
interpreter (tests) the mode "triton" runs them all on the CPU.

The mode is in force inside `running(mode)`: an engine opens it around everything it puts on the device, so
two engines of one process do not disturb each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from saccade.kernels.jit import INTERPRETED, TRITON

TORCH, KERNEL = "torch", "triton"

CHOICE: dict[str, str] = {
    "decode_attention": TORCH,  # not measured yet, as all below
    "prefill_attention": TORCH,
    "fresh_attention": KERNEL,  # prompts from their first token on, by the prefill kernel; torch: flash SDPA
    "qkv_finish": TORCH,
    "rotary_angles": TORCH,
    "rotary": TORCH,
    "add_rms_norm": TORCH,
    "silu_mul": TORCH,
    "add_layer_norm": TORCH,
    "gelu": TORCH,
    "skinny_linear": TORCH,
    "argmax": TORCH,
    "draw": TORCH,
    "device_rows": TORCH,
    "patchify": TORCH,
}

SIXTEEN_BITS = frozenset({"decode_attention", "prefill_attention", "fresh_attention", "skinny_linear"})


class Mode(NamedTuple):
    kernels: str = "auto"  # auto: the table; torch: the twins; triton: every kernel
    early: bool = False  # programmatic dependent launch: a kernel starts while its predecessor ends (sm_90)
    deterministic: bool = False  # sums in one order whatever else is in the step


_PLAIN = Mode()
_MODE: ContextVar[Mode] = ContextVar("mode", default=_PLAIN)


def mode() -> Mode:
    """The one in force here."""
    return _MODE.get()


@contextmanager
def running(mode: Mode) -> Iterator[None]:
    token = _MODE.set(mode)
    try:
        yield
    finally:
        _MODE.reset(token)


def runs_triton(name: str, tensor: Tensor) -> bool:
    chosen = CHOICE.get(name)
    if chosen not in (TORCH, KERNEL):
        raise ValueError(f"the kernel {name!r} is to run as {chosen!r}; {TORCH!r} and {KERNEL!r} exist")
    asked = _MODE.get().kernels
    if asked == KERNEL and INTERPRETED and not tensor.is_cuda:
        return True
    if name in SIXTEEN_BITS and tensor.element_size() != 2:
        return False
    return (chosen if asked == "auto" else asked) == KERNEL and tensor.is_cuda and TRITON
