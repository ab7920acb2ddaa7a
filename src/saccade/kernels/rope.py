"""Rotary positions: angles from positions, and the rotation of queries and keys.

    angle[t, j] = position[t] * frequency[j]              j < half = head_dim / 2
    y[j]        = x[j] * cos(angle[j]) - x[j + half] * sin(angle[j])
    y[j + half] = x[j + half] * cos(angle[j]) + x[j] * sin(angle[j])

which is  y = x * C + swap(x) * S  with swap exchanging the halves, C = (cos, cos) and S = (-sin, sin).

With three axes (time, row, column) each frequency follows one axis: `interleaved_axes` gives T R C T R C ...
until the row and column shares are used up, then T.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def interleaved_axes(section: Sequence[int], half: int) -> list[int]:
    """Which axis each of the `half` frequencies follows, for a share of (time, row, column) frequencies."""
    if len(section) != 3 or sum(section) != half or min(section) < 0:
        raise ValueError(f"the sections {list(section)} must be three shares of the {half} frequencies")
    axes = [0] * half
    for axis in (1, 2):
        for index in range(axis, min(3 * section[axis], half), 3):
            axes[index] = axis
    return axes


def rotary_angles(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """C and S, [T, 2 * half] each, of positions [3, T] under frequencies [half] float32.

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
    if axes is None:
        angles = positions[0].float()[:, None] * frequencies
    else:
        angles = positions.float().t().index_select(1, axes) * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim] by C and S [T, dim]; gives a new tensor of x's dtype.

    Computed in the wider of x's and the angles' dtypes.
    """
    if x.dim() != 3 or x.shape[-1] % 2:
        raise ValueError(f"apply_rotary takes [T, heads, even dim], not {tuple(x.shape)}")
    if cos.shape != (x.shape[0], x.shape[-1]) or sin.shape != cos.shape:
        raise ValueError(
            f"apply_rotary of {tuple(x.shape)} with angles {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    return apply_rotary_reference(x, cos, sin)


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos[:, None] + swapped * sin[:, None]).to(x.dtype)
