"""The fixed evaluation set: 200 questions for each of 20 tasks, with images, answers and the scoring rule.

`data/questions.npz`, written by `training/write_question_set.py`, stores the questions and the primitives of
their images. Fresh scenes (another seed, or more questions than the file has) need the generators in
training/, which are not part of the package."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from saccade.errors import ConfigError
from saccade.tools.evaluation.renderer import COLUMNS, Primitives, TextRun, glyph_primitives, paint

QUESTIONS = Path(__file__).parent / "data" / "questions.npz"
GENERATOR = "training.scenes.generate"
SEED = 20261115  # of the fixed set
PER_TASK = 200
MOST_WORKERS = 8
TASKS: tuple[str, ...] = (
    *("colour", "shape", "size", "position", "count", "relation", "word", "code", "number"),
    *("form", "receipt", "table", "bar_chart", "line_chart", "pie_chart", "needle", "small_print"),
    *("yes_no", "describe", "absent"),
)

Key = tuple[str, int] | tuple[str, int, int]  # task, index, and the seed if it is not the fixed set's


@dataclass(frozen=True, slots=True)
class Example:
    """One question. `box` is where the evidence lies, in pixels; or the whole image."""

    task: str
    image: NDArray[np.uint8]  # [height, width, 3]
    question: str
    answer: str
    accepted: tuple[str, ...]
    box: tuple[float, float, float, float]
    kind: str  # of scene
    index: int


class QuestionFile:
    """`questions.npz` in memory. Shapes and text runs are concatenated over questions, glyphs over runs."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self._texts = json.loads(file["texts"].tobytes())  # task, kind, question, answer, accepted
            self._sizes: NDArray[np.int32] = file["sizes"]  # width, height
            self._evidence: NDArray[np.float64] = file["evidence"]
            self._ground: NDArray[np.int32] = file["ground"]
            self._shapes = np.stack([file[f"shape_{column}"] for column in range(COLUMNS)], axis=1)
            self._runs = np.stack([file[f"run_{column}"] for column in range(3)], axis=1)  # x, y, size
            self._styles: NDArray[np.int16] = file["styles"]  # font, r, g, b, degrees
            self._glyphs = file["glyphs"].tobytes()
            names = ("shape", "run", "glyph")
            self._ends = {name: np.cumsum(file[f"{name}_counts"], dtype=np.int64) for name in names}

    def example(self, row: int) -> Example:
        task, kind, question, answer, accepted = self._texts[row]
        width, height = self._sizes[row].tolist()
        image = paint(self._primitives(row), self._ground[row], width, height)
        x0, y0, x1, y1 = self._evidence[row].tolist()
        return Example(task, image, question, answer, tuple(accepted), (x0, y0, x1, y1), kind, row % PER_TASK)

    def _span(self, name: str, row: int) -> tuple[int, int]:
        ends = self._ends[name]
        return int(ends[row - 1]) if row else 0, int(ends[row])

    def _primitives(self, row: int) -> Primitives:
        shapes: Primitives = self._shapes[slice(*self._span("shape", row))]
        runs = [self._run(number) for number in range(*self._span("run", row))]
        if not runs:
            return shapes
        glyphs, _, _ = glyph_primitives(runs, np.zeros(len(runs), np.int64))
        return np.concatenate([shapes, glyphs])

    def _run(self, number: int) -> TextRun:
        x, y, size = self._runs[number].tolist()
        font, red, green, blue, degrees = self._styles[number].tolist()
        text = self._glyphs[slice(*self._span("glyph", number))]
        return TextRun(x, y, size, font, (red, green, blue), degrees, text)


@cache
def question_file() -> QuestionFile:
    return QuestionFile(QUESTIONS)


def example(task: str, index: int, seed: int = SEED) -> Example:
    """Question `index` of a task; ConfigError if it takes the generators and they are not there."""
    if task not in TASKS:
        raise KeyError(task)
    if seed == SEED and 0 <= index < PER_TASK:
        return question_file().example(TASKS.index(task) * PER_TASK + index)
    try:
        generate = import_module(GENERATOR)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package has {PER_TASK} questions per task; --scenes and a larger --count need the"
            " generators in training/: run `python -m saccade` in the root of a source checkout"
        ) from error
    drawn: Example = generate.example(task, index, seed)
    return drawn


def normalise(text: str) -> str:
    """Lower case, single spaces, no full stop or quotes around it, no leading article."""
    text = " ".join(text.casefold().split()).strip("\"'").rstrip(".").strip("\"'")
    return text.removeprefix("the ")


def described_objects(text: str) -> list[str]:
    """Sorted parts of a description: "There is a red circle and a blue star." gives its two names."""
    text = re.sub(r"^(there is|there are|this is) ", "", normalise(text))
    return sorted(re.sub(r"^(an?|the text) ", "", part).strip("\"' ") for part in re.split(r", | and ", text))


def equal_answers(task: str, answer: str, text: str) -> bool:
    """The scoring rule: equal after normalisation; a description names the same things in any order."""
    if task == "describe":
        return described_objects(answer) == described_objects(text)
    return normalise(answer) == normalise(text)


def correct(example: Example, text: str) -> bool:
    return any(equal_answers(example.task, answer, text) for answer in (example.answer, *example.accepted))


def chosen_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """The named tasks in the set's order; all of them when none is named."""
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"there is no task {name!r}; known are {', '.join(TASKS)}")
    return tuple(task for task in TASKS if not names or task in names)


def sample_keys(tasks: Sequence[str], count: int, limit: int | None) -> list[tuple[str, int]]:
    """Which questions of a set of `count` per task to ask: all, or `limit` of each, spread evenly."""
    asked = count if limit is None else min(limit, count)
    return [(task, number * count // asked) for task in tasks for number in range(asked)]


def default_workers() -> int:
    return min(MOST_WORKERS, (os.cpu_count() or 1) // 2)


def _draw(key: Key) -> Example:
    return example(*key)


def chunks(wanted: Sequence[Key], size: int, workers: int) -> Iterator[list[Example]]:
    """Examples, `size` at a time. The next chunk is drawn while one is being answered, so at most two chunks
    of images are held. The worker processes import no torch."""
    parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
    if workers == 0:
        for part in parts:
            yield [_draw(key) for key in part]
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            ahead = [pool.submit(_draw, key) for key in parts[0]] if parts else []
            for following in (*parts[1:], ()):
                drawn = [future.result() for future in ahead]
                ahead = [pool.submit(_draw, key) for key in following]
                yield drawn
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
