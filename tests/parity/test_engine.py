"""Greedy output equals transformers', token for token, in every situation the scheduler can create."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig, VisionCache
from saccade.encoder.preprocess import Preprocessor
from saccade.engine.core import Engine
from saccade.inputs.processor import InputProcessor
from saccade.request import Request
from tests.conftest import FAMILIES, WITH_IMAGES
from tests.parity.oracle import Oracle, picture

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass(frozen=True)
class Question:
    text: str
    pictures: Sequence[Image.Image] = ()
    max_tokens: int = 20


@dataclass
class Bench:
    """A checkpoint under both engines; the oracle's answers are computed once."""

    folder: Path
    oracle: Oracle
    known: dict[int, tuple[Question, list[int]]] = field(
        default_factory=dict
    )  # by id, of questions kept alive
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def tight_engine(self, questions: Sequence[Question], **options: Any) -> Engine:
        """Blocks of 4 tokens, just enough of them for the largest question alone and a little more."""
        most = max(self.request(question).length + question.max_tokens for question in questions)
        return self.engine(num_blocks=-(-most // 4) + 3, block_size=4, **options)

    def engine(self, **options: Any) -> Engine:
        options = {"num_blocks": 256, **options}  # room for everything, yet quick to check after every step
        return Engine(EngineConfig(model=str(self.folder), device="cpu", **options), progress=False)

    def __post_init__(self) -> None:
        self.front = InputProcessor(open_checkpoint(str(self.folder)), 4096)

    def request(self, question: Question, **params: Any) -> Request:
        sampling = SamplingParams(max_tokens=question.max_tokens, temperature=0, **params)
        name = f"q{next(self.numbers)}"
        return self.front.prepare_prompt(
            question.text, sampling, name, images=question.pictures, trusted=True
        )

    def expected(self, question: Question) -> list[int]:
        if id(question) not in self.known:
            answer = self.oracle.greedy(self.request(question), question.pictures)
            self.known[id(question)] = question, answer
        return self.known[id(question)][1]

    def continued(self, request: Request, tokens: Sequence[int]) -> Request:
        """The same beginning, and more behind it."""
        name = f"q{next(self.numbers)}"
        return msgspec.structs.replace(request, id=name, prompt=(*request.prompt, *tokens))

    def answer(self, engine: Engine, request: Request) -> list[int]:
        return run(engine, [request])[request.id, 0]

    def check(self, engine: Engine, questions: Sequence[Question], **params: Any) -> None:
        """All questions at once; every choice of every answer must be the oracle's."""
        requests = [self.request(question, **params) for question in questions]
        answers = run(engine, requests)
        for question, request in zip(questions, requests, strict=True):
            for index in range(request.sampling.n):
                assert answers[request.id, index] == self.expected(question), question.text


def run(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.submit(request)
    answers: dict[tuple[str, int], list[int]] = {}
    while not engine.idle:
        for delta in engine.step():
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
        engine.check()
    stats = engine.stats()
    assert stats.blocks_used == stats.running == stats.waiting == 0
    return answers


@pytest.fixture(scope="module")
def bench(family_folder: Callable[[str], Path]) -> Callable[[str], Bench]:
    made: dict[str, Bench] = {}

    def make(name: str) -> Bench:
        if name not in made:
            made[name] = Bench(family_folder(name), Oracle(family_folder(name)))
        return made[name]

    return make


TEXTS = [
    Question("The eye jumps to what matters"),
    Question("How many boats are in the picture? There are"),
    Question("a"),
    Question("The eye jumps to what is red, and rests " * 6, max_tokens=30),
    Question("Read the text on the sign, then say where", max_tokens=3),
]
PICTURES = [
    Question(IMAGE + "What colour is the house?", [picture(100, 80, 1)]),
    Question("Look: " + IMAGE + "Describe the image", [picture(333, 61, 2)]),  # wide, odd
    Question(IMAGE + "x", [picture(17, 190, 3)]),  # narrow, enlarged
    Question(
        IMAGE + IMAGE + " and " + IMAGE + "?", [picture(64, 64, 4), picture(250, 90, 5), picture(31, 33, 6)]
    ),
    Question(IMAGE + "What colour is the boat?", [picture(100, 80, 1)]),  # the first picture again
    Question(IMAGE + "What colour is the house?", [picture(100, 80, 7)]),  # the first text, another picture
    Question("The eye jumps to what matters and rests there"),
]
TILE_FAMILIES = ["llava", "idefics3"]
LONG = Question("How many boats are in the picture?", max_tokens=300)

SITUATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"max_num_batched_tokens": 7},
    "few rows": {"max_num_seqs": 2},
    "few blocks": {"max_num_batched_tokens": 33},
    "few blocks, small chunks": {"max_num_batched_tokens": 7},
    "no prefix cache": {"prefix_caching": False},
    "no feature cache": {"vision_cache": VisionCache(gpu=0)},
    "one token at a time": {"max_num_batched_tokens": 1},
    "bounded steps": {"itl_target": 2.0},
}


def situated(peers: Bench, situation: str, questions: Sequence[Question], **options: Any) -> Engine:
    if "few blocks" in situation:
        return peers.tight_engine(questions, **SITUATIONS[situation], **options)
    return peers.engine(**SITUATIONS[situation], **options)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_transformers(
    bench: Callable[[str], Bench], family: str, situation: str, overlap: bool
) -> None:
    peers = bench(family)
    engine = situated(peers, situation, TEXTS, overlap=overlap)
    peers.check(engine, TEXTS)
    if "few blocks" in situation:
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("family", [*WITH_IMAGES, *TILE_FAMILIES, "qwen3_vl_tied", "smolvlm"])
def test_pictures_equal_transformers(
    bench: Callable[[str], Bench], family: str, situation: str, overlap: bool
) -> None:
    peers = bench(family)
    engine = situated(peers, situation, PICTURES, overlap=overlap)
    peers.check(engine, PICTURES)
    if "few blocks" in situation:
        assert engine.stats().preemptions > 0
    peers.check(engine, PICTURES[::-1])  # again, on whatever the caches hold now


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize(
    "options",
    [{}, {"vision_cache": VisionCache(gpu=0)}, {"num_blocks": 90, "block_size": 4}, {"graphs": "on"}],
    ids=["roomy", "no feature cache", "few blocks", "captured"],
)
@pytest.mark.parametrize("family", [*WITH_IMAGES, *TILE_FAMILIES])
def test_pictures_seen_a_few_layers_at_a_time_equal_transformers(
    bench: Callable[[str], Bench], family: str, options: dict[str, Any], overlap: bool
) -> None:
    """An answer is streaming under a target no step can meet: every view is spread over steps."""
    peers = bench(family)
    engine = peers.engine(itl_target=0.001, overlap=overlap, **options)
    stream = peers.request(LONG)
    engine.submit(stream)
    answers: dict[tuple[str, int], list[int]] = {}
    while not answers:
        for delta in engine.step():
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
    requests = [peers.request(question) for question in PICTURES]
    for name, tokens in run(engine, requests).items():
        answers.setdefault(name, []).extend(tokens)
    for question, request in zip([*PICTURES, LONG], [*requests, stream], strict=True):
        assert answers[request.id, 0] == peers.expected(question), question.text
    stats = engine.stats()
    assert stats.encode_slices >= 3 * stats.encodes - 3  # but what comes when the stream has ended


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (4096, 4096)], ids=str)
@pytest.mark.parametrize("family", [*WITH_IMAGES, *TILE_FAMILIES])
def test_the_smallest_and_the_largest_pictures_equal_transformers(
    bench: Callable[[str], Bench], family: str, size: tuple[int, int]
) -> None:
    peers = bench(family)
    drawn = picture(min(size[0], 64), min(size[1], 64), 8).resize(size)  # noise of that size takes seconds
    question = Question(IMAGE + "What is it?", [drawn], max_tokens=6)
    peers.check(peers.engine(), [question])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_output_equals_transformers(bench: Callable[[str], Bench], family: str) -> None:
    peers = bench(family)
    peers.check(peers.engine(overlap=True), [LONG])


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("situation", ["roomy", "small chunks", "few blocks", "no prefix cache"])
@pytest.mark.parametrize("family", [*WITH_IMAGES, *TILE_FAMILIES])
def test_every_choice_of_n_equals_transformers(
    bench: Callable[[str], Bench], family: str, situation: str, overlap: bool
) -> None:
    peers = bench(family)
    questions = [*PICTURES[:3], TEXTS[3]]
    peers.check(situated(peers, situation, questions, overlap=overlap), questions, n=3)


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_prefix_hits_with_the_same_and_with_another_picture(
    bench: Callable[[str], Bench], family: str
) -> None:
    peers = bench(family)
    engine = peers.engine(block_size=4)
    peers.check(engine, PICTURES[:1])
    before = engine.stats()
    peers.check(engine, PICTURES[:1])
    same = engine.stats()
    assert same.prefix_hit_tokens - before.prefix_hit_tokens >= peers.request(PICTURES[0]).length - 4
    assert same.encodes == before.encodes  # neither encoded nor even looked up again
    peers.check(engine, [PICTURES[5]])  # same size and text, other pixels: only the text before it is shared
    other = engine.stats()
    assert other.prefix_hit_tokens - same.prefix_hit_tokens < 4
    assert other.encodes == same.encodes + 1


