"""A scene: what an image shows, as primitives to draw and questions with known answers. No pixels here.

Coordinates are pixels, x right, y down. Primitives are drawn in the order they were added, all text last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from saccade.tools.evaluation.renderer import (
    BOX,
    COS,
    FIRST_SHAPE,
    SECTOR,
    SHAPE_SIDE,
    SIN,
    SPRITE,
    Colour,
    TextRun,
)

from .fonts import fonts, text_width

Box = tuple[float, float, float, float]

COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "orange": (245, 135, 30),
    "yellow": (245, 212, 40),
    "green": (50, 160, 70),
    "blue": (40, 90, 210),
    "purple": (130, 60, 170),
    "pink": (245, 130, 185),
    "brown": (130, 80, 45),
    "black": (25, 25, 25),
    "white": (250, 250, 250),
    "gray": (135, 135, 135),
    "cyan": (60, 200, 215),
}
COLOUR_NAMES = tuple(COLOURS)
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")

ANSWER, ALSO = 0.6, 0.2  # of the evidence: what says the answer beside what names it; what stands elsewhere


@dataclass(frozen=True, slots=True)
class Ask:
    """A question about a scene. `box` is where the evidence lies; None where it is the whole image or
    nowhere."""

    task: str
    question: str
    answer: str
    box: Box | None = None
    accepted: tuple[str, ...] = ()
    parts: tuple[tuple[Box, float], ...] = ()  # what of the box says it, and how much of the evidence each is


class Scene:
    """Builder of one image; it draws no pixels."""

    __slots__ = (
        "asks",
        "first",
        "grain",
        "grain_seed",
        "height",
        "held",
        "primitives",
        "rng",
        "runs",
        "second",
        "split",
        "width",
    )

    def __init__(self, rng: Random, split: str, width: int, height: int) -> None:
        self.rng, self.split, self.width, self.height = rng, split, width, height
        self.first: Colour = (255, 255, 255)
        self.second: Colour = (255, 255, 255)
        self.grain = 0  # amplitude of the background's noise, grey levels
        self.grain_seed = rng.getrandbits(31)
        self.primitives: list[
            tuple[float, ...]
        ] = []  # COLUMNS values, then the shape's and the colour's label
        self.runs: list[TextRun] = []
        self.asks: list[Ask] = []
        self.held: dict[Box, tuple[Box, Box]] = {}  # by the box around them: a name, and what it has

    def font(self) -> int:
        return self.rng.choice(fonts(self.split))

    def background(self, dark: float = 0.25, grain: int = 10) -> bool:
        """A light or dark, plain or graded, perhaps grainy ground; True when it is dark."""
        rng = self.rng
        is_dark = rng.random() < dark
        low, high = (15, 60) if is_dark else (205, 255)
        if rng.random() < 0.3:
            level = rng.randint(low, high)
            self.first = self.second = (level, level, level)
        else:
            self.first = (rng.randint(low, high), rng.randint(low, high), rng.randint(low, high))
            graded = rng.random() < 0.4
            self.second = (
                (rng.randint(low, high), rng.randint(low, high), rng.randint(low, high))
                if graded
                else self.first
            )
        self.grain = rng.randint(1, grain) if grain and rng.random() < 0.4 else 0
        return is_dark

    def contrasts(self, colour: str) -> bool:
        """Whether a named colour stands out from the ground."""
        base = COLOURS[colour]
        return (
            min(
                sum(abs(a - b) for a, b in zip(base, ground, strict=True))
                for ground in (self.first, self.second)
            )
            > 150
        )

    def shade(self, colour: str) -> Colour:
        """The named colour, a little off."""
        r, g, b = COLOURS[colour]
        rng = self.rng
        return (
            min(255, max(0, r + rng.randint(-12, 12))),
            min(255, max(0, g + rng.randint(-12, 12))),
            min(255, max(0, b + rng.randint(-12, 12))),
        )

    def box(
        self,
        x0: float,
        y0: float,
        x1: float,
        y1: float,
        colour: Colour,
        corner: float = 0.0,
        opacity: float = 1.0,
    ) -> None:
        self.primitives.append(
            (
                BOX,
                (x0 + x1) / 2,
                (y0 + y1) / 2,
                1.0,
                0.0,
                (x1 - x0) / 2,
                (y1 - y0) / 2,
                corner,
                0.0,
                0.0,
                *colour,
                opacity,
                0,
                0,
            )
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, thick: float, colour: Colour) -> None:
        length = math.sqrt((x1 - x0) ** 2 + (y1 - y0) ** 2) or 1.0
        cos, sin = (x1 - x0) / length, (y1 - y0) / length
        self.primitives.append(
            (
                BOX,
                (x0 + x1) / 2,
                (y0 + y1) / 2,
                cos,
                sin,
                length / 2 + thick / 2,
                thick / 2,
                0.0,
                0.0,
                0.0,
                *colour,
                1.0,
                0,
                0,
            )
        )

    def shape(self, shape: int, cx: float, cy: float, radius: float, colour: str, degrees: int = 0) -> None:
        degrees %= 360
        self.primitives.append(
            (
                SPRITE,
                cx,
                cy,
                COS[degrees],
                SIN[degrees],
                SHAPE_SIDE / 2 / radius,
                FIRST_SHAPE + shape,
                0.0,
                0.0,
                0.0,
                *self.shade(colour),
                1.0,
                shape + 1,
                COLOUR_NAMES.index(colour) + 1,
            )
        )

    def sector(self, cx: float, cy: float, radius: float, start: int, stop: int, colour: Colour) -> None:
        """A slice of a pie from `start` to `stop` degrees, clockwise on the screen."""
        big = 1.0 if stop - start > 180 else 0.0
        a, b = start % 360, stop % 360
        self.primitives.append(
            (SECTOR, cx, cy, big, 0.0, radius, COS[a], SIN[a], COS[b], SIN[b], *colour, 1.0, 0, 0)
        )

    def text(
        self,
        x: float,
        y: float,
        size: float,
        text: str,
        font: int,
        colour: Colour,
        degrees: int = 0,
        align: str = "left",
    ) -> Box:
        """Writes a line whose anchor is (x, y at mid height); gives the box around it."""
        width = text_width(text, font, size)
        cos, sin = COS[degrees % 360], SIN[degrees % 360]
        back = 0.0 if align == "left" else width / 2 if align == "center" else width
        x, y = x - back * cos, y - back * sin
        self.runs.append(TextRun(x, y, size, font, colour, degrees % 360, text.encode()))
        ex, ey, half = x + width * cos, y + width * sin, size * 0.55
        return (min(x, ex) - 2, min(y, ey) - half, max(x, ex) + 2, max(y, ey) + half)

    def hold(self, whole: Box, name: Box, value: Box) -> Box:
        """Remembers what stands in a box that is evidence: between the two there may be nothing."""
        self.held[whole] = name, value
        return whole

    def ask(
        self,
        task: str,
        question: str,
        answer: str,
        box: Box | None = None,
        accepted: tuple[str, ...] = (),
        named: bool = False,
        also: tuple[Box, ...] = (),
    ) -> None:
        """`named`: the answer is the name in the box, not the value. `also`: what else must be seen."""
        parts: tuple[tuple[Box, float], ...] = ()
        if box is not None:
            name, value = self.held.get(box, (box, box))
            rest = 1.0 - ALSO * bool(also)
            parts = (
                (name, rest * (ANSWER if named else 1 - ANSWER)),
                (value, rest * (1 - ANSWER if named else ANSWER)),
                *((other, ALSO / len(also)) for other in also),
            )
        self.asks.append(Ask(task, question, answer, box, accepted, parts))


def around(a: Box, b: Box) -> Box:
    """The smallest box that holds both."""
    return (min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))


def place_of(x: float, y: float, width: float, height: float) -> str | None:
    """The ninth of the image a point lies in, or None near a border between two."""
    column, row = x / width * 3, y / height * 3
    for edge in (1.0, 2.0):
        if abs(column - edge) < 0.16 or abs(row - edge) < 0.16:
            return None
    return PLACES[min(int(row), 2) * 3 + min(int(column), 2)]
