"""Ways to spend a budget: each stays within it, and the oracle looks where the answer is."""

import numpy as np
import pytest

from saccade.errors import ConfigError
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.lod.detail import plan_global_view
from saccade.lod.types import LodParams, Region, ViewRule
from saccade.tools.evaluation import question_set
from saccade.tools.evaluation.lod_methods import (
    BALANCED,
    FULL,
    METHODS,
    ORACLE,
    RESIZE,
    TrialFactory,
    covered,
)
from saccade.tools.options import LodEvalOptions

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


@pytest.mark.parametrize("method", METHODS)
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
    first = plan_global_view((32, 42), LodParams(budget=budget), RULE).grid
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
