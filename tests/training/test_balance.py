"""What is learned of looks: to trust the map that lies on the evidence, when it does."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from saccade.lod.balance import balance
from saccade.lod.types import SCORERS, Leanings, Look, Map, Picture, StillMaps, ViewRule
from training.balance import Seen, evidence, learn, told

GRID = (8, 8)
SIZE = (512, 512)
TOP = np.zeros(GRID, np.float32)
TOP[0] = 1.0
BLANK = StillMaps(propositional=TOP, perspectival=TOP, lost=TOP)  # nothing but in the first row


def spot(row: int, column: int) -> Map:
    found = np.full(GRID, 0.01, np.float32)
    found[row, column] = 1.0
    return found


def seen(rng: np.random.Generator, right: str) -> Seen:
    """Evidence in one cell; the map named `right` shows it, the others another place each."""
    row, column = (int(one) for one in rng.integers(0, 8, 2))
    maps: dict[str, Map] = {name: spot((row + i + 1) % 8, (column + 3) % 8) for i, name in enumerate(SCORERS)}
    maps[right] = spot(row, column)
    still = StillMaps(
        propositional=maps["propositional"],
        perspectival=maps["perspectival"],
        lost=np.zeros(GRID, np.float32) if right == "propositional" else np.ones(GRID, np.float32),
    )
    look = Look(still=still, participatory=maps["participatory"])
    picture = Picture(look=look, size=SIZE, frame=(16, 16), grid=GRID)
    return Seen(picture, 80, (column * 64.0, row * 64.0, column * 64.0 + 64, row * 64.0 + 64))


def weights(one: Seen, learned: Leanings) -> dict[str, float]:
    found = balance(one.picture.look, leanings=learned).weights.scorers
    return dict(zip(SCORERS, found, strict=True))


def test_what_is_learned_of_a_tension_is_applied_to_it() -> None:
    """The question's map has one place or two: only diversify tells whom to trust."""
    rng = np.random.default_rng(4)

    def one(two: bool) -> Seen:
        made = seen(rng, "propositional" if two else "participatory")
        look = made.picture.look
        lost = msgspec.structs.replace(look.still, lost=np.zeros(GRID, np.float32))
        question = look.participatory.copy()
        if two:
            row, column = divmod(int(question.argmax()), 8)
            question[(row + 4) % 8, (column + 4) % 8] = 1.0
        look = Look(still=lost, participatory=question)
        return replace(made, picture=msgspec.structs.replace(made.picture, look=look))

    looks = [one(two) for _ in range(40) for two in (True, False)]
    learned = learn(looks)
    assert weights(looks[0], learned)["propositional"] > 0.7
    assert weights(looks[1], learned)["participatory"] > 0.7


def test_evidence_is_as_large_as_its_box() -> None:
    on = evidence((4, 8), (512, 256), (96.0, 32.0, 224.0, 64.0))
    assert on.sum() * 64 * 64 == pytest.approx(128 * 32)
    assert on[0].tolist() == pytest.approx([0, 0.25, 0.5, 0.25, 0, 0, 0, 0])


def test_a_lone_scorer_that_is_right_is_trusted() -> None:
    rng = np.random.default_rng(0)
    for right in SCORERS:
        looks = [seen(rng, right) for _ in range(30)]
        assert weights(looks[0], learn(looks))[right] > 0.9


def test_leanings_stay_small_however_sure_the_scenes_make_them() -> None:
    looks = [seen(np.random.default_rng(5), "perspectival")] * 3
    assert 1 < max(abs(value) for row in learn(looks) for value in row) < 3


def test_a_question_nobody_understood_decides_nothing() -> None:
    rng = np.random.default_rng(6)
    looks = [seen(rng, "participatory") for _ in range(20)]
    nowhere = msgspec.structs.replace(looks[0].picture, look=Look(still=BLANK, participatory=TOP))
    lost = replace(looks[0], picture=nowhere, box=(0.0, 448.0, 64.0, 512.0))
    assert lost.whole
    assert lost.held == [0.0, 0.0, 0.0]
    assert weights(looks[0], learn([*looks, lost]))["participatory"] > 0.9


def test_a_look_in_which_a_scorer_is_silent_is_left_out() -> None:
    one = seen(np.random.default_rng(7), "participatory")
    look = msgspec.structs.replace(one.picture.look, participatory=np.zeros(GRID, np.float32))
    assert one.whole
    assert not replace(one, picture=msgspec.structs.replace(one.picture, look=look)).whole


def test_whom_to_trust_may_depend_on_a_tension() -> None:
    """Where there is writing the question is right, elsewhere the picture: no fixed weights could do both."""
    rng = np.random.default_rng(1)
    looks = [seen(rng, right) for _ in range(40) for right in ("propositional", "participatory")]
    learned = learn(looks)
    for one, right in zip(looks[:2], ("propositional", "participatory"), strict=True):
        assert weights(one, learned)[right] > 0.8


def test_windows_by_what_was_learned_lie_on_the_evidence() -> None:
    rng = np.random.default_rng(2)
    looks = [seen(rng, "perspectival") for _ in range(30)]
    share = [
        float(told(looks, ViewRule(leanings=leanings)).split("%")[0]) for leanings in (None, learn(looks))
    ]
    assert share[1] > 95 > share[0]
