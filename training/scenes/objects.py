"""Scenes of coloured shapes: colour, shape, size, position, counting, relations, yes/no, absence, a
sentence about all."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from saccade.tools.evaluation.renderer import SHAPES

from .scene import COLOUR_NAMES, Box, Scene, place_of

PLURAL = {"cross": "crosses"}
# layouts by split: how shapes are laid out
LAYOUTS = {"train": ("scatter", "scatter", "grid"), "eval": ("scatter", "ring")}


@dataclass(frozen=True, slots=True)
class Thing:
    shape: str
    colour: str
    x: float
    y: float
    radius: float
    big: bool

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def box(self) -> Box:
        r = self.radius
        return (self.x - r, self.y - r, self.x + r, self.y + r)


def plural(shape: str) -> str:
    return PLURAL.get(shape, shape + "s")


def article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _spots(scene: Scene, count: int, reach: float, layout: str) -> list[tuple[float, float]]:
    """Places for the middles of `count` things, each at least 2 reach apart from the others where there is
    room."""
    rng, w, h = scene.rng, scene.width, scene.height
    if layout == "grid":
        columns = max(1, min(int(w / (2 * reach)), 6))
        rows = max(1, min(int(h / (2 * reach)), 6))
        cells = [((c + 0.5) * w / columns, (r + 0.5) * h / rows) for c in range(columns) for r in range(rows)]
        rng.shuffle(cells)
        return cells[:count]
    spots: list[tuple[float, float]] = []
    for _ in range(count * 12):
        x, y = rng.uniform(reach, w - reach), rng.uniform(reach, h - reach)
        if layout == "ring" and abs(x / w - 0.5) < 0.2 and abs(y / h - 0.5) < 0.2:
            continue
        if all((x - a) ** 2 + (y - b) ** 2 > 4 * reach * reach for a, b in spots):
            spots.append((x, y))
            if len(spots) == count:
                break
    return spots


def put_things(scene: Scene, count: int, scale: float = 1.0) -> list[Thing]:
    """Draws up to `count` shapes that do not touch. Few colours and shapes at times, so that counts are
    worth asking."""
    rng = scene.rng
    side = min(scene.width, scene.height) * scale
    usable = [c for c in COLOUR_NAMES if scene.contrasts(c)]
    few = rng.random() < 0.45
    colours = rng.sample(usable, min(len(usable), rng.randint(1, 3))) if few else usable
    shapes = rng.sample(SHAPES, rng.randint(1, 3)) if few else list(SHAPES)
    reach = side * (0.155 if count <= 5 else 0.12 if count <= 8 else 0.1)
    layout = rng.choice(LAYOUTS[scene.split])
    things: list[Thing] = []
    taken: set[str] = set()
    for x, y in _spots(scene, count, reach, layout):
        shape, colour = rng.choice(shapes), rng.choice(colours)
        if not few and f"{colour} {shape}" in taken:
            continue
        taken.add(f"{colour} {shape}")
        big = rng.random() < 0.5
        radius = max(6.0, reach * (rng.uniform(0.72, 0.95) if big else rng.uniform(0.32, 0.5)))
        degrees = rng.randint(-12, 12)
        things.append(Thing(shape, colour, x, y, radius, big))
        scene.shape(SHAPES.index(shape), x, y, radius, colour, degrees)
    return things


def _unique(things: list[Thing]) -> list[Thing]:
    names = [t.name for t in things]
    return [t for t in things if names.count(t.name) == 1]


def ask_colour(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    shapes = [t.shape for t in things]
    only = [t for t in things if shapes.count(t.shape) == 1]
    spelling = rng.choice(("colour", "color"))
    for t in rng.sample(only, min(2, len(only))):
        question = rng.choice(
            (
                f"What {spelling} is the {t.shape}?",
                f"Which {spelling} does the {t.shape} have?",
                f"The {t.shape} is which {spelling}?",
                f"Name the {spelling} of the {t.shape}.",
            )
        )
        scene.ask("colour", question, t.colour, t.box)
    if len(things) == 1:
        scene.ask("colour", f"What {spelling} is the shape?", things[0].colour, things[0].box)
    places = [place_of(t.x, t.y, scene.width, scene.height) for t in things]
    here = [(t, p) for t, p in zip(things, places, strict=True) if p and places.count(p) == 1]
    if here and None not in places:
        t, p = rng.choice(here)
        where = "in the center" if p == "center" else f"at the {p}"
        scene.ask("colour", f"What {spelling} is the shape {where}?", t.colour, t.box)
        scene.ask(
            "shape", rng.choice((f"What shape is {where}?", f"Which shape is {where}?")), t.shape, t.box
        )


def ask_shape(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    colours = [t.colour for t in things]
    only = [t for t in things if colours.count(t.colour) == 1]
    for t in rng.sample(only, min(2, len(only))):
        question = rng.choice(
            (
                f"What shape is {t.colour}?",
                f"What is the {t.colour} thing?",
                f"Which shape is {t.colour}?",
                f"What shape is the {t.colour} one?",
                f"Name the {t.colour} shape.",
            )
        )
        scene.ask("shape", question, t.shape, t.box)
    if len(things) == 1:
        scene.ask("shape", "What shape is this?", things[0].shape, things[0].box)


def ask_size(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    single = _unique(things)
    for t in rng.sample(single, min(1, len(single))):
        if len(things) > 1 and any(o.big != t.big for o in things):
            question = rng.choice(
                (f"Is the {t.name} big or small?", f"What size is the {t.name}, big or small?")
            )
            scene.ask("size", question, "big" if t.big else "small", t.box)
    if len(single) > 1:
        a, b = rng.sample(single, 2)
        if max(a.radius, b.radius) > 1.25 * min(a.radius, b.radius):
            more = rng.random() < 0.5
            winner = max(a, b, key=lambda t: t.radius) if more else min(a, b, key=lambda t: t.radius)
            scene.ask(
                "size",
                f"Which is {'bigger' if more else 'smaller'}, the {a.name} or the {b.name}?",
                winner.name,
                winner.box,
            )
    if len(things) > 1:
        order = sorted(things, key=lambda t: t.radius)
        if order[-1].radius > 1.15 * order[-2].radius:
            question = rng.choice(
                ("What is the biggest shape?", "Which shape is the biggest?", "Name the largest shape.")
            )
            scene.ask("size", question, order[-1].name, order[-1].box)
        if order[0].radius * 1.15 < order[1].radius:
            question = rng.choice(("What is the smallest shape?", "Which shape is the smallest?"))
            scene.ask("size", question, order[0].name, order[0].box)


def ask_position(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    for t in rng.sample(_unique(things), min(2, len(_unique(things)))):
        place = place_of(t.x, t.y, scene.width, scene.height)
        if place:
            question = rng.choice(
                (
                    f"Where is the {t.name}?",
                    f"In which part of the picture is the {t.name}?",
                    f"Where can you see the {t.name}?",
                )
            )
            scene.ask("position", question, place, t.box)


def ask_count(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    if not things:
        return
    question = rng.choice(
        ("How many shapes are there?", "How many shapes are in the picture?", "Count the shapes.")
    )
    scene.ask("count", question, str(len(things)))
    shape = rng.choice(things).shape if rng.random() < 0.9 else rng.choice(SHAPES)
    question = rng.choice(
        (
            f"How many {plural(shape)} are there?",
            f"Count the {plural(shape)}.",
            f"How many {plural(shape)} can you see?",
        )
    )
    scene.ask("count", question, str(sum(t.shape == shape for t in things)))
    colour = rng.choice(things).colour if rng.random() < 0.9 else rng.choice(COLOUR_NAMES)
    question = rng.choice(
        (
            f"How many {colour} shapes are there?",
            f"How many shapes are {colour}?",
            f"Count the {colour} shapes.",
        )
    )
    scene.ask("count", question, str(sum(t.colour == colour for t in things)))
    some = rng.choice(things)
    scene.ask(
        "count",
        f"How many {some.colour} {plural(some.shape)} are there?",
        str(sum(t.name == some.name for t in things)),
    )


def ask_relation(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    single = _unique(things)
    if len(single) < 2:
        return
    margin_x, margin_y = scene.width * 0.06, scene.height * 0.06
    a, b = rng.sample(single, 2)
    sides = []
    if abs(a.x - b.x) > margin_x:
        sides += [
            ("further left", min(a, b, key=lambda t: t.x)),
            ("further right", max(a, b, key=lambda t: t.x)),
        ]
    if abs(a.y - b.y) > margin_y:
        sides += [("higher up", min(a, b, key=lambda t: t.y)), ("lower down", max(a, b, key=lambda t: t.y))]
    if sides:
        side, winner = rng.choice(sides)
        scene.ask("relation", f"Which is {side}, the {a.name} or the {b.name}?", winner.name, winner.box)
    if len(things) >= 2:
        for key, word, last in (
            ("x", "leftmost", False),
            ("x", "rightmost", True),
            ("y", "topmost", False),
            ("y", "lowest", True),
        ):
            order = sorted(things, key=lambda t: float(getattr(t, key)), reverse=last)
            gap = abs(getattr(order[0], key) - getattr(order[1], key))
            if gap > (margin_x if key == "x" else margin_y) * 0.6 and rng.random() < 0.4:
                question = rng.choice((f"What is the {word} shape?", f"Which shape is the {word}?"))
                scene.ask("relation", question, order[0].name, order[0].box)


def ask_yes_no(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    yes = rng.random() < 0.5
    t = rng.choice(things)
    names = {o.name for o in things}
    if yes:
        name, box = t.name, t.box if len(things) == len(names) else None
    else:
        name, box = _absent_name(rng, things), None
    question = rng.choice(
        (
            f"Is there {article(name)}?",
            f"Can you see {article(name)}?",
            f"Does the picture show {article(name)}?",
        )
    )
    scene.ask("yes_no", question, "yes" if yes else "no", box)
    single = _unique(things)
    if len(single) > 1:
        a, b = rng.sample(single, 2)
        if abs(a.x - b.x) > scene.width * 0.06:
            if (a.x < b.x) != (rng.random() < 0.5):
                a, b = b, a
            scene.ask("yes_no", f"Is the {a.name} left of the {b.name}?", "yes" if a.x < b.x else "no", a.box)
        if abs(a.y - b.y) > scene.height * 0.06:
            if (a.y < b.y) != (rng.random() < 0.5):
                a, b = b, a
            scene.ask("yes_no", f"Is the {a.name} above the {b.name}?", "yes" if a.y < b.y else "no", a.box)


def _absent_name(rng: Random, things: list[Thing]) -> str:
    """A colour and shape that no thing has together, often near misses."""
    names = {t.name for t in things}
    while True:
        near = rng.choice(things)
        draw = rng.random()
        name = (
            f"{near.colour} {rng.choice(SHAPES)}"
            if draw < 0.4
            else f"{rng.choice(COLOUR_NAMES)} {near.shape}"
            if draw < 0.8
            else f"{rng.choice(COLOUR_NAMES)} {rng.choice(SHAPES)}"
        )
        if name not in names:
            return name


def ask_absent(scene: Scene, things: list[Thing]) -> None:
    rng = scene.rng
    name = _absent_name(rng, things)
    question = rng.choice(
        (
            f"Where is the {name}?",
            f"Is the {name} big or small?",
            f"What is next to the {name}?",
            f"In which part of the picture is the {name}?",
        )
    )
    scene.ask("absent", question, f"There is no {name}.")
    shapes = {t.shape for t in things}
    missing = [s for s in SHAPES if s not in shapes]
    if missing:
        shape = rng.choice(missing)
        question = rng.choice(
            (f"What colour is the {shape}?", f"What color is the {shape}?", f"Name the color of the {shape}.")
        )
        scene.ask("absent", question, f"There is no {shape}.")


def sentence(things: list[Thing]) -> str:
    """ "There is a red circle and a blue star.", left to right."""
    names = [article(t.name) for t in sorted(things, key=lambda t: t.x)]
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return f"There is {listed}."


def ask_describe(scene: Scene, things: list[Thing]) -> None:
    if 1 <= len(things) <= 4:
        question = scene.rng.choice(
            (
                "What is in the picture?",
                "Describe the picture.",
                "What can you see?",
                "What does the picture show?",
            )
        )
        scene.ask("describe", question, sentence(things))


def objects(scene: Scene, level: float) -> None:
    """Fills a scene with shapes and asks everything that can be asked of it."""
    rng = scene.rng
    scene.background()
    most = 4 if level < 0.2 else 7 if level < 0.5 else 10
    count = rng.randint(1, most)
    things = put_things(scene, count, scale=1.0 if level < 0.4 or count > 6 else rng.choice((0.6, 0.8, 1.0)))
    if not things:
        return
    for ask in (
        ask_colour,
        ask_shape,
        ask_size,
        ask_position,
        ask_count,
        ask_relation,
        ask_yes_no,
        ask_absent,
        ask_describe,
    ):
        ask(scene, things)
