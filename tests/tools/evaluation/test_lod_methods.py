"""Ways to spend a budget: each stays within it, and the oracle looks where the answer is."""

import json
from dataclasses import replace

import numpy as np
import pytest

from saccade.errors import ConfigError
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.lod.detail import plan_global_views
from saccade.lod.types import LodParams, Region, ViewRule
from saccade.tools.environment import RunInfo
from saccade.tools.evaluation import question_set
from saccade.tools.evaluation.lod_methods import (
    ABLATIONS,
    BALANCED,
    FULL,
    METHODS,
    ORACLE,
    RESIZE,
    ChannelAblation,
    TrialFactory,
    covered,
    evidence_tokens,
    roc_area,
)
from saccade.tools.evaluation.lod_report import (
    LodReport,
    LodResult,
    as_json,
    lod_markdown,
    lod_plot,
    losses,
    verdict,
)
from saccade.tools.evaluation.options import LodEvalOptions

PROCESSING = Qwen2VLImageProcessor(
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=224 * 224,
    max_pixels=1344 * 1344,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)
RULE = ViewRule(global_tokens=(80, 256), zoom_tokens=(16, 64, 196), most_views=2)
TRIALS = TrialFactory(PROCESSING, RULE)


def example(width: int, height: int, box: tuple[float, float, float, float]) -> question_set.Example:
    blank = np.zeros((height, width, 3), np.uint8)
    return question_set.Example("needle", blank, "What?", "that", (), box, "needle", 0)


@pytest.mark.parametrize("method", [*METHODS, *ABLATIONS])
@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
def test_a_trial_asks_for_no_more_than_its_share(method: str, share: float) -> None:
    asked = example(1344, 1024, (1000.0, 800.0, 1100.0, 830.0))
    trial = TRIALS.trial(asked, method, share)
    budget = int(42 * 32 * share)
    if method == RESIZE:
        assert trial.lod is None
        assert trial.image.shape[0] * trial.image.shape[1] <= budget * 1024
        return
    assert trial.lod is not None
    assert trial.lod.budget == budget
    zooms = sum(region.tokens for some in trial.lod.zooms or () for region in some)
    first = plan_global_views([(32, 42)], LodParams(budget=budget), RULE).grids[0]
    assert zooms + first[0] * first[1] <= budget


def test_small_images_and_full_detail_use_no_lod() -> None:
    small = example(224, 224, (0.0, 0.0, 224.0, 224.0))
    assert TRIALS.trial(small, BALANCED, 0.25).lod is None  # 49 tokens are the least there is
    assert TRIALS.trial(example(1344, 1024, (0, 0, 9, 9)), FULL, None).lod is None


def test_the_oracle_holds_the_evidence_in_the_cheapest_window() -> None:
    asked = example(1344, 1024, (1000.0, 800.0, 1100.0, 830.0))
    lod = TRIALS.trial(asked, ORACLE, 0.25).lod
    assert lod is not None
    assert lod.zooms is not None
    assert [region.tokens for region in lod.zooms[0]] == [16]
    assert covered(asked.box, lod.zooms[0]) == 1.0
    everywhere = TRIALS.trial(example(1344, 1024, (0.0, 0.0, 1344.0, 1024.0)), ORACLE, 0.25).lod
    assert everywhere is not None
    assert everywhere.zooms == ((),)


def test_coverage_is_of_the_best_single_view() -> None:
    halves = (Region((0, 0, 50, 100), (4, 4), 0.5), Region((50, 0, 100, 100), (4, 4), 0.5))
    assert covered((0.0, 0.0, 100.0, 100.0), halves) == 0.5
    assert covered((0.0, 0.0, 100.0, 100.0), ()) == 0.0


def test_a_share_of_everything_or_nothing_is_refused() -> None:
    for share in (0.0, 1.0, 2.0):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            LodEvalOptions(shares=(share,))


def result(method: str, right: bool, index: int = 0, gated: str | None = None) -> LodResult:
    return LodResult("needle", index, "?", "!", method, 0.25, 1000, 250, "x", right, (), 0.0, gated)


def test_what_is_lost_is_laid_to_the_stage_that_loses_it() -> None:
    rows = []
    for index, (ours, oracle, gated) in enumerate(
        [(True, True, None), (False, False, None), (False, True, "flat"), (False, True, None)]
    ):
        rows += [
            replace(result(FULL, True, index), share=None),
            result(RESIZE, index == 0, index),
            result(BALANCED, ours, index, gated),
            result(ORACLE, oracle, index),
        ]
    report = LodReport(
        run=RunInfo("m", "d", "saccade eval-lod", None, {"device": "cpu"}, {}, {"resolved_dtype": "float32"}),
        weights="w",
        options=LodEvalOptions(shares=(0.25,)),
        seconds=1.0,
        results=(*rows, *(replace(one, share=None) for one in rows if one.method != FULL)),
    )
    (shown,) = losses(report, 0.25)
    assert shown.startswith("3 of 4")
    assert "1 also with the true region" in shown
    assert "1 by the gate" in shown
    assert "1 by a window that misses" in shown
    assert verdict(report)[0].startswith("balanced at 25% keeps 25.0%")
    assert "needle: +0 points" in verdict(report)[1]
    assert [one.name for one in lod_plot(report).series] == [FULL, *report.methods]
    assert "| needle | 4 | 100 |" in lod_markdown(report, {"svg": "a.svg", "json": "a.json"})
    lost = json.loads(as_json(report))["questions"][2]
    assert lost["answers"]["25%"][BALANCED] == [False, 250, "x"]
    assert lost["answers"]["25%"][ORACLE] == [True, 250]
    assert lost["zooms"]["25%"] == {"views": [], "covered": 0.0, "gated": "flat"}


def test_the_texture_finds_a_word_on_an_empty_page_and_its_channels_are_worth_something() -> None:
    found = ChannelAblation(PROCESSING)
    for index in range(2):
        found.add(question_set.example("word", index))
    areas = {(one.group, one.map): one.area for one in found.scores()}
    assert areas["all", "propositional"] > 0.7
    assert areas["without place", "propositional"] == areas["all", "propositional"]  # no map uses place
    assert areas["without entropy", "propositional"] == 0.5  # a product: without shades nothing is said


def test_the_area_under_the_curve_is_the_chance_of_the_right_order() -> None:
    wanted = np.array([True, True, False, False])
    assert roc_area(np.array([3, 1, 2, 0], np.float32), wanted) == 0.75
    assert roc_area(np.zeros(4, np.float32), wanted) == 0.5
    assert evidence_tokens((0, 0, 20, 10), (40, 40), (4, 4)).sum() == 2
