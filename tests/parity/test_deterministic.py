"""With --deterministic a request's numbers are the same bits whatever is computed beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.core import Engine
from saccade.inputs.processor import InputProcessor
from saccade.kernels.dispatch import KernelMode
from saccade.kernels.gemm.skinny import linear_reference, skinny_triton
from tests.kernels.buffers import PLACES, Place

TEXTS = ["The eye jumps to what matters", "a", "How many boats are there? " * 7, "Read the sign, then say"]
SCARCE = 18  # blocks of 4 tokens: too few for all at once
Numbers = list[list[tuple[int, float]]]


def numbers(folder: Path, texts: Sequence[str], *, most: int = 12, **options: Any) -> Numbers:
    """Token and log-probability of every output token of every text, all asked at once."""
    config = EngineConfig(model=str(folder), device="cpu", **{"num_blocks": 256, **options})
    engine, front = Engine(config, progress=False), InputProcessor(open_checkpoint(str(folder)), 4096)
    sampling = SamplingParams(max_tokens=most, temperature=0, logprobs=0, ignore_eos=True)
    for number, text in enumerate(texts):
        engine.submit(front.prepare_prompt(text, sampling, str(number), trusted=True))
    found: dict[str, list[tuple[int, float]]] = {str(number): [] for number in range(len(texts))}
    while not engine.idle:
        for delta in engine.step():
            for token, logprob in zip(delta.tokens, delta.logprobs, strict=True):
                found[delta.request_id].append((token, logprob.sampled))
    assert bool(engine.stats().preemptions) == (options.get("num_blocks") == SCARCE)
    return list(found.values())


SURROUNDINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "small chunks": {"max_num_batched_tokens": 5},
    "preempted": {"num_blocks": SCARCE, "block_size": 4, "max_num_batched_tokens": 19},
    "captured": {"graphs": "on", "overlap": True},
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_neighbours_chunks_and_preemptions_change_no_bit(
    family_folder: Callable[[str], Path], family: str, surroundings: str
) -> None:
    folder = family_folder(family)
    alone = [numbers(folder, [text], deterministic=True)[0] for text in TEXTS]
    assert numbers(folder, TEXTS, deterministic=True, **SURROUNDINGS[surroundings]) == alone


def test_without_it_numbers_differ_by_rounding_alone(family_folder: Callable[[str], Path]) -> None:
    folder = family_folder("qwen3")
    exact = numbers(folder, TEXTS, deterministic=True)
    for options in SURROUNDINGS.values():
        for mine, theirs in zip(numbers(folder, TEXTS, **options), exact, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in theirs]
            assert max(abs(a - b) for (_, a), (_, b) in zip(mine, theirs, strict=True)) < 1e-4


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 150])
def test_a_line_of_a_product_is_the_same_among_any_others(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(150, 96, generator=generator), torch.randn(40, 96, generator=generator)
    mode = KernelMode(deterministic=True)
    whole = linear_reference(x, weight, mode=mode)
    assert torch.equal(linear_reference(x[150 - rows :], weight, mode=mode), whole[150 - rows :])


@pytest.mark.parametrize("place", PLACES)
def test_the_kernel_s_lines_too(place: Place) -> None:
    x, weight = place.randn(70, 128, seed=1), place.randn(40, 128, seed=2)
    mode = KernelMode("triton", deterministic=True)
    whole = skinny_triton(x, weight, mode=mode)[0]
    for first in (0, 5, 69):
        assert torch.equal(skinny_triton(x[first:], weight, mode=mode)[0], whole[first:])
