"""Draws a LOD decision: the image under its relevance map, the zoomed views, the scorers' maps below."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from saccade.lod.types import SCORERS, Map, RelevanceMaps, ZoomChoice

LONGEST = 1024  # longest side of the drawn image in pixels
SHORTEST = 320  # a smaller image is enlarged so that the labels fit
STRIP = 4  # maps below
LINE = 16  # height of a text line in pixels
# from cold to hot: position, red, green, blue
HEAT = (
    (0.0, 20, 20, 60),
    (0.35, 60, 40, 160),
    (0.65, 220, 70, 90),
    (0.85, 250, 170, 40),
    (1.0, 255, 250, 180),
)
FRAME = (0, 230, 120)
INK, PAPER = (235, 235, 240), (24, 24, 30)

Pixels = NDArray[np.uint8]


def annotate(pixels: Pixels, look: RelevanceMaps, choice: ZoomChoice) -> Image.Image:
    """`pixels` is the source, uint8 [height, width, 3]."""
    height, width = pixels.shape[:2]
    scale = min(LONGEST / max(width, height), max(1.0, SHORTEST / max(width, height)))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    wide = max(size[0], SHORTEST)
    strip = wide // STRIP
    words = _words(choice)
    canvas = Image.new("RGB", (wide, size[1] + strip + LINE * (len(words) + 1) + 8), PAPER)
    canvas.paste(_heated(pixels, choice.relevance, size), (0, 0))
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default()
    for number, region in enumerate(choice.regions, 1):
        x0, y0, x1, y1 = (value * scale for value in region.box)
        draw.rectangle((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), outline=FRAME, width=2)
        label = f"{number}: {region.grid[0]}x{region.grid[1]}={region.tokens}  {region.score:.2f}"
        left, top = min(x0 + 3, wide - 6 * len(label)), max(0.0, y0 - 13 if y0 >= 13 else y0 + 2)
        draw.rectangle((left - 2, top, left + 6 * len(label), top + 12), fill=PAPER)
        draw.text((left, top), label, fill=FRAME, font=font)
    maps = [(name, getattr(look, name)) for name in (*SCORERS, "lost")]
    for place, (name, values) in enumerate(maps):
        side = Image.fromarray(_colours(values)).resize((strip - 4, strip - 4), Image.Resampling.NEAREST)
        canvas.paste(side, (place * strip + 2, size[1] + LINE + 2))
        draw.text((place * strip + 3, size[1] + 2), name, fill=INK, font=font)
    for line, label in enumerate(words):
        draw.text((4, size[1] + strip + LINE * (line + 1) + 4), label, fill=INK, font=font)
    return canvas


def _words(choice: ZoomChoice) -> list[str]:
    weights = choice.weights
    label = [
        f"particularise {weights.particularise:.2f}  explore {weights.explore:.2f}"
        f"  diversify {weights.diversify:.2f}",
        "weights " + "  ".join(f"{n} {w:.2f}" for n, w in zip(SCORERS, weights.scorers, strict=True)),
        f"{len(choice.regions)} zoomed, {choice.spent} tokens",
    ]
    return [*label, f"not zoomed: {choice.gated}"] if choice.gated else label


def _heated(pixels: Pixels, relevance: Map, size: tuple[int, int]) -> Image.Image:
    """The image blended with its relevance as a heat map."""
    source = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, Image.Resampling.BICUBIC)
    heat = Image.fromarray(_colours(relevance)).resize(size, Image.Resampling.BICUBIC)
    cover = Image.fromarray((90 + 60 * _unit(relevance)).astype(np.uint8)).resize(size)
    return Image.composite(heat, source, cover)


def _unit(values: Map) -> Map:
    """Square root of the map scaled to 0..1, so that weak regions stay visible."""
    top = float(values.max(initial=0.0))
    return np.sqrt(np.clip(values / top, 0, 1)).astype(np.float32) if top > 0 else np.zeros_like(values)


def _colours(values: Map) -> Pixels:
    stops = np.array(HEAT, np.float64)
    unit = _unit(values)
    channels = [np.interp(unit, stops[:, 0], stops[:, channel]) for channel in (1, 2, 3)]
    return np.stack(channels, -1).round().astype(np.uint8)
