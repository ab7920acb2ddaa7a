"""Which implementation of each kernel runs: Triton or the PyTorch reference.

`CHOICE` is changed by measurement alone: an entry says "triton" once bench/kernels.py has shown the kernel
correct and faster on the GPU; the comment gives the figure. Triton kernels need CUDA tensors, and those that
multiply matrices need 16-bit ones: in float32 they would not use the tensor cores and would spill. In
Triton's interpreter (tests) the mode "triton" runs all of them on the CPU.
"""

from typing import NamedTuple

from torch import Tensor

from saccade.kernels.gemm.tuning import TuningTable
from saccade.kernels.jit import INTERPRETED, TRITON

TORCH, KERNEL = "torch", "triton"

CHOICE: dict[str, str] = {
    "decode_attention": KERNEL,  # H200: 6.14x the reference over 8 cases, 3.16 to 20.62
    "prefill_attention": KERNEL,  # H200: 1.08x the reference over 6 cases, 0.71 to 1.47
    "qk_norm_rope": KERNEL,  # H200: 15.80x the reference over 4 cases, 13.55 to 19.84
    "rotary_angles": KERNEL,  # H200: 4.93x the reference over 3 cases, 4.48 to 5.47
    "rotary": KERNEL,  # H200: 10.15x the reference over 1 cases, 10.15 to 10.15
    "add_norm": KERNEL,  # H200: RMS 8.04x the reference over 4 cases, 6.84 to 10.65; layer norm 1.69x
    "silu_mul": KERNEL,  # H200: 2.81x the reference over 4 cases, 1.97 to 3.69
    "quantize_rows": KERNEL,  # H200: 3.9 us for 1,088 rows of 4,096, 3.4 TB/s
    "quantized_linear": KERNEL,  # H200: FP8 and 4 bits 1.5 to 2.1x bf16's at 1 to 32 rows; see gemm/quantized
    "skinny_linear": KERNEL,  # H200: 1.03x the reference over 20 cases, 0.77 to 1.18
    "argmax": KERNEL,  # H200: 4.43x the reference over 3 cases, 3.18 to 6.03
    "draw": KERNEL,  # H200: 13.09x the reference over 6 cases, 3.25 to 50.36
    "device_rows": KERNEL,  # H200: 13.17x the reference over 2 cases, 12.62 to 13.75
    "copy_block": KERNEL,  # H200, pool of 120 GB: 0.10 to 0.14 ms of the host's, the reference 0.31 to 0.34
    "texture": KERNEL,  # H200: 11.97x the reference over 3 cases, 7.11 to 20.24
    "patchify": KERNEL,  # H200: 29 us for 1024 x 1024 pixels; an earlier reference took 455
}

NEEDS_16_BIT = frozenset({"decode_attention", "prefill_attention", "skinny_linear"})


class KernelMode(NamedTuple):
    """How kernels are chosen and launched. Modules keep the engine's and pass it to every kernel."""

    kernels: str = "auto"  # auto: as CHOICE says; torch: the references; triton: every Triton kernel
    pdl: bool = False  # programmatic dependent launch: a kernel starts while the one before it ends (sm_90)
    deterministic: bool = False  # sums in one order, whatever else is in the step
    # [n] int32 on the device, 0 between launches: programs of a kernel count there which of them finishes
    # last. Only launches on one stream may share it. None: such kernels take two launches.
    counters: Tensor | None = None
    # Launches only compile (`jit.compile_only`): their outputs are uninitialised, and of layers that launch
    # the same kernels one is enough.
    compile_only: bool = False
    tunings: TuningTable = TuningTable()  # of products by shape


DEFAULT_MODE = KernelMode()


def use_triton(name: str, tensor: Tensor, mode: KernelMode) -> bool:
    """Whether the kernel runs as Triton on a tensor like this; otherwise the reference runs."""
    chosen = CHOICE.get(name)
    if chosen not in (TORCH, KERNEL):
        raise ValueError(f"CHOICE has {chosen!r} for the kernel {name!r}; it must be {TORCH!r} or {KERNEL!r}")
    if mode.kernels == KERNEL and INTERPRETED and not tensor.is_cuda:
        return True
    if name in NEEDS_16_BIT and tensor.element_size() != 2:
        return False
    # A launch on meta tensors can still be compiled (`python -m bench.compile_start`).
    on_device = tensor.is_cuda or tensor.is_meta
    return (chosen if mode.kernels == "auto" else mode.kernels) == KERNEL and on_device and TRITON
