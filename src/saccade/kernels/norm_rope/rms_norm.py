"""RMS norm:  y = w * cast(x / sqrt(mean(x^2) + eps)),  the fraction in float32, the product in x's dtype."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis of x [..., d] and scale it by weight [d], or [heads, d] per head."""
    if weight.dim() not in (1, 2) or x.shape[-weight.dim() :] != weight.shape:
        raise ValueError(
            f"rms_norm of {tuple(x.shape)} cannot be scaled by a weight of {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"rms_norm of {x.dtype} with a weight of {weight.dtype}; they must be the same")
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
