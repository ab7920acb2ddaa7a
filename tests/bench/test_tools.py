"""The tools in bench/: what they count is what there was."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from bench import agree, growth, scaling, stages
from bench.agree import Answer
from bench.growth import MemorySample
from bench.lod_asking import Level, LodBench
from bench.questions import Questions, Scope
from bench.soak import verdict
from bench.soak.clients import ClientOutcome
from bench.soak.traffic import Traffic
from bench.soak.watch import Held, Sample
from saccade.config import EngineConfig
from saccade.llm import LLM
from saccade.request import RequestTiming

MIB = 1 << 20


@pytest.fixture(scope="module")
def llm(vl_folder: Path) -> LLM:
    return LLM(str(vl_folder), device="cpu", progress=False, num_blocks=256, max_num_seqs=8)


# Agreement


def test_the_first_difference_is_measured_in_the_reference() -> None:
    near: tuple[dict[int, float], ...] = ({1: -0.1}, {2: -0.5, 3: -0.5625, 4: -9.0}, {})
    reference = [Answer((1, 2, 5), near)] * 4
    answers = [Answer((1, 2, 5), ()), Answer((1, 3, 9), ()), Answer((1, 4, 5), ()), Answer((1, 7, 5), ())]
    found, apart = agree.compare(answers, reference, ulp=1 / 16)
    assert [(one.question, one.place, one.ulps) for one in found] == [
        (1, 1, 1.0),
        (2, 1, 136.0),
        (3, 1, None),
    ]
    assert [agree.kind_of(one) for one in found] == ["tie", "other", "other"]
    assert apart == []


def test_an_ulp_is_that_of_the_dtype_at_the_logit() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        value = torch.tensor(20.0, dtype=dtype)
        following = torch.nextafter(value, torch.tensor(math.inf, dtype=dtype))
        assert agree.unit(20.0, dtype) == float(following - value)


def test_both_paths_agree_on_the_tiny_model(vl_folder: Path) -> None:
    config = EngineConfig(model=str(vl_folder), device="cpu", num_blocks=256, max_num_seqs=4)
    fast, reference = agree.configs(config)
    assert (reference.kernels, reference.graphs, reference.overlap, reference.prefix_caching) == (
        "torch",
        "off",
        False,
        False,
    )
    asked = (0, 6, Scope(sides=(64, 160), text=(2, 20)), 4)
    quick, _ = agree.answers(fast, *asked, together=6, logprobs=True)
    slow, ulp = agree.answers(reference, *asked, together=1, logprobs=True)
    found, apart = agree.compare(quick, slow, ulp)
    assert not found
    assert len(apart) == 24


# Questions about one image


def test_questions_are_timed_and_counted_as_the_engine_saw_them(llm: LLM) -> None:
    """Fails if a question's clock starts late or its zoomed views are not counted."""
    bench = LodBench(llm, answer_tokens=3, seed=0)
    size, full = (512, 512), bench.full_tokens((512, 512))
    image, level = bench.image(size), Level(0.9)  # of 64 tokens
    before = llm.engine.stats()
    asked = [*bench.questions(1, image, level, full), *bench.questions(3, image, level, full)]
    after = llm.engine.stats()
    assert after.looks - before.looks == len(asked) == 4
    assert after.zooms > before.zooms
    assert sum(one.visual_tokens for one in asked) == after.visual_tokens - before.visual_tokens
    for one in asked:
        stages = one.stages.seconds()
        assert stages["look"] > 0
        assert 0 < one.first < one.whole
        assert sum(stages.values()) == pytest.approx(one.whole / 1e3, abs=2e-3)


# Growth


def test_growth_is_what_came_after_the_warm_up() -> None:
    samples_taken = [
        MemorySample(number * 50, (100 + min(number, 4) * 10) * MIB, 7, 9) for number in range(1, 21)
    ]
    assert growth.grown(samples_taken) == {"host": 0, "allocated": 0, "reserved": 0}
    leaking = [MemorySample(number * 50, 100 * MIB + number * MIB, 7, 9) for number in range(1, 21)]
    assert growth.grown(leaking)["host"] == 14 * MIB


