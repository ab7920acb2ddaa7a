"""Global and zoomed views: the engine's tokens equal transformers' for the same views and positions."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.encoder.preprocess import Preprocessor
from saccade.encoder.prompt_layout import insert_zoomed_views, lay_out_prompt
from saccade.encoder.upload import PixelUploads
from saccade.engine import builder as build
from saccade.engine.core import Engine
from saccade.inputs.processor import InputProcessor
from saccade.lod.detail import DetailRequest
from saccade.lod.types import LodParams, Region
from saccade.request import Pixels, Request, ZoomResult
from saccade.step_plan import StepPlan
from saccade.worker.model_runner import LaunchedStep
from tests.parity.oracle import Oracle, picture
from tests.parity.test_engine import IMAGE, SITUATIONS, run

VIEWS = {
    "trained": True,
    "global_tokens": [4, 12],
    "zoom_tokens": [16, 64],
    "placement": "after_question",
}


@dataclass(frozen=True)
class Question:
    text: str
    pictures: Sequence[Image.Image]
    zooms: tuple[tuple[Region, ...], ...] | None
    budget: int | None = None
    max_tokens: int = 16
    gate: bool = True


@dataclass
class Bench:
    """A checkpoint under both engines."""

    folder: Path
    oracle: Oracle
    known: dict[int, list[int]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.front = InputProcessor(open_checkpoint(str(self.folder)), 4096)

    def request(self, question: Question, **params: Any) -> Request:
        sampling = SamplingParams(max_tokens=question.max_tokens, **{"temperature": 0, **params})
        return self.front.prepare_prompt(
            question.text,
            sampling,
            f"v{next(self.numbers)}",
            images=question.pictures,
            trusted=True,
            detail_req=DetailRequest(
                params=LodParams(budget=question.budget, zooms=question.zooms, gate=question.gate)
            ),
        )

    def engine(self, **options: Any) -> Engine:
        options = {"num_blocks": 256, **options}
        return Engine(EngineConfig(model=str(self.folder), device="cpu", **options), progress=False)

    def expected(self, question: Question) -> list[int]:
        if id(question) not in self.known:
            request = self.request(question)
            self.known[id(question)] = self.oracle.greedy_views(request, patches_of(self.front, request))
        return self.known[id(question)]

    def check(self, engine: Engine, questions: Sequence[Question], **params: Any) -> None:
        requests = [self.request(question, **params) for question in questions]
        answers = run(engine, requests)
        for question, request in zip(questions, requests, strict=True):
            for index in range(request.sampling.n):
                assert answers[request.id, index] == self.expected(question), question.text


def looked(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[list[list[int]], ZoomResult]]:
    """Every choice's tokens of requests that are looked at, and the views that were chosen for them."""
    answers: dict[str, tuple[list[list[int]], list[ZoomResult]]] = {}
    for request in requests:
        engine.submit(request)
        answers[request.id] = [[] for _ in range(request.sampling.n)], []
    while not engine.idle:
        for delta in engine.step():
            answers[delta.request_id][0][delta.index].extend(delta.tokens)
            answers[delta.request_id][1].extend([delta.zoomed] if delta.zoomed else [])
        engine.check()
    stats = engine.stats()
    assert stats.blocks_used == stats.running == stats.waiting == 0
    assert all(len(told) == 1 for _, told in answers.values()), "what was chosen is told once"
    return {name: (tokens, told[0]) for name, (tokens, told) in answers.items()}


def patches_of(front: InputProcessor, request: Request) -> torch.Tensor:
    """What our preprocessing makes of every view, in prompt order."""
    assert front.checkpoint.image is not None
    preprocess = Preprocessor(front.checkpoint.image, torch.device("cpu"))
    pixels = {item.placeholder: item.pixels for item in request.media}
    media = sorted(request.media, key=lambda item: item.placeholder)
    return torch.cat(
        [
            preprocess.patches(
                torch.from_numpy(pixels[item.placeholder if item.origin is None else item.origin].copy()),
                item.view,
            )
            for item in media
        ]
    )


