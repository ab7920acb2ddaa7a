"""Rotary embedding: cos and sin from positions, and the rotation of queries and keys.

    angle[t, j] = position[t] * frequency[j]              j < half = head_dim / 2
    y[j]        = x[j] * cos(angle[j]) - x[j + half] * sin(angle[j])
    y[j + half] = x[j + half] * cos(angle[j]) + x[j] * sin(angle[j])

which is  y = x * C + swap(x) * S  with swap exchanging the halves, C = (cos, cos) and S = (-sin, sin).

With three axes (time, row, column) each frequency follows one axis: `interleaved_axes` gives T R C T R C ...
until the shares of row and column are used up, then T; `sectioned_axes` gives T T .. R R .. C C.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.jit import jit, jit_unspecialized, pdl_options, power_of_two, tl, up, wait_for_previous

LINES = 16  # heads (or, for angles, tokens) of one program


@jit
def rotated(first, second, cos, sin, d, kind: tl.constexpr, DIM: tl.constexpr):
    """Both halves of heads [lines, half] after rotation by C and S at pointers cos, sin; in `kind`.

    Rounds where torch does: products and their sum in the wider of the heads' and the angles' dtypes.
    """
    HALF: tl.constexpr = DIM // 2
    inside = d < HALF
    c_low, c_high = tl.load(cos + d, mask=inside), tl.load(cos + d + HALF, mask=inside)
    s_low, s_high = tl.load(sin + d, mask=inside), tl.load(sin + d + HALF, mask=inside)
    wide: tl.constexpr = kind if kind.primitive_bitwidth >= c_low.dtype.primitive_bitwidth else c_low.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    keep_low = (first * c_low[None, :].to(tl.float32)).to(wide).to(tl.float32)
    keep_high = (second * c_high[None, :].to(tl.float32)).to(wide).to(tl.float32)
    swap_low = (second * s_low[None, :].to(tl.float32)).to(wide).to(tl.float32)
    swap_high = (first * s_high[None, :].to(tl.float32)).to(wide).to(tl.float32)
    return (keep_low + swap_low).to(wide).to(kind), (keep_high + swap_high).to(wide).to(kind)


@jit
def _rotary_kernel(x, cos, sin, out, heads, x_token, X_HEAD: tl.constexpr, DIM: tl.constexpr,
                   HALF_UP: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """LINES heads of one token. Strides of heads are compile-time numbers: only then is 72 known to be a
    multiple of 8."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    head, d = tl.program_id(1) * LINES + tl.arange(0, LINES), tl.arange(0, HALF_UP)
    real = (head < heads)[:, None] & (d < HALF)[None, :]
    wait_for_previous(PDL)
    source = x + token * x_token + head[:, None] * X_HEAD + d[None, :]
    first = tl.load(source, mask=real, other=0.0)
    second = tl.load(source + HALF, mask=real, other=0.0)
    low, high = rotated(first, second, cos + token * DIM, sin + token * DIM, d, x.dtype.element_ty, DIM)
    target = out + (token * heads + head[:, None]) * DIM + d[None, :]
    tl.store(target, low, mask=real)
    tl.store(target + HALF, high, mask=real)


@jit_unspecialized("positions", "tokens", "stride")
def _angles_kernel(positions, frequencies, axes, cos, sin, tokens, stride, HALF: tl.constexpr,
                   HALF_UP: tl.constexpr, LINES: tl.constexpr, AXES: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    token, d = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, HALF_UP)
    real = (token < tokens)[:, None] & (d < HALF)[None, :]
    wait_for_previous(PDL)
    axis = d * 0
    if AXES:
        axis = tl.load(axes + d, mask=d < HALF, other=0)
    place = tl.load(positions + axis[None, :] * stride + token[:, None], mask=real, other=0).to(tl.float32)
    angle = place * tl.load(frequencies + d, mask=d < HALF, other=0.0)[None, :]
    kind = cos.dtype.element_ty
    c, s = tl.cos(angle).to(kind), tl.sin(angle).to(kind)
    at = token.to(tl.int64)[:, None] * (2 * HALF) + d[None, :]
    tl.store(cos + at, c, mask=real)
    tl.store(cos + at + HALF, c, mask=real)
    tl.store(sin + at, -s, mask=real)
    tl.store(sin + at + HALF, s, mask=real)


def interleaved_axes(section: Sequence[int], half: int) -> list[int]:
    """Which axis each of the `half` frequencies follows, for a share of (time, row, column) frequencies."""
    _check_sections(section, half)
    axes = [0] * half
    for axis in (1, 2):
        for index in range(axis, min(3 * section[axis], half), 3):
            axes[index] = axis
    return axes


