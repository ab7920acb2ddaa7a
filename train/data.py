"""Batches: scenes, their questions as packed branches, drawn up by worker processes. No pixels and no torch
here.

A batch has pictures of one size. Plain: the picture, then one branch per question. Views: the picture is a
source; the model sees a small global view of it and, in each branch after the question, zoomed views cut
from the source. All views stand in the source's frame (`train/README.md`, "Registered positions")."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade import pictures
from saccade.pictures.scene import Ask, Box, Scene

from .tokens import IM_END, MIDDLE, START, VISION_END, VISION_START, encode

UNIT = 32  # pixels along a token's side
ASKS = 16  # most branches per picture

# Sizes come from short lists: every new shape costs the compiler and the allocator some seconds.
SOURCES = ((896, 896), (672, 896), (896, 672), (640, 640), (1024, 768), (1344, 1024))
SOURCES += ((448, 448), (512, 384), (384, 576), (640, 448), (448, 768))
LOOKS = (36, 49, 64, 80, 112, 144, 196, 256)  # tokens of the global view
# The levels 16, 64 and 196 of the ladder, square and in a long row.
ZOOMS = ((128, 128), (256, 64), (256, 64), (256, 256), (512, 128), (512, 128), (448, 448), (896, 224))
MOST_OF_SOURCE = 0.5  # a global view is at most this share of the tokens the whole source would take


@dataclass(frozen=True)
class Spec:
    """What one batch holds."""

    width: int
    height: int
    batch: int
    text: int  # branch tokens per picture
    level: float
    kinds: dict[str, float] = field(hash=False)
    views: bool = False
    look: tuple[int, int] = (0, 0)  # width and height of the global view, pixels
    zoom: tuple[int, int] = (256, 256)  # width and height of a zoomed view, pixels
    crops: int = 4  # zoomed views per picture


Arrays = dict[str, NDArray[Any]]


def grid_places(x0: float, y0: float, x1: float, y1: float, rows: int, columns: int) -> NDArray[np.float32]:
    """Height and width positions [2, rows * columns] of a view's tokens, in units of the frame's tokens;
    box in pixels."""
    y = (y0 + (np.arange(rows) + 0.5) * (y1 - y0) / rows) / UNIT - 0.5
    x = (x0 + (np.arange(columns) + 0.5) * (x1 - x0) / columns) / UNIT - 0.5
    return np.stack([np.repeat(y, columns), np.tile(x, rows)]).astype(np.float32)


def prefix_places(spec: Spec) -> NDArray[np.float32]:
    """Positions [3, prefix] of the text before the picture and of its tokens."""
    wide, high = spec.look if spec.views else (spec.width, spec.height)
    grid = grid_places(0, 0, spec.width, spec.height, high // UNIT, wide // UNIT)
    text = np.tile(np.arange(len(START), dtype=np.float32), (3, 1))
    seen = np.concatenate([np.zeros((1, grid.shape[1]), np.float32), grid]) + len(START)
    return np.concatenate([text, seen], 1)


class Packer:
    """Branches of one batch, picture by picture."""

    def __init__(self, spec: Spec) -> None:
        b, t = spec.batch, spec.text
        self.spec = spec
        self.ids = np.zeros((b, t), np.int16)
        self.target = np.full((b, t), -1, np.int16)
        self.weight = np.zeros((b, t), np.float32)
        self.visual = np.full((b, t), -1, np.int16)
        self.positions = np.zeros((3, b, t), np.float32)
        self.branch = np.full((b, t), -1, np.int8)
        self.asked = np.zeros((b, ASKS), np.int16)  # where each question's last token stands
        self.boxes = np.full((b, ASKS, 4), -1.0, np.float32)  # evidence in pixels, -1 where there is none
        self.task = np.full((b, ASKS), -1, np.int8)  # index into pictures.TASKS
        self.crops = np.zeros((b, spec.crops, 4), np.float32)  # left, top, width, height in the source
        self.after = len(START) + max(spec.width, spec.height) // UNIT  # first position after the picture

    def add(self, row: int, ask: Ask, at: int, number: int, zooms: list[int]) -> int:
        """Appends a branch at token `at` of picture `row`; gives its length, 0 where it does not fit."""
        question, answer = encode(ask.question), encode(ask.answer)
        columns, lines = self.spec.zoom[0] // UNIT, self.spec.zoom[1] // UNIT
        per = columns * lines
        length = 1 + len(question) + len(zooms) * (per + 2) + len(MIDDLE) + len(answer) + 1
        if at + length > self.spec.text or number >= ASKS:
            return 0
        ids, places = self.ids[row, at : at + length], self.positions[:, row, at : at + length]
        head = [VISION_END, *question]
        ids[: len(head)] = head
        place, here = float(self.after), len(head)
        places[:, :here] = place + np.arange(here)
        place += here
        self.asked[row, number] = at + here - 1
        self.task[row, number] = pictures.TASKS.index(ask.task)
        if ask.box is not None:
            self.boxes[row, number] = ask.box
        for zoom in zooms:
            ids[here], ids[here + 1 + per] = VISION_START, VISION_END
            places[:, here] = place
            x, y, wide, high = self.crops[row, zoom]
            places[0, here + 1 : here + 1 + per] = place + 1
            places[1:, here + 1 : here + 1 + per] = grid_places(
                x, y, x + wide, y + high, lines, columns
            ) + len(START)
            self.visual[row, at + here + 1 : at + here + 1 + per] = zoom * per + np.arange(per)
            places[:, here + 1 + per] = place + 2
            place, here = place + 3, here + per + 2
        tail = [*MIDDLE, *answer, IM_END]
        ids[here:] = tail
        places[:, here:] = place + np.arange(len(tail))
        first = at + here + len(MIDDLE)
        self.target[row, first - 1 : at + length - 1] = tail[len(MIDDLE) :]
        self.weight[row, first - 1 : at + length - 1] = 1.0 / math.sqrt(len(answer) + 1)
        self.branch[row, at : at + length] = number
        return length

    def plain(self, row: int, scene: Scene, rng: Random) -> None:
        asks = scene.asks
        rng.shuffle(asks)
        at = number = 0
        for ask in asks:
            length = self.add(row, ask, at, number, [])
            at, number = at + length, number + (length > 0)

    def viewed(self, row: int, scene: Scene, rng: Random) -> None:
        """Each crop but the last is cut around the evidence of a question; the last one is anywhere."""
        spec = self.spec
        asks = scene.asks
        rng.shuffle(asks)
        located = [a for a in asks if a.box is not None][: spec.crops - 1]
        floating = [a for a in asks if a.box is None][:2]
        for i in range(spec.crops):
            scale = 1.0 if rng.random() < 0.6 else rng.uniform(0.8, 1.4)
            wide, high = min(spec.zoom[0] * scale, spec.width), min(spec.zoom[1] * scale, spec.height)
            box = located[i].box if i < len(located) else None
            self.crops[row, i] = (*crop_at(spec, box, wide, high, rng), wide, high)
        at = number = 0
        for i, ask in enumerate(located):
            others = rng.sample([c for c in range(spec.crops) if c != i], spec.crops - 1)
            small = spec.zoom[0] * spec.zoom[1] < 1 << 16  # several small views are as cheap as one large one
            beside = rng.choices((0, 1, 2, 3), (5, 3, 1, 1) if small else (5, 5, 0, 0))[0]
            zooms = [i, *others[:beside]]
            rng.shuffle(zooms)
            if rng.random() < 0.07:
                zooms = []
            length = self.add(row, ask, at, number, zooms)
            at, number = at + length, number + (length > 0)
        for ask in floating:
            length = self.add(row, ask, at, number, [spec.crops - 1] if rng.random() < 0.4 else [])
            at, number = at + length, number + (length > 0)


def crop_at(spec: Spec, box: Box | None, wide: float, high: float, rng: Random) -> tuple[float, float]:
    """Left and top of a crop that holds the box where it can, at a random offset, on whole pixels."""
    if box is None:
        x, y = rng.uniform(0, spec.width - wide), rng.uniform(0, spec.height - high)
        return float(int(x)), float(int(y))
    corner = []
    for low, top, side, most in ((box[0], box[2], wide, spec.width), (box[1], box[3], high, spec.height)):
        at = rng.uniform(*sorted((top - side, low)))  # holds the box, or lies in it where the box is longer
        corner.append(float(int(min(max(at, 0.0), most - side))))
    return corner[0], corner[1]


def build(spec: Spec, seed: int, split: str = pictures.TRAIN) -> Arrays:
    """One batch as arrays."""
    rng = Random(f"{split}/{seed}")
    names, weights = list(spec.kinds), list(spec.kinds.values())
    scenes = []
    while len(scenes) < spec.batch:
        kind = rng.choices(names, weights)[0]
        level = min(1.0, max(0.0, rng.uniform(spec.level - 0.4, spec.level + 0.1)))
        scene = pictures.make_scene(kind, split, spec.width, spec.height, level, rng.getrandbits(62))
        if scene.asks:
            scenes.append(scene)
    packer = Packer(spec)
    fill = packer.viewed if spec.views else packer.plain
    for row, scene in enumerate(scenes):
        fill(row, scene, rng)
    marks = pictures.pack(scenes)
    out: Arrays = {
        "rows": marks.rows,
        "labels": marks.labels,
        "counts": marks.counts,
        "ground": marks.ground,
        "place": prefix_places(spec),
    }
    for name in ("ids", "positions", "branch", "asked", "boxes", "task"):
        out[name] = getattr(packer, name)
    picks = np.flatnonzero(
        packer.target >= 0
    )  # tokens that have something to predict, in the flattened batch
    out["picks"], out["answers"], out["weights"] = (
        picks,
        packer.target.reshape(-1)[picks],
        packer.weight.reshape(-1)[picks],
    )
    if spec.views:
        out["visual"], out["crops"] = packer.visual, packer.crops
    return out
