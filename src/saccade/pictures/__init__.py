"""Pictures with questions and known answers: the embedded model's training data and its fixed evaluation set.

`evaluation_set` redraws the same examples bit for bit from a seed; `correct` is the scoring rule.
`make_scene` is what training draws from. Words, fonts, layouts and seeds of the evaluation set never occur
in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from . import charts, documents, needle, objects, pages, scenery, signs
from .draw import Marks, pack, paint
from .scene import Ask, Box, Scene
from .score import correct_text
from .words import EVAL, TRAIN

__all__ = [
    "EVAL",
    "KINDS",
    "TASKS",
    "TRAIN",
    "Ask",
    "Example",
    "Marks",
    "Scene",
    "correct",
    "evaluation_set",
    "example",
    "make_scene",
    "pack",
    "paint",
]

KINDS: dict[str, Callable[[Scene, float], None]] = {
    "objects": objects.objects,
    "reading": signs.reading,
    "signs": signs.signs,
    "form": documents.form,
    "receipt": documents.receipt,
    "table": documents.table,
    "bars": charts.bars,
    "lines": charts.lines,
    "pie": charts.pie,
    "needle": needle.needle,
    "small_print": pages.small_print,
    "scenery": scenery.scenery,
}

_PAPER = ("form", "receipt", "table", "bars", "lines", "pie")
# task -> the kinds of scene that ask it
TASK_KINDS: dict[str, tuple[str, ...]] = {
    "colour": ("objects", "objects", "signs"),
    "shape": ("objects",),
    "size": ("objects",),
    "position": ("objects",),
    "count": ("objects", "objects", "objects", "bars", "receipt"),
    "relation": ("objects",),
    "word": ("signs",),
    "code": ("signs",),
    "number": ("signs",),
    "form": ("form",),
    "receipt": ("receipt",),
    "table": ("table",),
    "bar_chart": ("bars",),
    "line_chart": ("lines",),
    "pie_chart": ("pie",),
    "needle": ("needle",),
    "small_print": ("small_print",),
    "yes_no": ("objects", "objects", "signs", "form", "bars"),
    "describe": ("objects", "objects", "signs", *_PAPER),
    "absent": ("objects", "objects", "signs", "form", "receipt"),
}
TASKS: tuple[str, ...] = tuple(TASK_KINDS)
# kind -> shortest and longest side of evaluation pictures
SIDES = {
    "needle": (672, 1344),
    "small_print": (448, 1024),
    "form": (320, 768),
    "receipt": (320, 768),
    "table": (384, 768),
    "bars": (320, 768),
    "lines": (320, 768),
    "pie": (320, 768),
}
SEED = 20261115


@dataclass(frozen=True, slots=True)
class Example:
    """One question of the evaluation set. `box` is where the evidence lies in pixels; the whole picture
    where it is everywhere."""

    task: str
    image: NDArray[np.uint8]  # [height, width, 3]
    question: str
    answer: str
    accepted: tuple[str, ...]
    box: Box
    kind: str
    index: int


def make_scene(kind: str, split: str, width: int, height: int, level: float, seed: int | str) -> Scene:
    """A scene of one kind. `level` runs from 0 (large glyphs, few things) to 1."""
    scene = Scene(Random(seed), split, width, height)
    KINDS[kind](scene, level)
    return scene


def _size(rng: Random, kind: str) -> tuple[int, int]:
    low, high = SIDES.get(kind, (224, 672))
    step = 32 if rng.random() < 0.75 else 1
    width, height = (rng.randrange(low, high + 1, step) for _ in range(2))
    return width, height


def example(task: str, index: int, seed: int = SEED) -> Example:
    """Question `index` of a task, drawn."""
    attempt = 0
    while True:
        rng = Random(f"{seed}/{task}/{index}/{attempt}")
        kind = rng.choice(TASK_KINDS[task])
        width, height = _size(rng, kind)
        scene = make_scene(
            kind, EVAL, width, height, rng.uniform(0.4, 1.0), f"{seed}/{task}/{index}/{attempt}/scene"
        )
        asks = [ask for ask in scene.asks if ask.task == task]
        if asks:
            break
        attempt += 1
    ask = rng.choice(asks)
    marks = pack([scene])
    image = paint(marks.rows[0], marks.ground[0], width, height)
    box = ask.box or (0.0, 0.0, float(width), float(height))
    return Example(task, image, ask.question, ask.answer, ask.accepted, box, kind, index)


def evaluation_set(
    count_per_task: int = 200, seed: int = SEED, tasks: tuple[str, ...] = TASKS
) -> Iterator[Example]:
    """The fixed set, one task after the other, drawn as it is read."""
    for task in tasks:
        for index in range(count_per_task):
            yield example(task, index, seed)


def correct(asked: Example, text: str) -> bool:
    """Whether `text` answers the question."""
    return any(correct_text(asked.task, answer, text) for answer in (asked.answer, *asked.accepted))
