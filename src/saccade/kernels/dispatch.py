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
    "decode_attention": KERNEL,  # H200: 6.14x the twin over 8 cases, 3.16 to 20.62
    "prefill_attention": KERNEL,  # H200: 1.08x the twin over 6 cases, 0.71 to 1.47
    "fresh_attention": KERNEL,  # H200: 1.52x the twin over 3 cases, 1.31 to 1.84
    "qkv_finish": KERNEL,  # H200: 15.80x the twin over 4 cases, 13.55 to 19.84
    "rotary_angles": KERNEL,  # H200: 4.93x the twin over 3 cases, 4.48 to 5.47
    "rotary": KERNEL,  # H200: 10.15x the twin over 1 cases, 10.15 to 10.15
    "add_rms_norm": KERNEL,  # H200: 8.04x the twin over 4 cases, 6.84 to 10.65
    "silu_mul": KERNEL,  # H200: 2.81x the twin over 4 cases, 1.97 to 3.69
    "add_layer_norm": KERNEL,  # H200: 1.69x the twin over 1 cases, 1.69 to 1.69
    "gelu": KERNEL,  # H200: 1.00x the twin over 1 cases, 1.00 to 1.00
    "skinny_linear": KERNEL,  # H200: 1.03x the twin over 20 cases, 0.77 to 1.18
    "argmax": KERNEL,  # H200: 4.43x the twin over 3 cases, 3.18 to 6.03
    "draw": KERNEL,  # H200: 13.09x the twin over 6 cases, 3.25 to 50.36
    "device_rows": KERNEL,  # H200: 13.17x the twin over 2 cases, 12.62 to 13.75
    "copy_block": KERNEL,  # H200, pool of 120 GB: 0.10 to 0.14 ms of the host's, the twin 0.31 to 0.34
    "texture": KERNEL,  # H200: 11.97x the twin over 3 cases, 7.11 to 20.24
    "patchify": KERNEL,  # H200: 29 us for 1024 x 1024 pixels; the twin, timed in an earlier form, took 455
}

SIXTEEN_BITS = frozenset({"decode_attention", "prefill_attention", "fresh_attention", "skinny_linear"})


class Mode(NamedTuple):
    kernels: str = "auto"  # auto: the table; torch: the twins; triton: every kernel
    early: bool = False  # programmatic dependent launch: a kernel starts while its predecessor ends (sm_90)
    deterministic: bool = False  # sums in one order whatever else is in the step
    # [n] int32 of the device, 0 between launches: kernels count there who of them comes last. Launches that
    # share it are one after the other; None: nothing is counted, such kernels take two launches.
    arrivals: Tensor | None = None


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
    # On tensors without data a launch can still be compiled (`python -m bench.compile_start`).
    there = tensor.is_cuda or tensor.is_meta
    return (chosen if asked == "auto" else asked) == KERNEL and there and TRITON
