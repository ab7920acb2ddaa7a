"""Traffic: read from text, drawn by a seed, and played by the thousand without a loss."""

import re

import numpy as np
import pytest

from bench.simulate import SETUPS, faults, simulate
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import ConfigError
from saccade.tools.planner.simulator import SimulationResult
from saccade.tools.planner.traffic import TrafficKind, VisionSizes, arrivals, parse_kind


def test_a_kind_is_read_from_its_description() -> None:
    assert parse_kind(
        "image:rate=6,prompt=64,image=1024x768,output=32,distinct=9,priority=-1"
    ) == TrafficKind(name="image", rate=6.0, prompt=64, image=(1024, 768), output=32, distinct=9, priority=-1)
    assert parse_kind("text:") == TrafficKind(name="text")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text", "not understood"),
        (":rate=1", "not understood"),
        ("a:speed=1", "'speed=1'"),
        ("a:rate=fast", "rate is 'fast'"),
        ("a:image=12", "image is '12'"),
        ("a:rate=0", "rate is 0"),
        ("a:prompt=0", "prompt is 0"),
        ("a:shared=9,prompt=8", "9 tokens are shared"),
        ("a:image=8x8,video=8x8", "image or video"),
        ("a:view_tokens=0", "view_tokens is 0"),
    ],
)
def test_a_wrong_description_is_refused_by_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_kind(text)


def test_images_and_videos_become_the_tokens_their_processors_give_them() -> None:
    vision = VisionSizes()
    assert TrafficKind(name="a", image=(1024, 1024)).visual_tokens(vision) == 1024
    assert TrafficKind(name="a", image=(1920, 1080)).visual_tokens(vision) == 60 * 34
    assert (
        TrafficKind(name="a", image=(64, 64), images=3).visual_tokens(vision) == 3 * 64
    )  # enlarged to 256 x 256
    assert TrafficKind(name="a", video=(640, 360), frames=48).visual_tokens(vision) == 24 * 20 * 11
    assert TrafficKind(name="a", view_tokens=576).visual_tokens(vision) == 576


def test_arrivals_come_in_order_at_their_rates_and_are_the_same_for_a_seed() -> None:
    kinds = [TrafficKind(name="often", rate=30), TrafficKind(name="rare", rate=3, image=(448, 448))]
    drawn = list(arrivals(kinds, VisionSizes(), 1, seconds=100))
    times = [arrival.at for arrival in drawn]
    assert times == sorted(times)
    often = sum(arrival.kind.name == "often" for arrival in drawn)
    assert often == pytest.approx(3000, rel=0.1)
    assert len(drawn) - often == pytest.approx(300, rel=0.2)
    again = list(arrivals(kinds, VisionSizes(), 1, seconds=100))
    assert [arrival.request.prompt for arrival in again] == [arrival.request.prompt for arrival in drawn]


def test_what_is_not_meant_to_be_equal_differs() -> None:
    kinds = [TrafficKind(name="a", prompt=40, shared=10, image=(64, 64), distinct=2)]
    requests = [arrival.request for arrival in arrivals(kinds, VisionSizes(), 0, seconds=None, requests=20)]
    assert len({request.prompt[:10] for request in requests}) == 1
    assert len({request.prompt[11:] for request in requests}) == 20
    assert len({lay_out_prompt(request).spans[0].key for request in requests}) == 2
    assert all(len(request.prompt) == 41 for request in requests)


# The scheduler under it: bench/simulate.py plays the same by the hundred thousand

REQUESTS = {"roomy": 1500, "tight": 1500, "images": 600, "pools": 1500, "kept": 1500}
LONGEST = {"roomy": 2.0, "tight": 6.0, "images": 12.0, "pools": 8.0, "kept": 8.0}  # seconds


@pytest.fixture(scope="module", params=SETUPS)
def scene(request: pytest.FixtureRequest) -> tuple[str, SimulationResult]:
    outcome, _ = simulate(SETUPS[request.param], REQUESTS[request.param], seed=7)
    return request.param, outcome


def test_everyone_is_answered_and_everything_is_given_back(scene: tuple[str, SimulationResult]) -> None:
    name, outcome = scene
    assert faults(outcome, SETUPS[name], REQUESTS[name]) == []


def test_no_wait_is_without_bound(scene: tuple[str, SimulationResult]) -> None:
    """A patience of one second, three for the background's priority, and the time to make room."""
    name, outcome = scene
    assert set(outcome.kinds) == set(SETUPS[name].kinds)
    for kind, waits in outcome.kinds.items():
        assert max(waits.first) < LONGEST[name], kind


def test_streams_keep_to_the_target_but_for_a_view_that_takes_longer(
    scene: tuple[str, SimulationResult],
) -> None:
    between = np.concatenate([np.array(waits.between) for waits in scene[1].kinds.values()]) * 1e3
    assert np.percentile(between, 99) < 21.0


def test_text_does_not_wait_for_the_pool_of_views(scene: tuple[str, SimulationResult]) -> None:
    """Nor behind an image whose features are kept, which stands in the same line."""
    name, outcome = scene
    if name in ("pools", "kept"):
        assert np.percentile(outcome.kinds["text"].first, 95) < 0.06
        assert np.percentile(outcome.kinds["known image"].first, 95) > 0.3


def test_the_small_scenes_meet_what_they_are_there_to_meet(scene: tuple[str, SimulationResult]) -> None:
    name, outcome = scene
    assert (outcome.short_of["memory"] > 100) == (name != "roomy")
    assert (outcome.stats.preemptions > 0) == (name != "roomy")
    assert (outcome.stats.swap_in_blocks > 0) == (name != "roomy")
    assert outcome.stats.prefix_copied_tokens > 0
