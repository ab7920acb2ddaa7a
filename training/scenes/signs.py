"""Scenes to read: words, codes and numbers on the plain ground or on coloured cards, at many sizes and
small angles."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from saccade.tools.evaluation.renderer import Colour

from . import words
from .fonts import text_width
from .scene import COLOUR_NAMES, COLOURS, Box, Scene, place_of

DARK, LIGHT = (20, 20, 30), (245, 245, 240)


@dataclass(frozen=True, slots=True)
class Sign:
    kind: str  # word, code or number
    text: str
    card: str | None  # the card's colour
    ink: str  # the text's colour, "" where it is plain dark or light
    box: Box


def ink_on(rng: Random, ground: Colour) -> Colour:
    """A readable text colour on a ground."""
    bright = ground[0] * 0.3 + ground[1] * 0.59 + ground[2] * 0.11
    base = DARK if bright > 120 else LIGHT
    return (base[0] + rng.randint(-5, 10), base[1] + rng.randint(-5, 10), base[2] + rng.randint(-5, 10))


def text_size(rng: Random, level: float, low: float = 11.0, high: float = 44.0) -> float:
    """Pixels per em; small ones more often as the level rises."""
    low = low + (1.0 - min(1.0, level * 1.25)) * 13.0
    if high <= low:
        return low
    return float(low * (high / low) ** rng.random())


def content(rng: Random, split: str) -> tuple[str, str]:
    kinds = ("word", "code", "number")
    kind = rng.choices(kinds, (3, 1, 1))[0] if split == words.TRAIN else rng.choice(kinds)
    text = (
        words.word(rng, split)
        if kind == "word"
        else words.code(rng, split)
        if kind == "code"
        else words.number(rng, split)
    )
    if kind == "word" and rng.random() < 0.2:
        text += " " + words.word(rng, split)
    return kind, text


def _overlaps(box: Box, others: list[Box], gap: float) -> bool:
    return any(
        box[0] < o[2] + gap and o[0] < box[2] + gap and box[1] < o[3] + gap and o[1] < box[3] + gap
        for o in others
    )


def put_sign(
    scene: Scene, level: float, taken: list[Box], cards: list[str], kind: str, text: str
) -> Sign | None:
    """Writes `text` somewhere free; on a card when `cards` offers a colour and chance agrees."""
    rng = scene.rng
    font = scene.font()
    size = text_size(rng, level, high=max(26.0, min(64.0, scene.width / 6)))
    unit = text_width(text, font, 1.0)
    size = min(size, scene.width * 0.86 / unit)
    if size < 10.5:
        return None
    width = unit * size
    on_card = bool(cards) and rng.random() < 0.7
    pad_x, pad_y = (size * 0.6, size * 0.45) if on_card else (3.0, 1.0)
    degrees = rng.randint(-6, 6) if rng.random() < 0.3 * level and not on_card else 0
    half_w, half_h = width / 2 + pad_x, size * 0.55 + pad_y + abs(degrees) / 57.3 * width / 2
    if half_w * 2 > scene.width or half_h * 2 > scene.height:
        return None
    for _ in range(10):
        x, y = rng.uniform(half_w, scene.width - half_w), rng.uniform(half_h, scene.height - half_h)
        box = (x - half_w, y - half_h, x + half_w, y + half_h)
        if not _overlaps(box, taken, 4.0):
            break
    else:
        return None
    taken.append(box)
    card, ink = None, ""
    if on_card:
        card = cards.pop()
        shade = scene.shade(card)
        scene.box(*box, shade, corner=rng.choice((0.0, size * 0.2, size * 0.4)))
        colour = ink_on(rng, shade)
    elif rng.random() < 0.35:
        inks = [
            c for c in ("red", "blue", "green", "purple", "brown", "black", "white") if scene.contrasts(c)
        ]
        ink = rng.choice(inks) if inks else ""
        colour = scene.shade(ink) if ink else ink_on(rng, scene.first)
    else:
        colour = ink_on(rng, scene.first)
    scene.text(x, y, size, text, font, colour, degrees, align="center")
    return Sign(kind, text, card, ink, box)


def altered(rng: Random, text: str) -> str:
    """The text with one character changed."""
    at = rng.choice([i for i, c in enumerate(text) if c.isalnum()])
    pool = (
        "0123456789"
        if text[at].isdigit()
        else "ABCDEFGHKLMNPRSTUVWXYZ"
        if text[at].isupper()
        else "abcdefghklmnoprstuvwxyz"
    )
    return text[:at] + rng.choice([c for c in pool if c != text[at]]) + text[at + 1 :]


def ask_sign(scene: Scene, sign: Sign, signs: list[Sign]) -> None:
    rng = scene.rng
    what = {"word": ("word", "text"), "code": ("code",), "number": ("number",)}[sign.kind]
    name = rng.choice(what)
    if len(signs) == 1:
        question = rng.choice(
            (
                "What does it say?",
                "Read the text.",
                "What is written here?",
                "What does the sign say?",
                "What text is shown?",
            )
        )
        scene.ask(sign.kind, question, sign.text, sign.box)
    if sum(o.kind == sign.kind for o in signs) == 1 and name != "text":
        question = rng.choice(
            (
                f"What is the {name}?",
                f"Which {name} is shown?",
                f"Read the {name}.",
                f"What {name} do you see?",
            )
        )
        scene.ask(sign.kind, question, sign.text, sign.box)
    if sign.card:
        question = rng.choice(
            (
                f"What is written on the {sign.card} card?",
                f"What does the {sign.card} card say?",
                f"Read the {sign.card} card.",
                f"Which {name} is on the {sign.card} card?",
            )
        )
        scene.ask(sign.kind, question, sign.text, sign.box)
        if rng.random() < 0.3:
            scene.ask("colour", f'What colour is the card that says "{sign.text}"?', sign.card, sign.box)
    if sign.ink and sum(o.ink == sign.ink for o in signs) == 1:
        scene.ask(
            sign.kind,
            rng.choice((f"What is written in {sign.ink}?", f"Read the {sign.ink} text.")),
            sign.text,
            sign.box,
        )


def ask_places(scene: Scene, signs: list[Sign]) -> None:
    """Questions by place: top, bottom, ninths of the image."""
    rng = scene.rng
    order = sorted(signs, key=lambda s: s.box[1] + s.box[3])
    if len(signs) > 1:
        for sign, after, word in ((order[0], order[1], "top"), (order[-1], order[-2], "bottom")):
            if abs(sign.box[1] + sign.box[3] - after.box[1] - after.box[3]) > 24:
                question = rng.choice(
                    (f"What is the {word} text?", f"Read the {word} line.", f"What is written at the {word}?")
                )
                scene.ask(sign.kind, question, sign.text, sign.box)
    sign = rng.choice(signs)
    place = place_of(
        (sign.box[0] + sign.box[2]) / 2, (sign.box[1] + sign.box[3]) / 2, scene.width, scene.height
    )
    if place and rng.random() < 0.5:
        scene.ask("position", f'Where is the text "{sign.text}"?', place, sign.box)


def ask_yes_no(scene: Scene, signs: list[Sign]) -> None:
    rng = scene.rng
    sign = rng.choice(signs)
    yes = rng.random() < 0.5
    text = (
        sign.text if yes else altered(rng, sign.text) if rng.random() < 0.5 else content(rng, scene.split)[1]
    )
    if not yes and any(o.text == text for o in signs):
        return
    question = rng.choice(
        (f'Does it say "{text}"?', f'Is the text "{text}" in the picture?', f'Can you read "{text}"?')
    )
    scene.ask("yes_no", question, "yes" if yes else "no", sign.box if yes else None)


def ask_missing(scene: Scene, signs: list[Sign]) -> None:
    rng = scene.rng
    cards = [s.card for s in signs if s.card]
    if cards:
        colour = rng.choice([c for c in COLOUR_NAMES if c not in cards])
        question = rng.choice(
            (
                f"What is written on the {colour} card?",
                f"What does the {colour} card say?",
                f"Read the {colour} card.",
            )
        )
        scene.ask("absent", question, f"There is no {colour} card.")
    else:
        scene.ask(
            "absent",
            rng.choice(("What does the card say?", "What is written on the card?")),
            "There is no card.",
        )


def signs(scene: Scene, level: float) -> None:
    """A few lines of text, each asked for in several ways."""
    rng = scene.rng
    scene.background(dark=0.3, grain=14)
    count = 1 if rng.random() < 0.6 - 0.45 * level else rng.randint(2, 3 if level < 0.4 else 6)
    cards = [c for c in COLOURS if scene.contrasts(c) or rng.random() < 0.2]
    rng.shuffle(cards)
    if rng.random() < 0.35:
        cards = []
    taken: list[Box] = []
    placed: list[Sign] = []
    for _ in range(count):
        kind, text = content(rng, scene.split)
        sign = put_sign(scene, level, taken, cards, kind, text)
        if sign:
            placed.append(sign)
    if not placed:
        return
    for sign in placed:
        ask_sign(scene, sign, placed)
    ask_places(scene, placed)
    ask_yes_no(scene, placed)
    ask_missing(scene, placed)
    if len(placed) <= 3:
        order = sorted(placed, key=lambda s: s.box[1] + s.box[3])
        listed = ", ".join(f'"{s.text}"' for s in order)
        question = rng.choice(
            (
                "What is in the picture?",
                "Describe the picture.",
                "What can you see?",
                "What does the picture show?",
            )
        )
        scene.ask("describe", question, f"There is the text {listed}.")


def reading(scene: Scene, level: float) -> None:
    """Plain lines to copy out, for learning to read: no cards, no choices."""
    rng = scene.rng
    scene.background(dark=0.3)
    taken: list[Box] = []
    placed: list[Sign] = []
    for _ in range(rng.randint(1, 4)):
        kind, text = content(rng, scene.split)
        sign = put_sign(scene, level, taken, [], kind, text)
        if sign:
            placed.append(sign)
    if not placed:
        return
    order = sorted(placed, key=lambda s: s.box[1] + s.box[3])
    scene.ask(
        "word",
        rng.choice(("Read all the text.", "Copy all lines.", "Read everything.")),
        "\n".join(s.text for s in order),
    )
    for sign in placed:  # a line asked for by its beginning teaches "the next character to the right"
        cut = rng.randint(1, 2)
        if sum(o.text.startswith(sign.text[:cut]) for o in placed) == 1:
            scene.ask(sign.kind, f'Which text starts with "{sign.text[:cut]}"?', sign.text, sign.box)
        ask_sign(scene, sign, placed)
    ask_places(scene, placed)
