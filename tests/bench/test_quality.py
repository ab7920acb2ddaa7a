"""The ablation of level of detail, and the pages of docs/quality."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import draw_quality
from bench.draw_quality import (
    curve_markdown,
    curve_plot,
    lod_markdown,
    lod_plot,
    losses,
    stored_curve,
    stored_lod,
    verdict,
)
from bench.lod_ablation import ABLATIONS, AblationTrials, ChannelAblation, ablate, evidence_tokens, roc_area
from bench.svg import save_svg
from saccade.config import EngineConfig
from saccade.lod.detail import plan_global_view
from saccade.lod.types import LodParams
from saccade.tools.environment import RunInfo
from saccade.tools.evaluation import command, question_set
from saccade.tools.evaluation.lod import LodReport, LodResult, as_json
from saccade.tools.evaluation.lod_methods import BALANCED, FULL, ORACLE, RESIZE
from saccade.tools.options import EvalOptions, LodEvalOptions
from tests import checkpoints
from tests.tools.evaluation.test_lod_methods import PROCESSING, RULE, example

QUALITY = Path(__file__).parents[2] / "docs" / "quality"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = checkpoints.qwen3_vl(tmp_path_factory.mktemp("lod") / "vl")
    path = model / "config.json"
    views = {"trained": True, "global_tokens": [8, 24], "zoom_tokens": [16], "zoom_grids": [[4, 4], [2, 8]]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "saccade": {"views": views}}))
    return EngineConfig(model=str(model), device="cpu", kv_cache_bytes=16 << 20, max_num_seqs=8)


def test_ablations_are_the_whole_without_a_stage(engine: EngineConfig) -> None:
    options = LodEvalOptions(
        tasks=("needle",), limit=1, shares=(0.75,), max_tokens=2, workers=0, progress=False,
        scenes=5,
    )  # fmt: skip
    report, channels = ablate(engine, options)
    document = json.loads(as_json(report, channels=channels))
    assert set(document["questions"][0]["answers"]["75%"]) == set(ABLATIONS)
    assert {one["map"] for one in document["channels"]} == {"propositional", "perspectival", "lost"}
    assert "fresh scenes (seed 5)" in lod_markdown(stored_lod(document), channels, "lod_ablation")


@pytest.mark.parametrize("method", ABLATIONS)
@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
def test_an_ablation_asks_for_no_more_than_its_share(method: str, share: float) -> None:
    asked = example(1344, 1024, (1000.0, 800.0, 1100.0, 830.0))
    trial = AblationTrials(PROCESSING, RULE).trial(asked, method, share)
    budget = int(42 * 32 * share)
    assert trial.method == method
    assert trial.lod is not None
    assert trial.lod.budget == budget
    first = plan_global_view((32, 42), LodParams(budget=budget), RULE).grid
    assert first[0] * first[1] <= budget


def test_the_curve_becomes_a_page_and_a_plot(engine: EngineConfig, tmp_path: Path) -> None:
    target = tmp_path / "curve.json"
    options = EvalOptions(
        tasks=("shape", "position"), limit=1, curve=True, max_tokens=6, workers=0, progress=False,
        json=str(target),
    )  # fmt: skip
    assert command.run(engine, options) == 0
    report = stored_curve(json.loads(target.read_text()))
    page = curve_markdown(report)
    assert "| task | questions | 64 | 128 | 256 | 512 | 1024 | full |" in page
    assert "A sample: 1 questions per task, spread evenly over the set's 200." in page
    save_svg(curve_plot(report), tmp_path / "curve.svg")
    root = ElementTree.fromstring((tmp_path / "curve.svg").read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text and text.startswith(("objects", "overall"))] == [
        "overall  0%",
        "objects  0%",
    ]


def test_the_pages_of_the_repository_follow_from_the_stored_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stem in ("curve", "lod", "lod_ablation"):
        (tmp_path / f"{stem}.json").write_bytes((QUALITY / f"{stem}.json").read_bytes())
    monkeypatch.setattr("sys.argv", ["draw_quality", str(tmp_path)])
    draw_quality.main()
    for page in ("curve.md", "lod.md", "lod_ablation.md"):
        assert (tmp_path / page).read_text() == (QUALITY / page).read_text()
    assert (tmp_path / "lod.svg").read_text().startswith("<?xml")


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
    assert "| needle | 4 | 100 |" in lod_markdown(report, (), "lod")
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