@pytest.fixture(scope="module")
def bench(
    family_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Bench]:
    made: dict[str, Bench] = {}

    def make(mode: str) -> Bench:
        if mode not in made:
            # Another mode is a family, in stock positions.
            folder = family_folder("qwen3_vl" if mode in ("stock", "registered") else mode)
            oracle = Oracle(folder)
            folder = shutil.copytree(folder, tmp_path_factory.mktemp("views") / mode)
            config = json.loads((folder / "config.json").read_text())
            positions = "registered" if mode == "registered" else "stock"
            section: dict[str, Any] = {"views": {**VIEWS, "positions": positions}}
            if mode == "registered":
                section["relevance"] = write_head(folder)
            (folder / "config.json").write_text(json.dumps({**config, "saccade": section}))
            made[mode] = Bench(folder, oracle)
        return made[mode]

    return make


HEAD_WIDTH, HEAD_LAYER = 8, 2


def write_head(folder: Path, hidden: int = 64) -> dict[str, Any]:
    """A random relevance head, and the section of config.json that names it."""
    generator = torch.Generator().manual_seed(5)
    save_file(
        {
            "relevance_norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            "question.weight": 0.05 * torch.randn(HEAD_WIDTH, hidden, generator=generator),
            "place.weight": 0.05 * torch.randn(HEAD_WIDTH, hidden, generator=generator),
        },
        folder / "head.safetensors",
    )
    return {"file": "head.safetensors", "layer": HEAD_LAYER, "width": HEAD_WIDTH}


def zoom(x0: int, y0: int, x1: int, y1: int, rows: int, columns: int) -> Region:
    return Region((x0, y0, x1, y1), (rows, columns), 1.0)


