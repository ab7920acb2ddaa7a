"""A needle: a small card with a code in a large busy image, asked for by its colour, a shape on it or a
neighbour."""

from __future__ import annotations

from saccade.tools.evaluation.renderer import SHAPES

from . import words
from .fonts import text_width
from .scene import COLOUR_NAMES, Box, Scene, place_of
from .signs import ink_on, text_size


def _free(scene: Scene, half_w: float, half_h: float, taken: list[Box]) -> Box | None:
    rng = scene.rng
    if half_w * 2 + 4 > scene.width or half_h * 2 + 4 > scene.height:
        return None
    for _ in range(12):
        x, y = (
            rng.uniform(half_w + 2, scene.width - half_w - 2),
            rng.uniform(half_h + 2, scene.height - half_h - 2),
        )
        box = (x - half_w, y - half_h, x + half_w, y + half_h)
        if not any(
            box[0] < o[2] + 4 and o[0] < box[2] + 4 and box[1] < o[3] + 4 and o[1] < box[3] + 4 for o in taken
        ):
            taken.append(box)
            return box
    return None


def needle(scene: Scene, level: float) -> None:
    """Cards with codes among clutter: shapes, stray words, lines."""
    rng = scene.rng
    scene.background(dark=0.3, grain=16)
    area = scene.width * scene.height
    size = text_size(rng, level, low=11.0, high=20.0)
    taken: list[Box] = []
    colours = list(COLOUR_NAMES)
    rng.shuffle(colours)
    shapes = list(range(len(SHAPES)))
    rng.shuffle(shapes)
    cards: list[tuple[str, str | None, str, Box]] = []
    for _ in range(rng.randint(1, 2 if level < 0.4 else 5)):
        card = _card(scene, size * rng.uniform(0.95, 1.15), taken, colours, shapes)
        if card:
            cards.append(card)
    _clutter(scene, taken, int(area / rng.uniform(9000, 26000)))
    ask_needle(scene, cards, colours, shapes)


def _card(
    scene: Scene, size: float, taken: list[Box], colours: list[str], shapes: list[int]
) -> tuple[str, str | None, str, Box] | None:
    rng = scene.rng
    font = scene.font()
    code = words.code(rng, scene.split)
    wide = text_width(code, font, size)
    marked = rng.random() < 0.45 and bool(shapes)
    badge = size * 0.75 if marked else 0.0
    half_w, half_h = wide / 2 + size * 0.6 + badge * 1.3, size * 0.95
    box = _free(scene, half_w, half_h, taken)
    if box is None:
        return None
    colour = colours.pop()
    shade = scene.shade(colour)
    edge = ink_on(rng, scene.first)
    scene.box(box[0], box[1], box[2], box[3], edge)
    scene.box(box[0] + 1, box[1] + 1, box[2] - 1, box[3] - 1, shade)
    x = box[0] + size * 0.6
    shape = None
    middle = (box[1] + box[3]) / 2
    if marked:
        index = shapes.pop()
        shape = SHAPES[index]
        ink = next(
            c
            for c in ("black", "white", "yellow")
            if sum(abs(a - b) for a, b in zip(shade, _rgb(c), strict=True)) > 200
        )
        scene.shape(index, x + badge * 0.9, middle, badge, ink)
        x += badge * 2.6
    scene.text(x, middle, size, code, font, ink_on(rng, shade))
    return (colour, shape, code, box)


def _rgb(colour: str) -> tuple[int, int, int]:
    return {"black": (25, 25, 25), "white": (250, 250, 250), "yellow": (245, 212, 40)}[colour]


def _clutter(scene: Scene, taken: list[Box], count: int) -> None:
    """Shapes without cards and words without numbers, so that a code is always on a card."""
    rng = scene.rng
    side = min(scene.width, scene.height)
    usable = [c for c in COLOUR_NAMES if scene.contrasts(c)]
    for _ in range(min(count, 60)):
        draw = rng.random()
        if draw < 0.6:
            radius = rng.uniform(6, max(8.0, side * 0.06))
            box = _free(scene, radius, radius, taken)
            if box:
                shape = rng.randrange(len(SHAPES))
                scene.shape(
                    shape,
                    (box[0] + box[2]) / 2,
                    (box[1] + box[3]) / 2,
                    radius,
                    rng.choice(usable),
                    rng.randint(0, 359),
                )
        elif draw < 0.85:
            size, font = rng.uniform(11, 22), scene.font()
            text = words.thing(rng, scene.split)
            box = _free(scene, text_width(text, font, size) / 2 + 2, size * 0.55, taken)
            if box:
                scene.text(box[0] + 2, (box[1] + box[3]) / 2, size, text, font, ink_on(rng, scene.first))
        else:
            x, y = rng.uniform(0, scene.width), rng.uniform(0, scene.height)
            long = rng.uniform(10, 40)
            box = (x - long, y - 3, x + long, y + 3)
            if not any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in taken):
                scene.line(x - long, y, x + long, y, rng.uniform(1, 3), scene.shade(rng.choice(usable)))


def ask_needle(
    scene: Scene, cards: list[tuple[str, str | None, str, Box]], colours: list[str], shapes: list[int]
) -> None:
    rng = scene.rng
    for colour, shape, code, box in cards:
        question = rng.choice(
            (
                f"What is the code on the {colour} card?",
                f"Which code is on the {colour} card?",
                f"Read the {colour} card.",
                f"What does the small {colour} card say?",
            )
        )
        scene.ask("needle", question, code, box)
        if shape:
            question = rng.choice(
                (
                    f"What is the code next to the {shape} on a card?",
                    f"Which code is on the card with the {shape}?",
                    f"Read the card with the {shape}.",
                )
            )
            scene.ask("needle", question, code, box)
        if rng.random() < 0.3:
            scene.ask("colour", f"What colour is the card with the code {code}?", colour, box)
        place = place_of((box[0] + box[2]) / 2, (box[1] + box[3]) / 2, scene.width, scene.height)
        if place and rng.random() < 0.3:
            scene.ask("position", f"Where is the {colour} card?", place, box)
    if len(cards) == 1:
        scene.ask(
            "needle",
            rng.choice(("What is the code on the card?", "Which code is on the small card?")),
            cards[0][2],
            cards[0][3],
        )
    elif cards:
        scene.ask("count", "How many cards are there?", str(len(cards)))
    missing = rng.choice(colours)
    question = rng.choice((f"What is the code on the {missing} card?", f"Read the {missing} card."))
    scene.ask("absent", question, f"There is no {missing} card.")
    yes = rng.random() < 0.5 and bool(cards)
    colour = rng.choice(cards)[0] if yes else missing
    scene.ask(
        "yes_no", f"Is there {'an' if colour[0] == 'o' else 'a'} {colour} card?", "yes" if yes else "no"
    )
