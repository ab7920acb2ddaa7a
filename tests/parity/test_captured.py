"""Captured steps give the tokens of ordinary ones: padding, write-back and device rows in every situation.

On the CPU a captured step is a call on the same static buffers; only the CUDA graph itself is missing.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade import SamplingParams
from saccade.engine.core import Engine
from saccade.worker.buckets import StepShape
from saccade.worker.graph_step import GraphStep
from tests.conftest import FAMILIES, WITH_IMAGES
from tests.parity.oracle import Oracle
from tests.parity.test_engine import LONG, PICTURES, SITUATIONS, TEXTS, Bench, run, situated


@pytest.fixture(autouse=True)
def no_capture_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A capture that failed would take the ordinary way, and every test here would pass for nothing."""
    yield
    assert "cannot be captured" not in caplog.text


@pytest.fixture(scope="module")
def bench(family_folder: Callable[[str], Path]) -> Callable[[str], Bench]:
    made: dict[str, Bench] = {}

    def make(name: str) -> Bench:
        if name not in made:
            made[name] = Bench(family_folder(name), Oracle(family_folder(name)))
        return made[name]

    return make


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_graph_steps_equal_transformers(
    bench: Callable[[str], Bench], family: str, situation: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = bench(family)
    questions = [*TEXTS, *PICTURES]
    engine = situated(peers, situation, questions, overlap=overlap, graphs="on")
    has_visual: list[int] = []
    load = GraphStep.load_features

    def counted(step: GraphStep, prefills: Any, shape: StepShape, features: Any) -> None:
        has_visual.append(shape.prefill_tokens)
        load(step, prefills, shape, features)

    monkeypatch.setattr(GraphStep, "load_features", counted)
    peers.check(engine, questions)
    assert engine.graph_replays > 0
    if "chunks" in situation or "few blocks" in situation:
        assert has_visual
    if "few blocks" in situation:
        assert engine.stats().preemptions > 0
    peers.check(engine, questions[::-1])  # again, in rows that others had


def test_a_graph_step_has_a_counter_for_every_line_and_kv_head(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attention in one launch counts in; an ordinary step has none, as nothing orders two of them."""
    peers = bench("qwen3_vl")
    rows: list[int] = []
    forward = GraphStep.run

    def noted(step: GraphStep, shape: StepShape, *, compile_only: bool = False) -> None:
        counters = step._mode.counters
        assert counters is not None
        assert not counters.any()
        assert counters.numel() >= shape.decodes * step._pages.group.kv_heads
        rows.append(shape.decodes)
        forward(step, shape, compile_only=compile_only)

    monkeypatch.setattr(GraphStep, "run", noted)
    engine = peers.engine(graphs="on")
    peers.check(engine, TEXTS[:3])
    assert max(rows) > 1
    assert engine._executor.runner._model.mode.counters is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_output_of_graph_steps_equals_transformers(bench: Callable[[str], Bench], family: str) -> None:
    peers = bench(family)
    engine = peers.engine(overlap=True, graphs="on")
    peers.check(engine, [LONG, TEXTS[0]])
    assert engine.graph_replays > 290


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_every_choice_of_n_equals_transformers(bench: Callable[[str], Bench], overlap: bool) -> None:
    peers = bench("qwen3_vl")
    questions = [*PICTURES[:2], TEXTS[3]]
    engine = situated(peers, "few blocks", questions, overlap=overlap, graphs="on")
    peers.check(engine, questions, n=3)


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 7, "top_p": 0.7},
]
MORE: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 1.0, "frequency_penalty": 0.7},
    {"min_tokens": 9},
    {"logit_bias": {11: 4.0}},
]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("asked", [SAMPLED, SAMPLED + MORE], ids=["sampled", "more"])
def test_captured_draws_are_those_of_ordinary_steps(
    bench: Callable[[str], Bench], asked: list[dict[str, Any]], overlap: bool
) -> None:
    peers = bench("qwen3")

    def answers(engine: Engine) -> list[list[int]]:
        requests = []
        for number, params in enumerate(asked):
            sampling = SamplingParams(max_tokens=14, **{"temperature": 0.0, "seed": number, **params})
            requests.append(
                peers.front.prepare_prompt(TEXTS[number % 4].text, sampling, f"s{number}", trusted=True)
            )
        got = run(engine, requests)
        return [got[request.id, 0] for request in requests]

    captured = peers.engine(overlap=overlap, graphs="on", max_num_batched_tokens=24)
    expected = answers(peers.engine(overlap=overlap, max_num_batched_tokens=24))
    assert answers(captured) == expected
    assert captured.graph_replays > 10
    assert len({tuple(answer) for answer in expected}) > len(asked) // 2
