"""What is taken over from the prefix cache to the token: the answers stay those of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.config import VisionCache
from tests.parity.oracle import Oracle, picture
from tests.parity.test_engine import IMAGE, Bench, Question

SYSTEM = "The eye jumps to what is red, and rests "
TURNS = [
    Question(SYSTEM + "on the boat"),
    Question(SYSTEM + "on the house, then"),
    Question(SYSTEM[:-7] + "sleeps"),
    Question(SYSTEM),
]
SEEN = picture(100, 80, 1)
QUESTIONS = [
    Question(f"{IMAGE}What colour is the house?", [SEEN]),
    Question(f"{IMAGE}What colour is the boat?", [SEEN]),
    Question(f"{IMAGE}Where?", [SEEN]),
    Question(f"{IMAGE}{IMAGE}What colour is the house?", [SEEN, picture(90, 60, 2)]),
    Question(f"{IMAGE}{IMAGE}What colour is the house?", [SEEN, picture(90, 60, 3)]),
]


@pytest.fixture(scope="module")
def peers(family_folder: Callable[[str], Path]) -> Bench:
    folder = family_folder("qwen3_vl")
    return Bench(folder, Oracle(folder))


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("block_size", [8, 24])
def test_a_text_that_diverges_inside_a_block(peers: Bench, block_size: int, overlap: bool) -> None:
    engine = peers.engine(block_size=block_size, overlap=overlap, num_blocks=64)
    for question in TURNS:
        peers.check(engine, [question])
    assert engine.stats().prefix_copied_tokens > 0
    peers.check(engine, TURNS, n=2)  # all at once, on what is there now


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_other_questions_about_an_image_whose_features_were_evicted(peers: Bench, overlap: bool) -> None:
    engine = peers.engine(block_size=16, overlap=overlap, vision_cache=VisionCache(gpu=0))
    for question in QUESTIONS[:3]:
        peers.check(engine, [question])
    stats = engine.stats()
    assert stats.encodes == 1
    assert stats.prefix_copied_tokens > 0
    for question in QUESTIONS[3:]:  # two images side by side, the second another one each time
        peers.check(engine, [question])
    assert engine.stats().encodes == 3


def test_a_conversation_diverges_in_the_middle_of_an_answer(peers: Bench) -> None:
    engine = peers.engine(block_size=16)
    peers.check(engine, QUESTIONS[:1])
    before = engine.stats()
    first = peers.request(QUESTIONS[0])
    answer = peers.expected(QUESTIONS[0])
    kept = len(answer) // 2
    turn = peers.continued(first, [*answer[:kept], 5, 6, 7])
    expected = peers.oracle.greedy(turn, QUESTIONS[0].pictures)
    assert peers.answer(engine, turn) == expected
    stats = engine.stats()
    assert stats.prefix_hit_tokens - before.prefix_hit_tokens == first.length + kept
    assert stats.encodes == before.encodes
