"""The texture of an image: 13 channels per pixel, computed without the model.

Input uint8 [height, width, 3]; output float32 [13, h, w] on the same device, at most LONGEST along a side.

    0-2   red, green, blue                0..1
    3, 4  L*, a* of CIELAB                / 100
    5-7   Sobel of L*: x, y, magnitude    per pixel
    8, 9  y, x position                   -1..1
    10    eccentricity                    0..1: distance from the centre
    11    local entropy of L*             0..1: how many shades a neighbourhood has
    12    likeness to text                0..1: edges in all directions
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.dispatch import DEFAULT_MODE, KernelMode, use_triton
from saccade.kernels.vision.texture import LEAST, Shades, channels_triton, shrink_triton

LONGEST = 768  # pixels; bounds the cost
CHANNELS = (
    *("red", "green", "blue", "lightness", "green_red", "edge_x", "edge_y", "edge"),
    *("y", "x", "eccentricity", "entropy", "text"),
)
LIGHT, GREEN_RED, EDGE_X, EDGE_Y, EDGE, ENTROPY, TEXT = 3, 4, 5, 6, 7, 11, 12
SHADES = 8  # bins of L* for the entropy
PATCH = 16  # pixels along the neighbourhood of entropy and text
ROOTS = 4095
FAINT = 1e-3  # squared change of L*/100 per pixel: half of `text`
STEP = 4  # stride in pixels of entropy and text
# linear RGB (D65) to X / white and Y
_X = (0.4339, 0.3762, 0.1899)
_Y = (0.2126, 0.7152, 0.0722)


def texture(image: Tensor, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """The 13 channels of one image."""
    return channels(to_working_size(image, mode), mode)


def channels(colour: Tensor, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """The 13 channels of an image at its working size. Copies nothing from the host, so that a CUDA graph can
    capture it after a first run."""
    _, height, width = colour.shape
    if use_triton("texture", colour, mode) and min(height, width) >= LEAST:
        return channels_triton(colour, shades(colour.device))
    light, green_red = _lab(colour)
    gx, gy = _sobel(light)
    y = torch.linspace(-1, 1, height, device=colour.device) if height > 1 else colour.new_zeros(1)
    x = torch.linspace(-1, 1, width, device=colour.device) if width > 1 else colour.new_zeros(1)
    places = torch.stack([y[:, None].expand(height, width), x[None].expand(height, width)])
    off = places.square().sum(0, keepdim=True).div(2).sqrt()
    edges = torch.stack([gx, gy, (gx.square() + gy.square()).sqrt()])
    fine = [
        F.interpolate(one[None, None], size=(height, width), mode="bilinear", align_corners=False)[0]
        for one in (_entropy(light), _text(gx, gy))
    ]
    return torch.cat([colour, light[None], green_red[None], edges, places, off, *fine])


def to_working_size(image: Tensor, mode: KernelMode = DEFAULT_MODE) -> Tensor:
    """The image as float32 [3, h, w] in 0..1, downscaled to LONGEST."""
    size = working_size(image.shape[0], image.shape[1])
    if use_triton("texture", image, mode):
        return shrink_triton(image, size)
    colour = image.permute(2, 0, 1).float().div_(255)
    if size == colour.shape[1:]:
        return colour
    return F.interpolate(colour[None], size=size, mode="area")[0]


def working_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of the texture."""
    longest = max(height, width)
    if longest <= LONGEST:
        return height, width
    return max(1, round(height * LONGEST / longest)), max(1, round(width * LONGEST / longest))


def _lab(colour: Tensor) -> tuple[Tensor, Tensor]:
    """L* and a*, each / 100, by lookup tables: 256 shades, then ROOTS + 1 steps of the cube root."""
    linear = _linear(colour.device)[(colour * 255).round().int()]
    root = _root(colour.device)
    x = _X[0] * linear[0] + _X[1] * linear[1] + _X[2] * linear[2]
    y = _Y[0] * linear[0] + _Y[1] * linear[1] + _Y[2] * linear[2]
    fx, fy = (root[(t * ROOTS).round().int().clamp(max=ROOTS)] for t in (x, y))
    return 1.16 * fy - 0.16, 5.0 * (fx - fy)


@cache  # per device: building a table takes six launches
def _linear(device: torch.device) -> Tensor:
    """Linear light of the 256 shades of sRGB."""
    shade = torch.arange(256, device=device) / 255
    return torch.where(shade <= 0.04045, shade / 12.92, ((shade + 0.055) / 1.055).pow(2.4))


@cache
def _root(device: torch.device) -> Tensor:
    """CIELAB's cube root with its linear part near zero, at ROOTS + 1 steps of 0..1."""
    t = torch.arange(ROOTS + 1, device=device) / ROOTS
    return torch.where(t > 0.008856, t.clamp(min=1e-6).pow(1 / 3), t * 7.787 + 16 / 116)


def shades(device: torch.device) -> Shades:
    """Lookup tables and constants for the Triton kernels."""
    return Shades(_linear(device), _root(device), _X, _Y, SHADES, FAINT)


def _sobel(light: Tensor) -> tuple[Tensor, Tensor]:
    """Horizontal and vertical gradient of lightness per pixel, with replicated borders."""
    padded = F.pad(light[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    across = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    return (down[:, 2:] - down[:, :-2]) / 8, (across[2:] - across[:-2]) / 8


def _around(values: Tensor, patch: int = PATCH, every: int = STEP) -> Tensor:
    """Means [n, h', w'] over neighbourhoods of `patch` pixels, every few pixels."""
    size = [min(patch, side) for side in values.shape[1:]]
    step = [min(every, side) for side in size]
    small = F.avg_pool2d(values[None], step, step, ceil_mode=True, count_include_pad=False)
    wide = [max(1, s // t) // 2 * 2 + 1 for s, t in zip(size, step, strict=True)]
    wide = [min(w, (side - 1) // 2 * 2 + 1) for w, side in zip(wide, small.shape[2:], strict=True)]
    pad = [w // 2 for w in wide]
    return F.avg_pool2d(small, wide, 1, pad, count_include_pad=False)[0]


def _entropy(light: Tensor) -> Tensor:
    """Normalised entropy of the shades around each pixel, on every other pixel."""
    light = light[::2, ::2]
    bins = torch.arange(SHADES, device=light.device, dtype=light.dtype)[:, None, None]
    level = (light * SHADES - 0.5).clamp(0, SHADES - 1)
    share = _around(
        (1 - (level - bins).abs()).clamp(min=0), PATCH // 2, STEP // 2
    )  # a shade between two bins counts for both
    return -(share * share.clamp(min=1e-9).log()).sum(0) / math.log(SHADES)


def _text(gx: Tensor, gy: Tensor) -> Tensor:
    """Evenness of edge directions around each pixel, weighted by edge energy: text has edges in all
    directions, a line has one."""
    xx, yy, xy = _around(torch.stack([gx * gx, gy * gy, gx * gy]))
    energy = xx + yy
    one_way = ((xx - yy).square() + 4 * xy.square()).sqrt() / (energy + 1e-9)
    mixed: Tensor = (1 - one_way).clamp(0, 1) * energy / (energy + FAINT)
    return mixed
