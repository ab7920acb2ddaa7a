"""Two pools change no token. Eight bits do, but the same ones in every situation the scheduler can create."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.oracle import Oracle
from tests.parity.test_engine import PICTURES, TEXTS, Bench, run
from tests.parity.test_views import LOOKS, boxes, looked
from tests.parity.test_views import Bench as ViewsBench
from tests.parity.test_views import bench as views

__all__ = ["views"]  # a fixture

QUESTIONS = [*PICTURES, *TEXTS]
BLOCK = {"block_size": 4}
PRECISIONS: dict[str, dict[str, Any]] = {
    "all fp8": {"kv_cache_dtype": "fp8"},
    "all int8": {"kv_cache_dtype": "int8", "kv_vision_share": 0.4},
    "vision fp8": {"kv_vision_dtype": "fp8"},
    "vision int8": {"kv_vision_dtype": "int8", "kv_vision_share": 0.3},
}
# Blocks: the largest question has 33 of images and fewer of text; few enough that others give way for it.
SITUATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"max_num_batched_tokens": 7},
    "few blocks": {"num_blocks": 90, "max_num_batched_tokens": 33, "max_model_len": 128},
    "few blocks, overlapped": {"num_blocks": 90, "overlap": True, "max_model_len": 128},
    "few blocks, swapped": {"num_blocks": 90, "swap_bytes": 64 << 20, "max_model_len": 128},
    "captured": {"graphs": "on"},
}


@pytest.fixture(scope="module")
def bench(family_folder: Callable[[str], Path]) -> Bench:
    return Bench(family_folder("qwen3_vl"), Oracle(family_folder("qwen3_vl")))


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request: pytest.FixtureRequest, bench: Bench) -> tuple[str, list[list[int]]]:
    """Its name, and what each question is answered with when it is alone, computed whole and never cached."""
    options = {**BLOCK, **PRECISIONS[request.param], "prefix_caching": False, "max_num_seqs": 1}
    engine = bench.engine(**options)
    return request.param, [bench.answer(engine, bench.request(question)) for question in QUESTIONS]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_tokens_with_8_bit_kv_do_not_depend_on_the_situation(
    bench: Bench, precision: tuple[str, list[list[int]]], situation: str
) -> None:
    name, alone = precision
    engine = bench.engine(**{**BLOCK, **PRECISIONS[name], **SITUATIONS[situation]})
    for _ in range(2):  # the second time most of it is found in the prefix cache
        requests = [bench.request(question, n=1 + place % 2) for place, question in enumerate(QUESTIONS)]
        answers = run(engine, requests)
        for request, wanted in zip(requests, alone, strict=True):
            for index in range(request.sampling.n):
                assert answers[request.id, index] == wanted
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0
    if "few blocks" in situation:
        assert stats.preemptions > 0


def last_logprob(bench: Bench, options: dict[str, Any]) -> float:
    """Of the first token of an answer about three images."""
    engine = bench.engine(**{**BLOCK, **options})
    engine.submit(bench.request(PICTURES[3], logprobs=0))
    while not (deltas := engine.step()):
        pass
    return deltas[0].logprobs[0].sampled


def test_8_bit_kv_is_used_and_changes_little(bench: Bench, precision: tuple[str, list[list[int]]]) -> None:
    name, _ = precision
    exact, rounded = last_logprob(bench, {}), last_logprob(bench, PRECISIONS[name])
    assert 1e-6 < abs(exact - rounded) < 1.0  # random weights: no distribution to rely on


@pytest.mark.parametrize(
    "options",
    [
        {"kv_vision_share": 0.5},
        {"kv_vision_share": 0.4, "num_blocks": 90, "max_num_batched_tokens": 11, "max_model_len": 128},
        {"kv_vision_views": "global", "overlap": True},
    ],
    ids=["roomy", "few blocks", "global views alone"],
)
def test_two_pools_of_one_precision_equal_transformers(bench: Bench, options: dict[str, Any]) -> None:
    engine = bench.engine(**{**BLOCK, **options})
    bench.check(engine, QUESTIONS, n=2)
    bench.check(engine, QUESTIONS)


GLOBAL = {**BLOCK, "kv_vision_dtype": "int8", "kv_vision_views": "global", "kv_vision_share": 0.3}


@pytest.mark.parametrize("mode", ["stock", "registered"])
def test_global_views_in_8_bits_beside_zoomed_views_in_full_precision(
    views: Callable[[str], ViewsBench], mode: str
) -> None:
    """The views chosen, and the answers: alone, in pieces, crowded, and again on what the caches hold."""
    peers = views(mode)
    lonely = peers.engine(**GLOBAL, prefix_caching=False)
    first = [peers.request(question) for question in LOOKS]
    alone = [looked(lonely, [request])[request.id] for request in first]
    assert sum(len(regions) for _, chosen in alone for regions in chosen.regions) > 2
    for options in ({"max_num_batched_tokens": 7}, {"num_blocks": 90, "swap_bytes": 1 << 20}):
        engine = peers.engine(**GLOBAL, **options)
        for _ in range(2):
            requests = [peers.request(question, n=2) for question in LOOKS]
            answers = looked(engine, requests)
            for request, (tokens, chosen) in zip(requests, alone, strict=True):
                assert answers[request.id][0] == [tokens[0]] * 2
                assert boxes(answers[request.id][1]) == boxes(chosen)
        assert engine.stats().vision_blocks_cached > 0
        assert engine.stats().prefix_hit_visual_tokens > 0