@pytest.mark.parametrize("family", [*WITH_IMAGES, *TILE_FAMILIES])
def test_the_same_picture_behind_other_text_is_encoded_once(
    bench: Callable[[str], Bench], family: str
) -> None:
    peers = bench(family)
    engine = peers.engine()
    shared = picture(120, 120, 11)
    questions = [
        Question(f"{text}{IMAGE}?", [shared]) for text in ("", "Look ", "The sign says: ", "a b c d e f")
    ]
    peers.check(engine, questions)
    assert engine.stats().encodes == len(peers.request(questions[0]).media)
    assert engine.stats().prefix_hit_tokens == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["qwen3_vl", *TILE_FAMILIES])
def test_cancellations_in_between_change_nobody_elses_tokens(
    bench: Callable[[str], Bench], family: str, seed: int, overlap: bool
) -> None:
    peers = bench(family)
    engine = peers.engine(overlap=overlap, num_blocks=60, block_size=4, max_num_batched_tokens=11)
    questions = [*PICTURES, *TEXTS]
    requests = [peers.request(question, n=1 + index % 2) for index, question in enumerate(questions)]
    rng = np.random.default_rng(seed)
    doomed = {
        request.id: int(step) for request, step in zip(requests[::2], rng.integers(0, 40, 99), strict=False)
    }
    answers: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.submit(request)
    for step in itertools.count():
        engine.cancel([name for name, moment in doomed.items() if moment == step])
        engine.check()
        for delta in engine.step():
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
        engine.check()
        if engine.idle:
            break
    for question, request in zip(questions, requests, strict=True):
        for index in range(request.sampling.n):
            got = answers.get((request.id, index), [])
            wanted = peers.expected(question)
            assert got == (wanted[: len(got)] if request.id in doomed else wanted)
    stats = engine.stats()
    assert stats.blocks_used == 0