SHARED = picture(230, 250, 21)
LARGE = [picture(250, 256, 21), picture(256, 248, 22)]  # 64 tokens each at full detail
TURN = "<|im_start|>user\n" + IMAGE + "{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = [
    Question(TURN.format("What colour is the house?"), [LARGE[0]], ((zoom(30, 40, 130, 161, 4, 4),),), 40),
    Question(
        TURN.format("Read the sign"),
        [LARGE[0]],
        ((zoom(0, 0, 64, 32, 2, 4), zoom(101, 7, 230, 99, 4, 4)),),
        60,
    ),
    Question(TURN.format("What colour is the boat?"), [LARGE[0]], ((zoom(30, 40, 130, 161, 4, 4),),), 40),
    Question(
        "Look: " + IMAGE + IMAGE + " which?",
        LARGE,
        ((zoom(10, 10, 60, 60, 2, 2),), (zoom(0, 100, 256, 190, 3, 5), zoom(3, 5, 9, 11, 1, 1))),
        90,
    ),
    Question(TURN.format("no zoom"), [LARGE[1]], ((),), 20, 60),
    Question("x" + IMAGE, [LARGE[1]], ((zoom(0, 0, 50, 50, 1, 1),),), 9, 80),
]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize(
    ("mode", "situation"),
    [
        ("stock", "roomy"),
        ("stock", "few blocks, small chunks"),
        ("qwen2_5_vl", "roomy"),
        ("qwen2_5_vl", "few blocks, small chunks"),
        *[("registered", name) for name in SITUATIONS if name != "one token at a time"],
    ],
)
def test_given_zooms_equal_transformers(
    bench: Callable[[str], Bench], mode: str, situation: str, overlap: bool
) -> None:
    peers = bench(mode)
    options: dict[str, Any] = dict(SITUATIONS[situation])
    if "few blocks" in situation:
        most = max(peers.request(one).length + one.max_tokens for one in QUESTIONS)
        options |= {"num_blocks": -(-most // 4) + 3, "block_size": 4}
    engine = peers.engine(overlap=overlap, **options)
    peers.check(engine, QUESTIONS)
    if "few blocks" in situation:
        assert engine.stats().preemptions > 0
    peers.check(engine, QUESTIONS[-1::-2], n=2)  # again, on whatever the caches hold now


def test_registered_positions_are_those_of_training(bench: Callable[[str], Bench]) -> None:
    """The rule of training/README.md, written out for one view."""
    request = bench("registered").request(QUESTIONS[0])
    layout = lay_out_prompt(request)
    whole, part = layout.spans
    (rows, columns), begin = request.media[0].full, whole.start
    width, height = LARGE[0].size
    assert (rows, columns) != whole.view.token_grid
    high, wide = whole.view.token_grid
    first = layout.positions[:, whole.start]
    assert np.allclose(first, [begin, begin + 0.5 * rows / high - 0.5, begin + 0.5 * columns / wide - 0.5])
    assert layout.positions[0, whole.stop] == begin + max(rows, columns)
    place = layout.positions[0, part.start - 1]  # <|vision_start|>
    i, j = 2, 3
    x0, y0, x1, y1 = part.view.box
    token = layout.positions[:, part.start + i * 4 + j]
    # in pixels of the frame, whose tokens are 32 wide and high
    y, x = y0 * rows * 32 / height, x0 * columns * 32 / width
    tall, broad = (y1 - y0) * rows * 32 / height, (x1 - x0) * columns * 32 / width
    expected = [
        place + 1,
        begin + (y + (i + 0.5) * tall / 4) / 32 - 0.5,
        begin + (x + (j + 0.5) * broad / 4) / 32 - 0.5,
    ]
    assert np.allclose(token, expected, atol=1e-5)
    assert layout.positions[0, part.stop] == place + 2
    assert layout.positions[0, part.stop + 1] == place + 3
    assert layout.delta + len(layout.tokens) == layout.positions[0, -1] + 1


def test_a_full_view_stands_where_the_stock_rule_puts_it(bench: Callable[[str], Bench]) -> None:
    """With no view but the plain one registered positions are the stock ones: full detail changes nothing."""
    peers = bench("registered")
    plain = peers.front.prepare_prompt(
        QUESTIONS[0].text, SamplingParams(max_tokens=4), "plain", images=[LARGE[0]], trusted=True
    )
    stock = bench("stock").front.prepare_prompt(
        QUESTIONS[0].text, SamplingParams(max_tokens=4), "plain", images=[LARGE[0]], trusted=True
    )
    full = peers.request(Question(QUESTIONS[0].text, [LARGE[0]], ((),), 64))
    assert np.array_equal(lay_out_prompt(plain).positions, lay_out_prompt(stock).positions)
    assert np.array_equal(lay_out_prompt(plain).positions, lay_out_prompt(full).positions)


def test_twin_pictures_never_share_the_blocks_of_a_zoom(bench: Callable[[str], Bench]) -> None:
    """The same zoom of the first and of the second of two equal pictures stands at other positions."""
    peers = bench("registered")
    one = ((zoom(30, 40, 130, 161, 4, 4),), ())
    both = [Question(IMAGE + IMAGE + "?", [SHARED, SHARED], zooms, 60) for zooms in (one, one[::-1])]
    engine = peers.engine(block_size=1)
    peers.check(engine, both[:1])
    peers.check(engine, both[1:])
    assert peers.expected(both[0]) != peers.expected(both[1])


LOOKS = [
    Question(TURN.format("What colour is the house?"), [LARGE[0]], None, 56, gate=False),
    Question(TURN.format("What colour is the boat?"), [LARGE[0]], None, 56, gate=False),
    Question("Look: " + IMAGE + " and " + IMAGE + " which?", LARGE, None, 112, gate=False),  # no turn to end
    Question(TURN.format("Read the sign"), [LARGE[1]], None, 60, 60, gate=False),
    Question("x" + IMAGE, [LARGE[1]], None, 52, 80),  # nothing behind the picture
]


def check_looks(
    peers: Bench, engine: Engine, questions: Sequence[Question], **params: Any
) -> list[ZoomResult]:
    """The tokens are those of transformers for the views that were chosen."""
    requests = [peers.request(question, **params) for question in questions]
    answers = looked(engine, requests)
    for question, request in zip(questions, requests, strict=True):
        choices, chosen = answers[request.id]
        assert request.zooming is not None, "the budget leaves nothing to choose"
        decided = insert_zoomed_views(
            request, dict(zip(request.zooming.placeholders, chosen.regions, strict=True))
        )
        key = hash((question.text, question.max_tokens, str(boxes(chosen))))
        if key not in peers.known:
            peers.known[key] = peers.oracle.greedy_views(decided, patches_of(peers.front, decided))
        assert choices == [peers.known[key]] * request.sampling.n, question.text
        visual = sum(item.view.tokens for item in decided.media)
        assert question.budget is not None
        assert visual <= question.budget
        assert decided.length == request.length + chosen.more_tokens
    return [answers[request.id][1] for request in requests]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize(
    ("mode", "situation"),
    [
        *[("stock", name) for name in ("roomy", "small chunks", "few blocks", "no prefix cache")],
        *[("qwen2_5_vl", name) for name in ("roomy", "small chunks", "few blocks")],
        *[("registered", name) for name in SITUATIONS if name != "one token at a time"],
    ],
)
def test_chosen_zooms_equal_transformers(
    bench: Callable[[str], Bench], mode: str, situation: str, overlap: bool
) -> None:
    """Without a head (stock) and with one (registered), whatever the steps look like."""
    peers = bench(mode)
    options: dict[str, Any] = dict(SITUATIONS[situation])
    if "few blocks" in situation:
        most = max(peers.request(one).max_length + one.max_tokens for one in LOOKS)
        options |= {"num_blocks": -(-most // 4) + 3, "block_size": 4}
    engine = peers.engine(overlap=overlap, **options)
    first = check_looks(peers, engine, LOOKS)
    assert sum(len(regions) for one in first for regions in one.regions) > 2
    if "few blocks" in situation:
        assert engine.stats().preemptions > 0
    # Again, on whatever the caches hold now: the same views, found by the same looks.
    again = check_looks(peers, engine, LOOKS[::-1], n=2)
    assert [boxes(one) for one in again[::-1]] == [boxes(one) for one in first]


@pytest.mark.parametrize("mode", ["stock", "registered"])
@pytest.mark.parametrize("situation", ["roomy", "small chunks", "few rows"])
def test_graph_steps_choose_and_answer_alike(
    bench: Callable[[str], Bench], mode: str, situation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a view computed in a captured step leaves nothing for a head to look at, and when a question
    that looks without a head takes the ordinary way."""
    peers = bench(mode)
    plain = check_looks(peers, peers.engine(**SITUATIONS[situation]), LOOKS)
    engine = peers.engine(overlap=True, graphs="on", **SITUATIONS[situation])
    looking = relevance_steps(engine, monkeypatch)
    for _ in range(2):
        captured = check_looks(peers, engine, LOOKS)
        assert [boxes(one) for one in captured] == [boxes(one) for one in plain]
    assert engine.graph_replays > 0
    assert (any(looking), not all(looking)) == (mode == "stock", mode != "stock")


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("mode", ["stock", "registered"])
def test_early_exit_steps_choose_and_answer_alike(
    bench: Callable[[str], Bench], mode: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that ends before the last layers sees the same, and leaves nothing to go on from: red when what
    it computed counts as computed, or is found by the questions asked after it."""
    peers = bench(mode)
    plain = [check_looks(peers, peers.engine(), [one])[0] for one in LOOKS]
    monkeypatch.setattr(build, "early_exit_tokens", lambda network, chip: 64)
    engine = peers.engine(overlap=graphs == "on", graphs=graphs, block_size=4)
    brief = brief_steps(engine, monkeypatch)
    for turn in range(3):  # on an empty cache, on what that left, and on what brief looks left
        one_by_one = [check_looks(peers, engine, [one], n=1 + turn % 2)[0] for one in LOOKS]
        assert [boxes(one) for one in one_by_one] == [boxes(one) for one in plain]
    assert len(brief) >= 2 * len(LOOKS)
    assert all(brief) == any(brief) == (graphs == "on" and mode == "stock"), "captured, but for a head"
    together = check_looks(peers, engine, LOOKS)  # some look while others answer: those steps are whole
    assert [boxes(one) for one in together] == [boxes(one) for one in plain]


def test_an_image_is_uploaded_during_an_early_exit_step(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when its pixels are sent for every question, or, where there is no copy any more, only once the
    views are chosen, with the device waiting."""
    peers = bench("stock")
    monkeypatch.setattr(build, "early_exit_tokens", lambda network, chip: 64)
    engine = peers.engine(overlap=True)
    sent: list[int] = []

    def send(pixels: Pixels) -> torch.Tensor:
        sent.append(engine.stats().looks)
        return torch.from_numpy(pixels.copy())

    vision = engine._executor.runner._vision
    assert vision is not None
    vision.encoder._uploads = uploads = PixelUploads(send)
    brief = brief_steps(engine, monkeypatch)
    check_looks(peers, engine, LOOKS[:1])
    for turn, text in enumerate(("Where is the small white cat now?", "And the tower, how tall is it?")):
        before = engine.stats().encodes
        check_looks(peers, engine, [replace(LOOKS[1], text=TURN.format(text))])
        assert engine.stats().encodes > before, "all views were found: nothing was to be sent"
        assert sent == [[0], [0, 2]][turn], (
            "for the first question; again before the look of the last was over"
        )
        assert len(brief) == turn + 1
        uploads.check()
        uploads._copies.clear()  # as if other pictures had come


def test_sampling_parameters_hold_after_an_early_exit_step(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that only looks is told to the sampler behind the step: red when it goes on with what its row's
    last holder asked for."""
    peers = bench("stock")
    answers = []
    for tokens in (0, 64):
        monkeypatch.setattr(build, "early_exit_tokens", lambda network, chip, tokens=tokens: tokens)
        engine = peers.engine(overlap=True, max_num_seqs=1)
        brief = brief_steps(engine, monkeypatch)
        check_looks(peers, engine, LOOKS[:1])
        for params in ({"temperature": 2.0, "seed": 11}, {}):
            request = peers.request(LOOKS[1], **params)
            answers.append(looked(engine, [request])[request.id][0])
        assert len(brief) == (2 if tokens else 0)
    wild, calm = answers[:2]
    assert answers[2:] == [wild, calm]
    assert wild != calm


@pytest.mark.parametrize("situation", ["few blocks, small chunks", "few rows"])
def test_early_exit_steps_are_preempted_and_chunked_like_others(
    bench: Callable[[str], Bench], situation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = bench("stock")
    monkeypatch.setattr(build, "early_exit_tokens", lambda network, chip: 64)
    options: dict[str, Any] = dict(SITUATIONS[situation])
    if "few blocks" in situation:
        most = max(peers.request(one).max_length + one.max_tokens for one in LOOKS)
        options |= {"num_blocks": -(-most // 4) + 3, "block_size": 4}
    engine = peers.engine(overlap=True, **options)
    brief = brief_steps(engine, monkeypatch)
    for _ in range(2):
        check_looks(peers, engine, LOOKS, n=2)
    assert brief
    if "few blocks" in situation:
        assert engine.stats().preemptions > 0


def test_relevance_is_computed_after_graph_steps_of_other_prompts(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relevance is computed from what the step keeps."""
    peers = bench("stock")
    asked = [replace(LOOKS[1], text=TURN.format(text)) for text in ("where is the cat?", "and the tower?")]
    monkeypatch.setattr(build, "early_exit_tokens", lambda network, chip: 0)
    plain = [check_looks(peers, peers.engine(), [one])[0] for one in asked]
    engine = peers.engine(overlap=True, graphs="on")
    looking = relevance_steps(engine, monkeypatch)
    for _ in range(3):
        found = [check_looks(peers, engine, [one])[0] for one in asked]
        assert [boxes(one) for one in found] == [boxes(one) for one in plain]
    assert looking
    assert all(looking)


def test_many_questions_share_one_graph_step(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts than the smaller captured steps hold: each gets its own look and its own answer."""
    peers = bench("stock")
    questions = [
        Question(TURN.format(f"{word}?"), [LARGE[0]], None, 56, 3, gate=False) for word in "abcdefghij"
    ]
    engine = peers.engine(graphs="on", overlap=True)
    check_looks(peers, engine, questions[:1])
    runner, execute = engine._executor.runner, engine._executor.runner.execute
    looking: list[tuple[int, bool]] = []

    def noted(plan: StepPlan) -> LaunchedStep:
        launched = execute(plan)
        looking.append((sum(bool(row.relevance_targets) for row in plan.scheduled), launched.is_graph))
        return launched

    monkeypatch.setattr(runner, "execute", noted)
    check_looks(peers, engine, questions)
    assert max(looking) == (len(questions), True)


def brief_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the steps that end before the last layers are captured, as they are launched."""
    return noted_steps(engine, monkeypatch, lambda plan: plan.early_exit)


def relevance_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The same of the steps that compute relevance."""
    return noted_steps(engine, monkeypatch, lambda plan: any(row.relevance_targets for row in plan.scheduled))


def noted_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, counts: Callable[[StepPlan], bool]
) -> list[bool]:
    found: list[bool] = []
    runner, execute = engine._executor.runner, engine._executor.runner.execute

    def noted(plan: StepPlan) -> LaunchedStep:
        launched = execute(plan)
        found.extend([launched.is_graph] * counts(plan))
        return launched

    monkeypatch.setattr(runner, "execute", noted)
    return found


def boxes(chosen: ZoomResult) -> list[list[tuple[Any, ...]]]:
    """Without the scores, whose last bits depend on how the prompt was cut."""
    return [[(region.box, region.grid) for region in regions] for regions in chosen.regions]


@pytest.mark.parametrize("mode", ["stock", "registered"])
def test_ten_questions_encode_an_image_once(bench: Callable[[str], Bench], mode: str) -> None:
    """The global view is encoded and computed once; equal zooms are encoded once; every answer is right."""
    peers = bench(mode)
    engine = peers.engine(block_size=4)
    words = ("house", "boat", "sign", "cat", "tower", "clock", "window", "harbour", "lighthouse", "eye")
    questions = [
        Question(TURN.format(f"What colour is the {word}?"), [LARGE[0]], None, 56, 4, gate=False)
        for word in words
    ]
    zooms: set[tuple[Any, ...]] = set()
    first = peers.request(questions[0])
    picture_end = lay_out_prompt(first).spans[0].stop
    for number, question in enumerate(questions):
        before = engine.stats()
        (told,) = check_looks(peers, engine, [question])
        after = engine.stats()
        new = {one for regions in boxes(told) for one in regions} - zooms
        zooms |= new
        assert after.encodes - before.encodes == len(new) + (number == 0)
        if number:
            assert after.prefix_hit_tokens - before.prefix_hit_tokens >= picture_end
    stats = engine.stats()
    assert stats.zooms > len(zooms), "regions overlap: some zooms must have been found again"
    assert stats.looks == len(questions)
