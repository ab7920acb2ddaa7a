"""Requests that give way to others and come back from host memory: the answers stay those of transformers."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.config import VisionCache
from saccade.engine.core import Engine
from saccade.errors import ConfigError
from saccade.kv_cache.swap_copies import HostPages
from tests.parity.oracle import Oracle
from tests.parity.test_engine import PICTURES, TEXTS, Bench, Question

PLENTY = 1 << 20  # bytes: every block of these small checkpoints

SITUATIONS: dict[str, dict[str, Any]] = {
    "": {"max_num_batched_tokens": 33},
    "small chunks": {"max_num_batched_tokens": 7},
    "no prefix cache": {"prefix_caching": False},
    "no feature cache": {"vision_cache": VisionCache(gpu=0)},
    "few slots": {"swap_bytes": 1 << 15},
    "captured": {"graphs": "on"},
}


@pytest.fixture(scope="module")
def peers(family_folder: Callable[[str], Path]) -> Bench:
    folder = family_folder("qwen3_vl")
    return Bench(folder, Oracle(folder))


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives way is set aside, whatever this machine measures."""
    monkeypatch.setattr(HostPages, "measure_rate", lambda _: 1e18)


def tight(peers: Bench, questions: Sequence[Question], **options: Any) -> Engine:
    return peers.tight_engine(questions, **{"swap_bytes": PLENTY, **options})


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_swapped_in_text_equals_transformers(peers: Bench, situation: str, overlap: bool) -> None:
    engine = tight(peers, TEXTS, overlap=overlap, **SITUATIONS[situation])
    peers.check(engine, TEXTS)
    stats = engine.stats()
    assert stats.swap_in_blocks > 0 or situation == "few slots"
    assert stats.swap_slots_used == stats.swap_waiting == 0
    before = stats.prefix_hit_tokens
    peers.check(engine, TEXTS[::-1])  # again, beside what the prefix cache has
    assert (engine.stats().prefix_hit_tokens > before) == ("prefix" not in situation)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_swapped_in_images_equal_transformers(peers: Bench, situation: str, overlap: bool) -> None:
    engine = tight(peers, PICTURES, overlap=overlap, **SITUATIONS[situation])
    peers.check(engine, PICTURES)
    peers.check(engine, PICTURES[::-1])
    stats = engine.stats()
    assert stats.swap_out_blocks > 0
    assert stats.swap_in_blocks > 0 or situation == "few slots"
    assert (stats.swap_dropped > 0) == (situation == "few slots")


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("situation", ["", "no prefix cache"])
def test_swapped_in_choices_equal_transformers(peers: Bench, situation: str, overlap: bool) -> None:
    questions = [*PICTURES[:3], TEXTS[3]]
    engine = tight(peers, questions, overlap=overlap, **SITUATIONS[situation])
    peers.check(engine, questions, n=3)
    assert engine.stats().swap_in_blocks > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("seed", range(3))
def test_cancellations_during_swap_change_no_other_tokens(peers: Bench, seed: int, overlap: bool) -> None:
    questions = [*PICTURES, *TEXTS]
    engine = tight(peers, questions, overlap=overlap, max_num_batched_tokens=33)
    requests = [peers.request(question, n=1 + index % 2) for index, question in enumerate(questions)]
    moments = np.random.default_rng(seed).integers(5, 60, len(requests))
    doomed = {request.id: int(step) for request, step in zip(requests[::2], moments, strict=False)}
    answers: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.submit(request)
    for step in itertools.count():
        engine.cancel([name for name, moment in doomed.items() if moment == step])
        for delta in engine.step():
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
        engine.check()
        if engine.idle:
            break
    for question, request in zip(questions, requests, strict=True):
        for index in range(request.sampling.n):
            got, wanted = answers.get((request.id, index), []), peers.expected(question)
            assert got == (wanted[: len(got)] if request.id in doomed else wanted)
    stats = engine.stats()
    assert stats.swap_in_blocks > 0
    assert stats.blocks_used == stats.swap_slots_used == stats.swap_waiting == 0


def test_a_slow_link_is_not_used(peers: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPages, "measure_rate", lambda _: 1.0)
    engine = tight(peers, TEXTS, max_num_batched_tokens=33)
    peers.check(engine, TEXTS)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.swap_out_blocks == 0


def test_a_budget_of_less_than_a_block_is_refused_with_the_numbers(peers: Bench) -> None:
    with pytest.raises(ConfigError, match=r"swap_bytes is 7, less than a KV block of \d+ bytes"):
        peers.engine(swap_bytes=7)
