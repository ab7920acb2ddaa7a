"""Batches: scenes, their questions as packed branches, drawn up by worker processes. No pixels and no torch
here.

A batch has images of one size. Plain: the image, then one branch per question. Views: the image is a
source; the model sees a small global view of it and, in each branch after the question, zoomed views cut
from the source where the engine might cut them (`views.py`). All views stand in the source's frame
(`training/README.md`, "Registered positions")."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.lod.types import Grid, Map
from saccade.tools.evaluation.question_set import TASKS

from .scenes.generate import make_scene, pack
from .scenes.scene import Ask, Scene
from .scenes.words import TRAIN
from .tokens import IM_END, MIDDLE, START, VISION_END, VISION_START, encode
from .views import UNIT, Chooser, a_price, frame_of, ink

ASKS = 16  # most branches per image
PARTS = 4  # places of one question's evidence
TRIES = 8  # questions of an image that are looked at for ones whose windows have the batch's grid


@dataclass(frozen=True)
class Spec:
    """What one batch holds."""

    width: int
    height: int
    batch: int
    text: int  # branch tokens per image
    level: float
    kinds: dict[str, float] = field(hash=False)
    views: bool = False
    look: tuple[int, int] = (0, 0)  # width and height of the global view, pixels
    zoom: tuple[int, int] = (256, 256)  # width and height of a zoomed view, pixels
    crops: int = 4  # zoomed views per image
    left: int = 0  # tokens that one question may spend on zoomed views


Arrays = dict[str, NDArray[Any]]


def grid_places(
    x0: float,
    y0: float,
    x1: float,
    y1: float,
    rows: int,
    columns: int,
    unit: tuple[float, float] = (UNIT, UNIT),
) -> NDArray[np.float32]:
    """Height and width positions [2, rows * columns] of a view's tokens, in units of the frame's tokens;
    box in pixels, of which a token of the frame is `unit` high and wide."""
    y = (y0 + (np.arange(rows) + 0.5) * (y1 - y0) / rows) / unit[0] - 0.5
    x = (x0 + (np.arange(columns) + 0.5) * (x1 - x0) / columns) / unit[1] - 0.5
    return np.stack([np.repeat(y, columns), np.tile(x, rows)]).astype(np.float32)


def unit_of(spec: Spec) -> tuple[float, float]:
    """Height and width of a token of the frame, in pixels of the source."""
    rows, columns = frame_of(spec.width, spec.height)
    return spec.height / rows, spec.width / columns


def prefix_places(spec: Spec) -> NDArray[np.float32]:
    """Positions [3, prefix] of the text before the image and of its tokens."""
    wide, high = spec.look if spec.views else (spec.width, spec.height)
    grid = grid_places(0, 0, spec.width, spec.height, high // UNIT, wide // UNIT, unit_of(spec))
    text = np.tile(np.arange(len(START), dtype=np.float32), (3, 1))
    seen = np.concatenate([np.zeros((1, grid.shape[1]), np.float32), grid]) + len(START)
    return np.concatenate([text, seen], 1)


class Packer:
    """Branches of one batch, image by image."""

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
        self.parts = np.zeros((b, ASKS, PARTS, 5), np.float32)  # evidence: boxes in pixels, share of each
        self.task = np.full((b, ASKS), -1, np.int8)  # index into TASKS
        self.crops = np.zeros((b, spec.crops, 4), np.float32)  # left, top, width, height in the source
        self.after = len(START) + max(frame_of(spec.width, spec.height))  # first position after the image
        self.unit = unit_of(spec)

    def add(self, row: int, ask: Ask, at: int, number: int, zooms: list[int]) -> int:
        """Appends a branch at token `at` of image `row`; gives its length, 0 where it does not fit."""
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
        self.task[row, number] = TASKS.index(ask.task)
        for i, (box, share) in enumerate(ask.parts):
            self.parts[row, number, i] = (*box, share)
        for zoom in zooms:
            ids[here], ids[here + 1 + per] = VISION_START, VISION_END
            places[:, here] = place
            x, y, wide, high = self.crops[row, zoom]
            places[0, here + 1 : here + 1 + per] = place + 1
            places[1:, here + 1 : here + 1 + per] = grid_places(
                x, y, x + wide, y + high, lines, columns, self.unit
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

    def viewed(self, row: int, scene: Scene, rng: Random, chooser: Chooser, fine: Map) -> None:
        """Questions with the windows that the engine might give them, those first whose windows have the
        batch's grid anyway. A question without a place sees a window all the same, as it does there."""
        grid = self.spec.zoom[1] // UNIT, self.spec.zoom[0] // UNIT
        asks = scene.asks
        rng.shuffle(asks)
        price = a_price(rng)
        fields = [(ask, chooser.field(ask, fine, rng)) for ask in asks if ask.parts][:TRIES]
        other = [not any(one.grid == grid for one in chooser.free(field, price)) for _, field in fields]
        boxes: list[tuple[int, int, int, int]] = []  # of the crops
        branches: list[tuple[Ask, list[int]]] = []
        for i in sorted(range(len(fields)), key=other.__getitem__):
            ask, field = fields[i]
            chosen = [one.box for one in chooser.of(field, grid, price)]
            new = [box for box in chosen if box not in boxes]
            if len(boxes) + len(new) <= self.spec.crops:
                boxes += new
                branches.append((ask, [boxes.index(box) for box in chosen]))
        while len(boxes) < self.spec.crops:  # as good as any to learn reading from
            boxes.append(chooser.anywhere(grid, fine, rng).box)
        for i, (x0, y0, x1, y1) in enumerate(boxes):
            self.crops[row, i] = (x0, y0, x1 - x0, y1 - y0)
        branches = [(ask, self._disturbed(zooms, boxes, rng)) for ask, zooms in branches]
        for ask in [ask for ask in asks if not ask.parts][:3]:
            branches.append((ask, [rng.randrange(len(boxes))] if rng.random() < 0.85 else []))
        rng.shuffle(branches)
        at = number = 0
        for ask, zooms in branches:
            length = self.add(row, ask, at, number, zooms)
            at, number = at + length, number + (length > 0)

    def _disturbed(self, zooms: list[int], boxes: list[tuple[int, int, int, int]], rng: Random) -> list[int]:
        """Now and then none, or one more that another question has; in reading order."""
        per = self.spec.zoom[0] * self.spec.zoom[1] // UNIT**2
        if rng.random() < 0.05:
            return []
        others = [i for i in range(len(boxes)) if i not in zooms]
        if others and (len(zooms) + 1) * per <= self.spec.left and rng.random() < 0.3:
            zooms = [*zooms, rng.choice(others)]
        return sorted(zooms, key=lambda i: (boxes[i][1] + boxes[i][3], boxes[i]))