def test_questions_fit_the_engine_and_are_the_same_for_a_seed(llm: LLM) -> None:
    scope = Scope(sides=(64, 128), grain=32, images=0.5, text=(2, 20))
    first, second = (Questions(llm, 3, scope).take(12) for _ in range(2))
    assert [one["prompt_token_ids"] for one in first] == [one["prompt_token_ids"] for one in second]
    sizes = [one["images"][0].size for one in first if "images" in one]
    assert sizes
    assert all(side % 32 == 0 for size in sizes for side in size)
    samples_taken = growth.measure(llm, 6, 0, scope)
    assert samples_taken[-1].requests == 6
    assert growth.faults(samples_taken, llm, 1 << 30) == []


# Scaling


def test_points_are_measured_or_left_out_with_a_reason(llm: LLM) -> None:
    bench = scaling.ScalingBench(llm, steps=3, repeat=1)
    point = bench.step(3, 20)
    assert point.milliseconds > 0
    assert llm.engine.idle
    assert "rows are more" in str(bench.why_not(9, 20))
    assert "blocks are more" in str(bench.why_not(8, 600))
    assert "a sequence may have" in str(bench.why_not(1, 1 << 20))
    assert scaling.measure(bench, "images", [64])[0].floor > 0


def test_stored_points_are_drawn_again(tmp_path: Path) -> None:
    stored = tmp_path / "scaling.json"
    stored.write_text(json.dumps({"where": "a chip", "parts": {"batch": [[1, 4.2, 3.2], [8, 4.6, 3.4]]}}))
    scaling.draw(tmp_path)
    root = ElementTree.fromstring((tmp_path / "batch.svg").read_text())
    assert {"step", "floor", "a chip"} <= {one.text for one in root.iter("{http://www.w3.org/2000/svg}text")}


# Soak


def samples(engine: list[int]) -> list[Sample]:
    front = Held(0, 50 * MIB, 9, 3, 1)
    return [Sample(float(at), front, Held(0, size * MIB, 9, 3, 0)) for at, size in enumerate(engine)]


def test_memory_is_flat_or_a_fault() -> None:
    breathing = [100, 300, 500] * 13
    assert verdict.memory_faults(samples(breathing)) == []
    leaking = [size + place for place, size in enumerate(breathing)]
    (fault,) = verdict.memory_faults(samples(leaking))
    assert fault == "the low level of the engine process rose by 18.0 MiB"
    creeping = [100 if place % 10 == 0 else 300 + 3 * place for place in range(40)]
    (fault,) = verdict.memory_faults(samples(creeping))
    assert "the middle level of the engine" in fault


def test_what_is_held_by_an_idle_server_is_a_fault() -> None:
    idle = {
        'saccade_requests{state="running"}': 0.0,
        'saccade_queue_choices{class="encode"}': 0.0,
        "saccade_http_requests_in_flight": 0.0,
        'saccade_kv_blocks{state="used"}': 0.0,
        'saccade_kv_blocks{state="free"}': 10.0,
        'saccade_feature_cache_bytes{tier="gpu"}': 5.0,
    }
    assert verdict.idle_faults(idle, 10, {"gpu": 5}) == []
    assert len(verdict.idle_faults(idle, 11, {"gpu": 4})) == 2
    assert len(verdict.idle_faults({**idle, 'saccade_kv_blocks{state="used"}': 1.0}, 11, {"gpu": 5})) == 1


def test_a_fault_of_a_request_is_reported_with_its_reason() -> None:
    outcomes = [
        ClientOutcome("text", "read", "answered", 200),
        ClientOutcome("text", "read", "fault", 500, "why"),
    ] * 2
    assert verdict.request_faults(outcomes) == ["2 x text, read: why"]
    assert "   2" in verdict.table(outcomes, samples([1] * 20))


def test_traffic_is_the_same_for_a_seed_and_has_every_kind() -> None:
    first, second = ([traffic.next() for _ in range(60)] for traffic in (Traffic(1), Traffic(1)))
    assert first == second
    assert {"text", "image", "known"} <= {shot.kind for shot in first}
    assert any(shot.wrong for shot in first)


# Stages


def test_stages_are_read_from_the_header_as_the_server_writes_it() -> None:
    told = RequestTiming(1.0, read=1.5, tokenise=0.25, sent=2.0).header(3.0).decode()
    assert stages.stages(told) == {"receive": 500.0, "prepare": 250.0, "tokenise": 250.0, "total": 2000.0}