def sectioned_axes(section: Sequence[int], half: int) -> list[int]:
    """The same, where the frequencies of an axis are neighbours."""
    _check_sections(section, half)
    return [axis for axis in range(3) for _ in range(section[axis])]


def _check_sections(section: Sequence[int], half: int) -> None:
    if len(section) != 3 or sum(section) != half or min(section) < 0:
        raise ValueError(f"the sections {list(section)} must be three shares of the {half} frequencies")


def rotary_angles(
    positions: Tensor,
    frequencies: Tensor,
    axes: Tensor | None,
    dtype: torch.dtype,
    mode: KernelMode = DEFAULT_MODE,
) -> tuple[Tensor, Tensor]:
    """C and S, [T, 2 * half] each, of positions [3, T], whole or not, under frequencies [half] float32.

    axes [half] int64 names the axis of each frequency; None: all follow the first axis (text models).
    """
    if positions.dim() != 2 or positions.shape[0] != 3:
        raise ValueError(f"positions are [3, T], not {tuple(positions.shape)}")
    if frequencies.dim() != 1 or frequencies.dtype != torch.float32:
        raise ValueError(
            f"frequencies are [half] float32, not {tuple(frequencies.shape)} {frequencies.dtype}"
        )
    if axes is not None and (axes.shape != frequencies.shape or axes.dtype != torch.int64):
        raise ValueError(f"axes are one int64 per frequency, not {tuple(axes.shape)} {axes.dtype}")
    if use_triton("rotary_angles", positions, mode):
        return rotary_angles_triton(positions, frequencies, axes, dtype, mode.pdl)
    return rotary_angles_reference(positions, frequencies, axes, dtype)


def rotary_angles_triton(
    positions: Tensor,
    frequencies: Tensor,
    axes: Tensor | None,
    dtype: torch.dtype,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    tokens, half = positions.shape[1], len(frequencies)
    if positions.stride(1) != 1:
        raise ValueError(f"each axis of the positions must be dense, not of strides {positions.stride()}")
    cos = torch.empty(tokens, 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty(tokens, 2 * half, dtype=dtype, device=positions.device)
    if tokens:
        _angles_kernel[(up(tokens, LINES),)](
            positions, frequencies, frequencies if axes is None else axes, cos, sin, tokens,
            positions.stride(0), HALF=half, HALF_UP=power_of_two(half), LINES=LINES,
            AXES=axes is not None, num_warps=4, **pdl_options(pdl),
        )  # fmt: skip
    return cos, sin


def rotary_angles_reference(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if axes is None:
        angles = positions[0].float()[:, None] * frequencies
    else:
        angles = positions.float().t().index_select(1, axes) * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """Rotate x [T, heads, dim] by C and S [T, dim]; gives a new tensor of x's dtype.

    Computed in the wider of x's and the angles' dtypes.
    """
    if x.dim() != 3 or x.shape[-1] % 2:
        raise ValueError(f"apply_rotary takes [T, heads, even dim], not {tuple(x.shape)}")
    if cos.shape != (x.shape[0], x.shape[-1]) or sin.shape != cos.shape:
        raise ValueError(
            f"apply_rotary of {tuple(x.shape)} with angles {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if use_triton("rotary", x, mode):
        return apply_rotary_triton(x, cos, sin, pdl=mode.pdl)
    return apply_rotary_reference(x, cos, sin)


def apply_rotary_triton(x: Tensor, cos: Tensor, sin: Tensor, lines: int = LINES, pdl: bool = False) -> Tensor:
    """Bytes: x read and written once, the angles once per token. ViT of Qwen3-VL-8B, 4,096 patches, q and k
    of 16 heads of 72 in bf16: 40 MB, 9 us at the copy ceiling; the reference moves about three times that."""
    if x.stride(2) != 1:
        raise ValueError(f"rotation of heads that are not dense: strides {x.stride()}")
    if not (cos.is_contiguous() and sin.is_contiguous()) or cos.dtype != sin.dtype:
        raise ValueError("the angles must be contiguous and of one dtype")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, dim = x.shape
    lines = power_of_two(min(lines, heads))
    if tokens:
        _rotary_kernel[(tokens, up(heads, lines))](
            x, cos, sin, out, heads, x.stride(0), X_HEAD=x.stride(1), DIM=dim,
            HALF_UP=power_of_two(dim // 2), LINES=lines, num_warps=4, **pdl_options(pdl),
        )  # fmt: skip
    return out


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos[:, None] + swapped * sin[:, None]).to(x.dtype)
