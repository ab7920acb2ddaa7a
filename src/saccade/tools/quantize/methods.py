"""The calibrated methods: SmoothQuant, AWQ's scale and clip search, and GPTQ's error compensation.

All errors are those of a layer's output on the calibration data, by the Gram matrix of its inputs.
"""

import torch
from torch import Tensor

from saccade.tools.quantize.linear import InputStatistics
from saccade.tools.quantize.schemes import Scheme

SMOOTHING = 0.5  # share of the activations' range that SmoothQuant moves into the weights
AWQ_STEPS = 20
CLIPS = tuple(1 - 0.04 * step for step in range(13))  # of a group's largest weight
DAMPING = 0.01  # of the Gram matrix's mean diagonal, added to it
COLUMNS = 128  # of a block that GPTQ compensates at once
LEAST = 1e-5


def output_error(error: Tensor, gram: Tensor) -> float:
    """Squared error of the outputs for an error [N, K] of the weights."""
    return float(((error @ gram) * error).sum())


def smooth_scale(weight: Tensor, inputs: InputStatistics) -> Tensor:
    """[K]: what SmoothQuant divides the inputs by and multiplies the weights by."""
    x, w = inputs.largest.clamp_min(LEAST), weight.abs().amax(0).clamp_min(LEAST)
    return _centred(x**SMOOTHING / w ** (1 - SMOOTHING))


def awq_scale(weight: Tensor, mean: Tensor, gram: Tensor, scheme: Scheme, stored: torch.dtype) -> Tensor:
    """[K]: the powers of the mean inputs, and of the mean weights or not, whose rounding error is least."""
    x, w = mean.clamp_min(LEAST), _relative_size(weight, scheme.group).clamp_min(LEAST)
    best = torch.ones_like(x)
    least = output_error(round_to_nearest(weight, scheme, stored) - weight, gram)
    for step in range(AWQ_STEPS + 1):
        power = step / AWQ_STEPS
        for scale in (_centred(x**power), _centred(x**power / w ** (1 - power))):
            rounded = round_to_nearest(weight * scale, scheme, stored) / scale
            error = output_error(rounded - weight, gram)
            if error < least:
                best, least = scale, error
    return best


def _relative_size(weight: Tensor, group: int) -> Tensor:
    """[K]: the mean over rows of |w| relative to the largest of its group."""
    size = weight.abs().view(len(weight), -1, group)
    relative = size / size.amax(2, keepdim=True).clamp_min(LEAST)
    return relative.mean(0).flatten()


def _centred(scale: Tensor) -> Tensor:
    scale = scale / (scale.max() * scale.min()).sqrt()
    return scale if bool(scale.isfinite().all()) else torch.ones_like(scale)


def round_to_nearest(weight: Tensor, scheme: Scheme, stored: torch.dtype) -> Tensor:
    """The weights after rounding."""
    scale = scheme.expand(scheme.scales(weight, stored), weight.shape)
    return scheme.round(weight, scale) * scale


def clipped_scales(weight: Tensor, gram: Tensor, scheme: Scheme, stored: torch.dtype) -> Tensor:
    """[N, K / group]: of each group the scale with the least error, which may clip its largest weights."""
    groups = weight.reshape(len(weight), -1, scheme.group).transpose(0, 1)  # [groups, N, group]
    starts = range(0, weight.shape[1], scheme.group)
    blocks = torch.stack([gram[at : at + scheme.group, at : at + scheme.group] for at in starts])
    widest = scheme.scales(weight, stored)
    best, least = widest, torch.full_like(widest, torch.inf)
    for clip in CLIPS:
        scale = scheme.stored_scale(widest * clip, stored)
        wide = scale.t()[:, :, None]
        error = scheme.round(groups, wide) * wide - groups
        squared = ((error @ blocks) * error).sum(2).t()
        best, least = torch.where(squared < least, scale, best), torch.minimum(squared, least)
    return best


class ErrorCompensation:
    """GPTQ: rounds column by column, and moves the error of each to the columns not yet rounded. Columns with
    the largest inputs come first; their groups stay where they are (`actorder` static)."""

    def __init__(self, gram: Tensor) -> None:
        gram = gram.clone()
        diagonal = gram.diagonal()
        diagonal[diagonal == 0] = diagonal.mean().clamp_min(LEAST)
        self._order = torch.argsort(diagonal, descending=True, stable=True)
        gram = gram[self._order][:, self._order]
        gram.diagonal().add_(DAMPING * diagonal.mean())
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram.double()))
        self._factor = torch.linalg.cholesky(inverse, upper=True).float()

    def round(self, weight: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
        """The values [N, K]; `scale` is expanded."""
        order, factor = self._order, self._factor
        weight, scale = weight[:, order], scale.expand_as(weight)[:, order]
        values = torch.empty_like(weight)
        columns = weight.shape[1]
        for start in range(0, columns, COLUMNS):
            stop = min(start + COLUMNS, columns)
            errors = torch.zeros_like(weight[:, start:stop])
            for at in range(start, stop):
                values[:, at] = scheme.round(weight[:, at], scale[:, at])
                error = (weight[:, at] - values[:, at] * scale[:, at]) / factor[at, at]
                weight[:, at:stop] -= error[:, None] * factor[at, at:stop]
                errors[:, at - start] = error
            weight[:, stop:] -= errors @ factor[start:stop, stop:]
        return torch.empty_like(values).index_copy_(1, order, values)