def video(frames: int, height: int, width: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    stills = [np.asarray(picture(width, height, seed * 100 + index)) for index in range(frames)]
    return np.stack(stills)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}], ids=["roomy", "small chunks"])
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_two_videos_equal_transformers(
    bench: Callable[[str], Bench], family: str, options: dict[str, Any]
) -> None:
    """transformers is fed the patches we made: its own video processor needs torchvision."""
    peers = bench(family)
    checkpoint = open_checkpoint(str(peers.folder))
    front = InputProcessor(checkpoint, 4096)
    videos = [(video(6, 70, 100, 1), 2.0), (video(5, 96, 64, 2), 2.0)]
    params = SamplingParams(max_tokens=20, temperature=0)
    request = front.prepare_prompt(
        f"First {VIDEO} then {VIDEO} what happens?", params, "videos", videos=videos, trusted=True
    )
    assert checkpoint.video is not None
    preprocess = Preprocessor(checkpoint.video, torch.device("cpu"))
    patches = [preprocess.patches(torch.from_numpy(m.pixels.copy()), m.view) for m in request.media]
    last = request.media[-1].view.grid
    grids = [[3, *request.media[0].view.grid], [len(patches) - 3, *last]]
    seconds = [2 / 2.0, 2 / (4 / 5 * 2.0)]  # frames of a view at the sampled rate: 6 of 6 frames, 4 of 5
    timed = {"second_per_grid_ts": torch.tensor(seconds)} if family == "qwen2_5_vl" else {}
    expected = peers.oracle.greedy_video(request, torch.cat(patches), grids, **timed)
    answers = run(peers.engine(**options), [request])
    assert answers["videos", 0] == expected
