"""Images of nothing in particular, as a photograph is to this model: it may tell the main colour only."""

from __future__ import annotations

from saccade.tools.evaluation.renderer import SHAPES, Colour

from .scene import COLOUR_NAMES, COLOURS, Scene

CANNOT = "I cannot tell."
UNKNOWN = (
    "person",
    "dog",
    "cat",
    "car",
    "tree",
    "house",
    "face",
    "bird",
    "animal",
    "building",
    "sky",
    "man",
    "woman",
)


def _near(scene: Scene, colour: str, spread: int) -> Colour:
    r, g, b = COLOURS[colour]
    level = scene.rng.randint(-spread, spread)
    return (min(255, max(0, r + level)), min(255, max(0, g + level)), min(255, max(0, b + level)))


def _soft(scene: Scene, main: str, other: str) -> None:
    """Blurred overlapping patches."""
    rng = scene.rng
    side = min(scene.width, scene.height)
    for _ in range(rng.randint(6, 20)):
        colour = main if rng.random() < 0.8 else other
        x, y = rng.uniform(0, scene.width), rng.uniform(0, scene.height)
        reach = side * rng.uniform(0.05, 0.3 if colour == main else 0.12)
        tall = reach * rng.uniform(0.3, 1.0)
        box = (x - reach, y - tall, x + reach, y + tall)
        scene.box(*box, _near(scene, colour, 45), corner=tall * rng.random(), opacity=rng.uniform(0.2, 0.7))


def _leaves(scene: Scene, main: str, other: str) -> None:
    """Things that hide each other, few large and many small: the edges and the spectrum of photographs."""
    rng = scene.rng
    side = min(scene.width, scene.height)
    third = rng.choice(COLOUR_NAMES)
    for _ in range(rng.randint(60, 220)):
        colour = rng.choices((main, other, third), (8, 1, 1))[0]
        reach = side * 0.012 * 20.0 ** (rng.random() ** 2.0)
        if colour != main:
            reach = min(reach, side * 0.08)
        tall = reach * rng.uniform(0.25, 1.0)
        x, y = rng.uniform(0, scene.width), rng.uniform(0, scene.height)
        tint = _lit(_near(scene, colour, 30), rng.uniform(0.7, 1.15))
        if rng.random() < 0.5:
            dx, dy = rng.uniform(-reach, reach), rng.uniform(-reach, reach)
            scene.line(x - dx, y - dy, x + dx, y + dy, 2 * tall, tint)
        else:
            opacity = rng.uniform(0.6, 1.0)
            scene.box(x - reach, y - tall, x + reach, y + tall, tint, corner=tall, opacity=opacity)


def _lit(colour: Colour, light: float) -> Colour:
    r, g, b = colour
    return (min(255, int(r * light)), min(255, int(g * light)), min(255, int(b * light)))


def scenery(scene: Scene, level: float) -> None:
    """Nothing that has a name here, most of it in shades of one colour."""
    rng = scene.rng
    main, other = rng.sample(COLOUR_NAMES, 2)
    scene.first, scene.second = _near(scene, main, 25), _near(scene, main, 40)
    scene.grain = rng.randint(4, 30)
    (_soft if rng.random() < 0.35 else _leaves)(scene, main, other)
    spelling = rng.choice(("colour", "color"))
    question = rng.choice((f"What {spelling} is it mostly?", f"What is the main {spelling}?"))
    scene.ask("colour", question, main)
    question = rng.choice(
        ("What is in the picture?", "Describe the picture.", "What can you see?", "What is this?")
    )
    scene.ask("describe", question, f"I cannot tell what it is. It is mostly {main}.")
    thing = rng.choice(UNKNOWN)
    question = rng.choice(
        (
            f"Is there a {thing}?",
            f"Where is the {thing}?",
            f"How many {thing}s are there?",
            f"Can you see a {thing}?",
        )
    )
    scene.ask("describe", question, CANNOT)
    question = rng.choice(("What does it say?", "Read the text.", "What is written here?"))
    scene.ask("absent", question, "There is no text.")
    shape = rng.choice(SHAPES)
    scene.ask("absent", f"What colour is the {shape}?", f"There is no {shape}.")
