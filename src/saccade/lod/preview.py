"""The result of a LOD preview: JSON values, and images drawn with their relevance and zoomed views."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from saccade.lod.types import SCORERS, Map, RelevanceMaps, ZoomChoice
from saccade.request import Media, Pixels, Request, ZoomResult

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


@dataclass(frozen=True)
class Preview:
    """The previewed images, in prompt order."""

    images: tuple[Media, ...]
    budget: int  # visual tokens
    zoomed: ZoomResult

    @property
    def visual_tokens(self) -> int:
        """Tokens of all views the images would get."""
        return sum(item.view.tokens for item in self.images) + self.zoomed.visual_tokens

    @property
    def full_tokens(self) -> int:
        return sum(item.full[0] * item.full[1] for item in self.images)

    def png(self, number: int) -> bytes:
        """One image, annotated."""
        drawn = annotate(
            self.images[number].pixels[0], self.zoomed.looks[number], self.zoomed.choices[number]
        )
        file = io.BytesIO()
        drawn.save(file, "PNG")
        return file.getvalue()

    def values(self, *, png: bool) -> dict[str, Any]:
        """The response body; with `png`, annotated images as data URLs too."""
        found = zip(self.images, self.zoomed.looks, self.zoomed.choices, strict=True)
        images = [_image_values(*one) for one in found]
        for number, one in enumerate(images if png else ()):
            one["png"] = "data:image/png;base64," + base64.b64encode(self.png(number)).decode()
        return {
            "budget": self.budget,
            "visual_tokens": self.visual_tokens,
            "full_visual_tokens": self.full_tokens,
            "pictures": images,
        }


def make_preview(request: Request, zoomed: ZoomResult) -> Preview:
    zooming = request.zooming
    slots = zooming.placeholders if zooming is not None else ()
    images = {item.placeholder: item for item in request.media}
    budget = zooming.budget if zooming is not None else 0
    return Preview(tuple(images[slot] for slot in slots), budget, zoomed)


def _image_values(item: Media, look: RelevanceMaps, choice: ZoomChoice) -> dict[str, Any]:
    maps = {name: getattr(look, name) for name in (*SCORERS, "lost")}
    weights = choice.weights
    return {
        "size": list(item.view.box[2:]),
        "full_grid": list(item.full),
        "global_grid": list(item.view.token_grid),
        "regions": [
            {
                "box": list(region.box),
                "grid": list(region.grid),
                "tokens": region.tokens,
                "score": round(region.score, 5),
            }
            for region in choice.regions
        ],
        "gated": choice.gated,
        "tensions": {
            "particularise": round(weights.particularise, 5),
            "explore": round(weights.explore, 5),
            "diversify": round(weights.diversify, 5),
        },
        "weights": dict(zip(SCORERS, (round(one, 5) for one in weights.scorers), strict=True)),
        "maps": {name: _rows(one) for name, one in {**maps, "relevance": choice.relevance}.items()},
    }


def _rows(values: Map) -> list[list[float]]:
    return [[round(float(one), 6) for one in row] for row in np.asarray(values)]


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
