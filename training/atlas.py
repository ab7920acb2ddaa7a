"""Makes `src/saccade/tools/evaluation/data/atlas.npz`: one signed-distance cell per glyph and per shape.

    python -m training.atlas FOLDER_WITH_FONT_FILES

Needs scipy (for the distance transform) and Pillow; run once, the result is shipped. Every font is
redistributable: see src/saccade/tools/evaluation/data/FONTS.md."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import distance_transform_edt  # type: ignore[import-not-found,unused-ignore]

EM, CELL_W, CELL_H, BASELINE = 36, 44, 48, 36  # atlas pixels
OVER = 8  # supersampling of the outline before the distance is taken
CHARS = [chr(c) for c in range(33, 127)]

TRAIN = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSansMono",
    "Lato-Regular",
    "Lato-Bold",
    "Roboto-Regular",
    "RobotoCondensed-Regular",
    "Roboto-Italic",
    "FiraCode-Regular",
    "Caladea-Regular",
    "Vollkorn-Regular",
    "Quicksand-Medium",
    "Roboto-Bold",
    "Lato-Italic",
    "Caladea-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSerif-Bold",
    "DejaVuSansCondensed",
    "DejaVuSansMono-Bold",
    "Lato-Medium",
    "Lato-Semibold",
    "Roboto-Light",
    "Roboto-Medium",
    "RobotoCondensed-Bold",
    "FiraCode-Bold",
    "Vollkorn-Bold",
    "Quicksand-Bold",
    "Caladea-Italic",
    "Comfortaa-Regular",
)
EVAL = (
    "OpenSans-Regular",
    "OpenSans-Semibold",
    "Carlito-Regular",
    "Carlito-Bold",
    "Inconsolata",
    "Cantarell-Regular",
)
SHAPES = (
    "circle",
    "square",
    "triangle",
    "star",
    "heart",
    "diamond",
    "cross",
    "ring",
    "moon",
    "hexagon",
    "arrow",
)
SIDE = 36  # atlas pixels across a shape


def distance(mask: np.ndarray) -> np.ndarray:
    """Signed distance in atlas pixels (inside positive), sampled at cell centres, as 128 + 16 d in uint8."""
    inside = distance_transform_edt(mask) - 0.5 * (mask > 0)
    outside = distance_transform_edt(~mask) - 0.5 * (mask == 0)
    d = (inside - outside) / OVER
    d = d.reshape(CELL_H, OVER, CELL_W, OVER)[
        :, OVER // 2 - 1 : OVER // 2 + 1, :, OVER // 2 - 1 : OVER // 2 + 1
    ].mean((1, 3))
    return np.clip(np.rint(128 + 16 * d), 0, 255).astype(np.uint8)


def glyph_cells(path: Path) -> tuple[np.ndarray, np.ndarray]:
    font = ImageFont.truetype(str(path), EM * OVER)
    cells, advances = [], []
    for char in CHARS:
        advance = font.getlength(char) / OVER
        image = Image.new("L", (CELL_W * OVER, CELL_H * OVER), 0)
        left = (CELL_W - advance) / 2 * OVER
        ImageDraw.Draw(image).text((left, BASELINE * OVER), char, fill=255, font=font, anchor="ls")
        cells.append(distance(np.asarray(image) >= 128))
        advances.append(advance / EM)
    advances.append(font.getlength(" ") / OVER / EM)
    return np.stack(cells), np.array(advances, np.float32)


def shape_mask(name: str) -> np.ndarray:
    width, height = CELL_W * OVER, CELL_H * OVER
    y, x = np.mgrid[0:height, 0:width]
    u = (x + 0.5 - width / 2) / (SIDE * OVER / 2)  # -1..1 across the shape
    v = (y + 0.5 - height / 2) / (SIDE * OVER / 2)
    r = np.hypot(u, v)
    if name in ("triangle", "star", "hexagon", "arrow"):
        points: list[tuple[float, float]]
        if name == "triangle":
            points = [(0, -0.95), (0.98, 0.8), (-0.98, 0.8)]
        elif name == "hexagon":
            points = [(math.cos(math.pi / 3 * i), math.sin(math.pi / 3 * i)) for i in range(6)]
        elif name == "arrow":
            points = [(-1, -0.32), (0.1, -0.32), (0.1, -0.85), (1, 0), (0.1, 0.85), (0.1, 0.32), (-1, 0.32)]
        else:
            points = [
                (
                    (1.0 if i % 2 == 0 else 0.42) * math.sin(math.pi / 5 * i),
                    -(1.0 if i % 2 == 0 else 0.42) * math.cos(math.pi / 5 * i),
                )
                for i in range(10)
            ]
        image = Image.new("L", (width, height), 0)
        scale = SIDE * OVER / 2
        ImageDraw.Draw(image).polygon(
            [(px * scale + width / 2, py * scale + height / 2) for px, py in points], fill=255
        )
        return np.asarray(image) >= 128
    w, t = u * 1.15, -v * 1.15 + 0.2
    masks = {
        "circle": r <= 1,
        "square": np.maximum(abs(u), abs(v)) <= 0.88,
        "heart": (w * w + t * t - 1) ** 3 - w * w * t * t * t <= 0,
        "diamond": abs(u) * 1.25 + abs(v) <= 1,
        "cross": ((abs(u) <= 0.32) & (abs(v) <= 1)) | ((abs(v) <= 0.32) & (abs(u) <= 1)),
        "ring": (r <= 1) & (r >= 0.6),
        "moon": (r <= 1) & (np.hypot(u - 0.5, v) >= 0.85),
    }
    return masks[name]


def main() -> None:
    folder = Path(sys.argv[1])
    files = {p.stem: p for p in [*folder.rglob("*.ttf"), *folder.rglob("*.otf")]}
    cells, advances = [], []
    for name in (*TRAIN, *EVAL):
        glyphs, advance = glyph_cells(files[name])
        cells.append(glyphs)
        advances.append(advance)
    shapes = np.stack([distance(shape_mask(name)) for name in SHAPES])
    out = Path(__file__).parents[1] / "src/saccade/tools/evaluation/data/atlas.npz"
    np.savez_compressed(
        out,
        glyphs=np.concatenate(cells),
        shapes=shapes,
        advances=np.stack(advances),
        train=len(TRAIN),
        fonts=np.array([*TRAIN, *EVAL]),
        shape_names=np.array(SHAPES),
    )
    print(out, out.stat().st_size)


if __name__ == "__main__":
    main()
