"""The plan beside a real run: both answer the same requests with as many tokens."""

from collections.abc import Callable
from pathlib import Path

from bench.plan_check import RequestMaker, plan, rows, run
from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.core import Engine
from saccade.engine.cost_prior import read_model_size
from saccade.tools.planner.traffic import parse_kind

KINDS = [
    parse_kind("text:rate=40,prompt=12,output=4"),
    parse_kind("image:rate=15,prompt=5,image=64x48,output=3"),
]


def test_plan_and_engine_answer_the_same_requests(family_folder: Callable[[str], Path]) -> None:
    folder = str(family_folder("qwen3_vl"))
    engine = Engine(EngineConfig(model=folder, device="cpu", num_blocks=256), progress=False)
    traffic = RequestMaker(folder, engine.info.max_model_len, seed=0).arrivals(KINDS, seed=1, seconds=0.4)
    network = read_model_size(open_checkpoint(folder).config, 4)
    planned, real = plan(engine, network, engine.costs, traffic), run(engine, traffic)
    assert set(planned.kinds) == set(real.kinds) == {"text", "image"}
    for name, waits in real.kinds.items():
        other = planned.kinds[name]
        for part in ("first", "between", "whole"):
            assert len(getattr(waits, part)) == len(getattr(other, part)) > 0
    assert planned.stats.prompt_tokens == real.stats.prompt_tokens
    assert planned.stats.generated_tokens == real.stats.generated_tokens
    assert len(rows(planned, real)) == 2 * 3 * 2 + 2
