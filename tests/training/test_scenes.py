"""The scenes behind the embedded model: reproducible, true to their answers, with disjoint splits."""

import hashlib
from random import Random

import numpy as np
import pytest

from saccade.tools.evaluation import question_set
from saccade.tools.evaluation.question_set import TASKS, equal_answers
from saccade.tools.evaluation.renderer import SHAPES
from training.scenes import charts, documents, objects, words
from training.scenes.fonts import fonts
from training.scenes.generate import KINDS, evaluation_set, example, make_scene
from training.scenes.scene import Scene
from training.scenes.words import EVAL, TRAIN

SOME = 12  # scenes per kind


def scenes(kind: str, split: str = EVAL) -> list[Scene]:
    return [make_scene(kind, split, 480, 384, 0.3 + 0.05 * i, i) for i in range(SOME)]


@pytest.mark.parametrize("task", ["colour", "receipt", "pie_chart"])
def test_the_same_seed_draws_the_same_bits(task: str) -> None:
    first, second = example(task, 3), example(task, 3)
    assert (first.question, first.answer, first.box) == (second.question, second.answer, second.box)
    assert np.array_equal(first.image, second.image)


def test_the_evaluation_set_is_the_published_one() -> None:
    """A change of renderer, words or layouts changes this digest; then every published accuracy is void."""
    digest = hashlib.sha256()
    for task in TASKS:
        asked = question_set.example(task, 0)
        digest.update(asked.image.tobytes() + asked.question.encode() + asked.answer.encode())
    assert digest.hexdigest()[:16] == "fa0d4d9eb7eb30cb"


@pytest.mark.parametrize("task", TASKS)
def test_the_shipped_file_has_what_the_generators_draw(task: str) -> None:
    for index in (0, 1, 87, 199):
        drawn, shipped = example(task, index), question_set.example(task, index)
        assert np.array_equal(drawn.image, shipped.image)
        for field in ("task", "question", "answer", "accepted", "box", "kind", "index"):
            assert getattr(drawn, field) == getattr(shipped, field)


def test_another_seed_draws_something_else() -> None:
    assert not np.array_equal(example("word", 0).image, example("word", 0, seed=1).image)


def test_every_task_is_asked_in_order() -> None:
    found = [e.task for e in evaluation_set(1, tasks=("colour", "form", "absent"))]
    assert found == ["colour", "form", "absent"]


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_lies_in_the_image(kind: str) -> None:
    for scene in scenes(kind):
        for ask in scene.asks:
            if ask.box is not None:
                x0, y0, x1, y1 = ask.box
                assert x0 < x1
                assert y0 < y1
                assert x1 > 0
                assert y1 > 0
                assert x0 < scene.width
                assert y0 < scene.height


def written(scene: Scene) -> str:
    return " ".join(run.text.decode() for run in scene.runs)


@pytest.mark.parametrize(
    "kind", ["signs", "form", "receipt", "table", "needle", "small_print", "bars", "lines"]
)
def test_an_answer_to_read_is_written_in_its_evidence(kind: str) -> None:
    reading = {"word", "code", "number", "form", "receipt", "table", "needle", "small_print"}
    for scene in scenes(kind):
        text = written(scene)
        for ask in scene.asks:
            if ask.task in reading and "\n" not in ask.answer:
                assert ask.answer in text, ask


def test_counts_agree_with_what_is_drawn() -> None:
    for scene in scenes("objects"):
        shapes = [int(mark[14]) for mark in scene.primitives if mark[14]]
        for ask in scene.asks:
            if ask.task == "count" and "shapes" in ask.question and "shapes are there" in ask.question:
                named = [
                    c
                    for c in ("red", "green", "blue", "gray", "black", "white", "pink", "cyan")
                    if c in ask.question
                ]
                if not named and ask.question == "How many shapes are there?":
                    assert int(ask.answer) == len(shapes)


def test_what_is_absent_is_not_drawn() -> None:
    for scene in scenes("objects"):
        drawn = {SHAPES[int(mark[14]) - 1] for mark in scene.primitives if mark[14]}
        for ask in scene.asks:
            if ask.task == "absent" and "colo" in ask.question:
                assert ask.answer.removeprefix("There is no ").rstrip(".") not in drawn


def test_yes_and_no_are_balanced() -> None:
    answers = [
        ask.answer
        for kind in ("objects", "signs", "form", "bars")
        for seed in range(150)
        for ask in make_scene(kind, EVAL, 480, 384, 0.7, seed).asks
        if ask.task == "yes_no"
    ]
    assert set(answers) == {"yes", "no"}
    assert 0.42 < answers.count("yes") / len(answers) < 0.58


def test_train_and_eval_share_no_font() -> None:
    assert not set(fonts(TRAIN)) & set(fonts(EVAL))
    for split in (TRAIN, EVAL):
        used = {run.font for scene in scenes("signs", split) for run in scene.runs}
        assert used <= set(fonts(split))


def test_train_and_eval_share_no_word() -> None:
    rng = Random(0)
    for make in (words.thing, words.code, words.number, words.invented):
        train = {make(rng, TRAIN) for _ in range(300)}
        assert not train & {make(rng, EVAL) for _ in range(300)}


@pytest.mark.parametrize(
    "layouts", [objects.LAYOUTS, documents.FORMS, documents.RECEIPTS, documents.TABLES, charts.PIES]
)
def test_the_evaluation_set_has_layouts_of_its_own(layouts: dict[str, tuple[object, ...]]) -> None:
    assert set(layouts["eval"]) - set(layouts["train"])


@pytest.mark.parametrize(
    ("task", "answer", "text", "right"),
    [
        ("colour", "red", "Red.", True),
        ("size", "red circle", "the red circle", True),
        ("code", "K7Q2", "K7Q", False),
        ("describe", "There is a red star and a blue ring.", "There is a blue ring and a red star.", True),
        ("describe", "There is a red star and a blue ring.", "There is a red star.", False),
        ("absent", "There is no red card.", "there is no red card", True),
    ],
)
def test_the_scoring_rule(task: str, answer: str, text: str, right: bool) -> None:
    assert equal_answers(task, answer, text) is right


def test_training_meets_every_letter_beside_most_others() -> None:
    """Words of simple syllables taught no double letters and few neighbours: "Pebbie" for "Pebble"."""
    rng = Random(0)
    found = [words.invented(rng, words.TRAIN) for _ in range(4000)]
    pairs = {word[i : i + 2] for word in found for i in range(len(word) - 1)}
    assert {"bb", "ll", "qu", "tt", "ck"} <= pairs
    assert len(pairs) > 500
    assert all(words.in_split(word, words.TRAIN) for word in found)
