"""Pictures of nothing in particular, as a photograph is to this model: it may tell the main colour only."""

from __future__ import annotations

from .atlas import SHAPES
from .scene import COLOUR_NAMES, COLOURS, Colour, Scene

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


def scenery(scene: Scene, level: float) -> None:
    """Soft overlapping patches, most of them in shades of one colour."""
    rng = scene.rng
    main, other = rng.sample(COLOUR_NAMES, 2)
    scene.first, scene.second = _near(scene, main, 25), _near(scene, main, 40)
    scene.grain = rng.randint(4, 30)
    side = min(scene.width, scene.height)
    for _ in range(rng.randint(6, 20)):
        colour = main if rng.random() < 0.8 else other
        x, y = rng.uniform(0, scene.width), rng.uniform(0, scene.height)
        reach = side * rng.uniform(0.05, 0.3 if colour == main else 0.12)
        tall = reach * rng.uniform(0.3, 1.0)
        box = (x - reach, y - tall, x + reach, y + tall)
        scene.box(*box, _near(scene, colour, 45), corner=tall * rng.random(), opacity=rng.uniform(0.2, 0.7))
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
