"""Looks on a GPU: captured steps, maps and towers choose and answer as ordinary ones do."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine import builder as build
from saccade.engine.core import Engine
from saccade.inputs.processor import InputProcessor
from saccade.lod.detail import DetailRequest
from saccade.lod.types import LodParams
from saccade.request import ZoomResult
from tests import checkpoints
from tests.parity.oracle import picture
from tests.parity.test_views import TURN, looked, relevance_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORDS = ("house", "boat", "sign", "cat", "tower", "clock")


def looks(folder: Path, graphs: Literal["on", "off"]) -> tuple[list[tuple[list[int], ZoomResult]], int]:
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        dtype="bfloat16",
        num_blocks=512,
        max_num_seqs=8,
        kernels="triton",
        graphs=graphs,
        deterministic=True,
    )
    engine, front = Engine(config, progress=False), InputProcessor(open_checkpoint(str(folder)), 4096)
    while engine.warm_up():  # with all that an idle engine captures
        pass
    found = []
    for number, word in enumerate(
        (*WORDS, *WORDS)
    ):  # the second time on what the first left: looks are brief
        request = front.prepare_prompt(
            TURN.format(f"What colour is the {word}{' there' * (number // len(WORDS))}?"),
            SamplingParams(max_tokens=8, temperature=0),
            f"question-{number}",
            images=[picture(250, 256, number % len(WORDS))],
            trusted=True,
            detail_req=DetailRequest(params=LodParams(budget=56, gate=False)),
        )
        (choices, chosen), *_ = looked(engine, [request]).values()
        found.append((choices[0], chosen))
    return found, engine.graph_replays


def test_graph_steps_choose_the_views_of_eager_ones(tmp_path: Path) -> None:
    """In the deterministic mode, where padding changes no bit. The pictures are of one size, so the maps of
    all but the first come from a captured call. Captured towers take another attention than those that are
    not, so features differ by rounding: most windows are the same, and one may move by half a token, which is
    how far windows stand apart."""
    folder = checkpoints.qwen3_vl(tmp_path / "checkpoint")
    ordinary, none = looks(folder, "off")
    captured, some = looks(folder, "on")
    assert none == 0
    assert some > 2 * len(WORDS)
    assert sum(len(regions) for _, chosen in captured for regions in chosen.regions) > 2
    moved: list[int] = []  # pixels
    for (_, one), (_, other) in zip(captured, ordinary, strict=True):
        for here, there in zip(one.regions, other.regions, strict=True):
            assert [region.grid for region in here] == [region.grid for region in there]
            for region, like in zip(here, there, strict=True):
                moved.append(max(abs(a - b) for a, b in zip(region.box, like.box, strict=True)))
    assert max(moved) <= 17
    assert sum(far == 0 for far in moved) >= 0.75 * len(moved)


def test_relevance_of_a_graph_step_is_that_of_an_early_exit_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is asked twice: with its image to be computed, then in an early-exit step. The second
    time the question's hidden states are computed anew: they differ by rounding, and so do the maps."""
    folder = checkpoints.qwen3_vl(tmp_path / "checkpoint")
    monkeypatch.setattr(build, "early_exit_tokens", lambda network, chip: 64)
    config = EngineConfig(model=str(folder), device="cuda", dtype="bfloat16", num_blocks=512, max_num_seqs=8)
    engine, front = Engine(config, progress=False), InputProcessor(open_checkpoint(str(folder)), 4096)
    while engine.warm_up():
        pass
    captured = relevance_steps(engine, monkeypatch)
    for number, word in enumerate(WORDS):
        maps = []
        for turn in range(2):
            request = front.prepare_prompt(
                TURN.format(f"What colour is the {word}, and what else is there to be seen beside it?"),
                SamplingParams(max_tokens=1, temperature=0),
                f"question-{number}-{turn}",
                images=[picture(250, 256, number)],
                trusted=True,
                detail_req=DetailRequest(params=LodParams(budget=56, gate=False), preview_only=True),
            )
            engine.submit(request)
            while not engine.idle:
                told = [delta.zoomed for delta in engine.step() if delta.zoomed]
                maps += [look.participatory for one in told for look in one.looks]
        first, second = maps
        assert first.max() > 0
        assert np.abs(first - second).max() < 0.1 * first.max()
    assert captured == [True, True] * len(WORDS)
