"""Writes the fixed evaluation set: `python -m training.write_question_set`.

The file stores what the generators decide, so the package evaluates without them. Columns are stored one by
one because they compress better alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.tools.evaluation.question_set import PER_TASK, QUESTIONS, TASKS
from saccade.tools.evaluation.renderer import COLUMNS

from .scenes.generate import background, example_scene


def arrays() -> dict[str, NDArray[Any]]:
    """The members of the file."""
    found = [example_scene(task, index) for task in TASKS for index in range(PER_TASK)]
    scenes = [scene for _, scene, _ in found]
    runs = [run for scene in scenes for run in scene.runs]
    shapes = np.array([mark for scene in scenes for mark in scene.primitives], np.float32)[:, :COLUMNS]
    texts = [[ask.task, kind, ask.question, ask.answer, ask.accepted] for kind, _, ask in found]
    boxes = [ask.box or (0.0, 0.0, float(scene.width), float(scene.height)) for _, scene, ask in found]
    places = np.array([(run.x, run.y, run.size) for run in runs], np.float32)
    return {
        "texts": np.frombuffer(json.dumps(texts, separators=(",", ":")).encode(), np.uint8),
        "sizes": np.array([(scene.width, scene.height) for scene in scenes], np.int32),
        "evidence": np.array(boxes, np.float64),
        "ground": np.stack([background(scene) for scene in scenes]),
        "shape_counts": np.array([len(scene.primitives) for scene in scenes], np.int32),
        **{f"shape_{column}": shapes[:, column] for column in range(COLUMNS)},
        "run_counts": np.array([len(scene.runs) for scene in scenes], np.int32),
        **{f"run_{column}": places[:, column] for column in range(3)},
        "styles": np.array([(run.font, *run.colour, run.degrees) for run in runs], np.int16),
        "glyph_counts": np.array([len(run.text) for run in runs], np.int32),
        "glyphs": np.frombuffer(b"".join(run.text for run in runs), np.uint8),
    }


def main() -> None:
    np.savez_compressed(QUESTIONS, allow_pickle=False, **arrays())
    print(QUESTIONS, QUESTIONS.stat().st_size)


if __name__ == "__main__":
    main()
