"""Pages of small print with a reference or two in them."""

from __future__ import annotations

from random import Random

from . import words
from .documents import paper
from .fonts import text_width
from .scene import Box, Scene
from .signs import text_size

NOTICE = words.listed("""
the and of to in for with by on at from this that all any may not will shall must such other each under
over when before after between during upon where our your their item goods terms service return period
days notice party use care
""")
LABELS = ("Ref", "Serial", "Lot", "Permit", "Case", "File", "Policy", "Batch")
SMALLEST, SMALLEST_TRAINED = (
    11.0,
    10.0,
)  # pixels per em: what is asked for should not be the edge of what was seen
LINES_ASKED = 8  # questions about plain lines of a page that is only trained on


def small_print(scene: Scene, level: float) -> None:
    """A page of fine text with a reference or two in it."""
    rng = scene.rng
    ink = paper(scene)
    least = SMALLEST_TRAINED if scene.split == words.TRAIN else SMALLEST
    size = text_size(rng, min(1.0, level + 0.2), low=least, high=14.5)
    font = scene.font()
    step = size * rng.uniform(1.35, 1.7)
    left, right = scene.width * rng.uniform(0.03, 0.1), scene.width * rng.uniform(0.85, 0.97)
    y = step
    if rng.random() < 0.6 and scene.height > 12 * step:
        scene.text(left, y + size, size * 2, words.word(rng, scene.split), scene.font(), ink)
        y += step * 2.6
    count = min(int((scene.height - y) / step), rng.randint(3, 10 if level < 0.5 else 26))
    labels = rng.sample(LABELS, min(3, max(1, count // 3)))
    missing = rng.choice([k for k in LABELS if k not in labels])
    at = dict(zip(sorted(rng.sample(range(count), min(count, len(labels)))), labels, strict=False))
    lines: list[tuple[str, Box]] = []
    for i in range(count):
        if i in at:
            text = f"{at[i]}: {words.code(rng, scene.split)}"
            box = scene.text(left, y, size, text, font, ink)
            answer = text.split(": ")[1]
            key = at[i]
            question = rng.choice(
                (
                    f"What is the {key} code in the small print?",
                    f"What is the {key}?",
                    f"Read the {key} code.",
                    f"Which code stands after {key}?",
                )
            )
            scene.ask("small_print", question, answer, box)
        else:
            text = _fine_line(scene, font, size, right - left)
            box = scene.text(left, y, size, text, font, ink)
            lines.append((text, box))
            if i in (0, count - 1):
                which = "first" if i == 0 else "last"
                first_word = text.split(" ")[0]
                scene.ask(
                    "small_print",
                    f"What is the first word of the {which} line of the small print?",
                    first_word,
                    (box[0], box[1], box[0] + 60, box[3]),
                )
        y += step
    scene.ask("absent", f"What is the {missing} code in the small print?", f"There is no {missing}.")
    scene.ask(
        "describe",
        rng.choice(("What is in the picture?", "What is this?", "What does the picture show?")),
        "This is a page of small print.",
    )
    if scene.split == words.TRAIN:
        _ask_lines(scene, lines)


def _ask_lines(scene: Scene, lines: list[tuple[str, Box]]) -> None:
    """More to read on every page: a line found by its beginning, a word by the one before it.

    Drawn from a generator of its own: the fixed evaluation set must not change, nor what it is drawn from.
    """
    rng = Random(f"{scene.width}x{scene.height} {lines}")
    firsts = [text.split(" ")[0] for text, _ in lines]
    words_seen = [word for text, _ in lines for word in text.split(" ")]
    for text, box in rng.sample(lines, min(LINES_ASKED, len(lines))):
        parts = text.split(" ")
        place = rng.randrange(1, len(parts)) if len(parts) > 1 else 0
        if place and rng.random() < 0.6 and words_seen.count(parts[place - 1]) == 1:
            question = rng.choice(("Which word follows {}?", "What is the word after {}?"))
            scene.ask("small_print", question.format(f'"{parts[place - 1]}"'), parts[place], box)
        elif len(parts) > 2 and firsts.count(parts[0]) == 1:
            question = f'Read the first three words of the line that starts with "{parts[0]}".'
            scene.ask("small_print", question, " ".join(parts[:3]), box)


def _fine_line(scene: Scene, font: int, size: float, wide: float) -> str:
    rng = scene.rng
    line = words.word(rng, scene.split)
    limit = wide * rng.uniform(0.6, 1.0)
    while True:
        more = f"{line} {rng.choice(NOTICE) if rng.random() < 0.6 else words.thing(rng, scene.split)}"
        if text_width(more, font, size) > limit:
            return line
        line = more
