"""Which implementation of a kernel runs where: one table, changed by measurement alone.

takes   the name of a kernel and the tensor it is about to read
gives   whether its Triton form runs; else the torch twin does
never   reads the environment: what ran is what this file says

An entry says "triton" only once bench/kernels.py has shown it right and faster on the chip; the line then
names the figure. Triton forms run on CUDA tensors alone, and those that multiply matrices on 16-bit ones
alone, whatever the table says: in exact float32 they leave the tensor cores and spill.
"""

from torch import Tensor

from saccade.kernels.jit import TRITON

TORCH, KERNEL = "torch", "triton"

CHOICE: dict[str, str] = {
    "decode_attention": TORCH,  # not measured yet, as all below
    "prefill_attention": TORCH,
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
    "patchify": TORCH,
}

SIXTEEN_BITS = frozenset({"decode_attention", "prefill_attention", "skinny_linear"})


def runs_triton(name: str, tensor: Tensor) -> bool:
    chosen = CHOICE.get(name)
    if chosen not in (TORCH, KERNEL):
        raise ValueError(f"the kernel {name!r} is to run as {chosen!r}; {TORCH!r} and {KERNEL!r} exist")
    if name in SIXTEEN_BITS and tensor.element_size() != 2:
        return False
    return chosen == KERNEL and tensor.is_cuda and TRITON
