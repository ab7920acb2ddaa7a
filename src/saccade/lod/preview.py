"""The result of a LOD preview: JSON values and annotated images."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.lod.draw import annotate
from saccade.lod.types import SCORERS, Map, RelevanceMaps, ZoomChoice
from saccade.request import Media, Request, ZoomResult


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