def build(spec: Spec, seed: int, split: str = TRAIN) -> Arrays:
    """One batch as arrays."""
    rng = Random(f"{split}/{seed}")
    names, weights = list(spec.kinds), list(spec.kinds.values())
    scenes: list[Scene] = []
    while len(scenes) < spec.batch:
        kind = rng.choices(names, weights)[0]
        level = min(1.0, max(0.0, rng.uniform(spec.level - 0.4, spec.level + 0.1)))
        scene = make_scene(kind, split, spec.width, spec.height, level, rng.getrandbits(62))
        if scene.asks:
            scenes.append(scene)
    packer = Packer(spec)
    marks = pack(scenes)
    look: Grid = spec.look[1] // UNIT, spec.look[0] // UNIT
    chooser = Chooser(spec.width, spec.height, look, spec.left) if spec.views else None
    for row, scene in enumerate(scenes):
        if chooser is None:
            packer.plain(row, scene, rng)
        else:
            drawn = marks.rows[row, : marks.counts[row]]
            fine = ink(drawn[:, 1], drawn[:, 2], spec.width, spec.height, look)
            packer.viewed(row, scene, rng, chooser, fine)
    out: Arrays = {
        "rows": marks.rows,
        "labels": marks.labels,
        "counts": marks.counts,
        "ground": marks.ground,
        "place": prefix_places(spec),
    }
    for name in ("ids", "positions", "branch", "asked", "parts", "task"):
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
