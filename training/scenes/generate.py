"""Makes scenes of every kind, and the examples of the evaluation set from a seed.

Words, fonts, layouts and seeds of the evaluation split never occur in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from saccade.tools.evaluation.question_set import SEED, TASKS, Example
from saccade.tools.evaluation.renderer import COLUMNS, glyph_primitives, paint

from .charts import bars, lines, pie
from .documents import form, receipt, table
from .needle import needle
from .objects import objects
from .pages import small_print
from .scene import Ask, Scene
from .scenery import scenery
from .signs import reading, signs
from .words import EVAL

KINDS: dict[str, Callable[[Scene, float], None]] = {
    "objects": objects,
    "reading": reading,
    "signs": signs,
    "form": form,
    "receipt": receipt,
    "table": table,
    "bars": bars,
    "lines": lines,
    "pie": pie,
    "needle": needle,
    "small_print": small_print,
    "scenery": scenery,
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
# kind -> shortest and longest side of evaluation images
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


def make_scene(kind: str, split: str, width: int, height: int, level: float, seed: int | str) -> Scene:
    """A scene of one kind. `level` runs from 0 (large glyphs, few things) to 1."""
    scene = Scene(Random(seed), split, width, height)
    KINDS[kind](scene, level)
    return scene


@dataclass(frozen=True, slots=True)
class PackedScenes:
    """Primitives of several scenes, padded to the same count (kind -1)."""

    rows: NDArray[np.float32]  # [scenes, primitives, COLUMNS]
    labels: NDArray[np.int16]  # [scenes, primitives, 3]: character (0 none, 1..94), shape, colour (0 none)
    counts: NDArray[np.int32]  # [scenes]
    ground: NDArray[np.int32]  # [scenes, 8]: first RGB, second RGB, noise amplitude and seed


def pack(scenes: Sequence[Scene]) -> PackedScenes:
    """Primitives of scenes as arrays, in drawing order: shapes, then text."""
    runs = [run for scene in scenes for run in scene.runs]
    owners = np.repeat(np.arange(len(scenes)), [len(scene.runs) for scene in scenes])
    if runs:
        glyphs, characters, owner = glyph_primitives(runs, owners)
    else:
        glyphs, characters = np.zeros((0, COLUMNS), np.float32), np.zeros(0, np.int16)
        owner = np.zeros(0, np.int64)
    shapes = np.array([len(scene.primitives) for scene in scenes])
    written = np.bincount(owner, minlength=len(scenes))
    counts = (shapes + written).astype(np.int32)
    most = max(1, int(counts.max()))
    rows = np.full((len(scenes), most, COLUMNS), -1.0, np.float32)
    labels = np.zeros((len(scenes), most, 3), np.int16)
    first = np.cumsum(written) - written
    for i, scene in enumerate(scenes):
        m, t, f = int(shapes[i]), int(counts[i]), int(first[i])
        if m:
            table = np.array(scene.primitives, np.float32)
            rows[i, :m] = table[:, :COLUMNS]
            labels[i, :m, 1:] = table[:, COLUMNS:]
        rows[i, m:t] = glyphs[f : f + t - m]
        labels[i, m:t, 0] = characters[f : f + t - m]
    return PackedScenes(rows, labels, counts, np.stack([background(scene) for scene in scenes]))


def background(scene: Scene) -> NDArray[np.int32]:
    return np.array((*scene.first, *scene.second, scene.grain, scene.grain_seed), np.int32)


def _size(rng: Random, kind: str) -> tuple[int, int]:
    low, high = SIDES.get(kind, (224, 672))
    step = 32 if rng.random() < 0.75 else 1
    width, height = (rng.randrange(low, high + 1, step) for _ in range(2))
    return width, height


def example_scene(task: str, index: int, seed: int = SEED) -> tuple[str, Scene, Ask]:
    """Kind, scene and question of example `index` of a task."""
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
            return kind, scene, rng.choice(asks)
        attempt += 1


def example(task: str, index: int, seed: int = SEED) -> Example:
    """Example `index` of a task, drawn."""
    kind, scene, ask = example_scene(task, index, seed)
    packed = pack([scene])
    image = paint(packed.rows[0], packed.ground[0], scene.width, scene.height)
    box = ask.box or (0.0, 0.0, float(scene.width), float(scene.height))
    return Example(task, image, ask.question, ask.answer, ask.accepted, box, kind, index)


def evaluation_set(
    count_per_task: int = 200, seed: int = SEED, tasks: tuple[str, ...] = TASKS
) -> Iterator[Example]:
    """One task after the other, each example drawn as it is read."""
    for task in tasks:
        for index in range(count_per_task):
            yield example(task, index, seed)
