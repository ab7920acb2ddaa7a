"""`saccade eval-lod` on a tiny random model: it cannot answer, but what it is asked must be right."""

import json
from pathlib import Path

import pytest

from saccade.config import EngineConfig
from saccade.tools.evaluation import lod
from saccade.tools.evaluation.lod_methods import METHODS
from saccade.tools.options import LodEvalOptions
from tests import checkpoints


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = checkpoints.qwen3_vl(tmp_path_factory.mktemp("lod") / "vl")
    path = model / "config.json"
    views = {"trained": True, "global_tokens": [8, 24], "zoom_tokens": [16], "zoom_grids": [[4, 4], [2, 8]]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "saccade": {"views": views}}))
    return EngineConfig(model=str(model), device="cpu", kv_cache_bytes=16 << 20, max_num_seqs=8)


def test_every_method_is_asked_at_every_level_within_its_budget(engine: EngineConfig, tmp_path: Path) -> None:
    options = LodEvalOptions(
        tasks=("needle",), limit=2, shares=(0.75,), max_tokens=3, workers=0, progress=False,
        json=str(tmp_path / "lod.json"),
    )  # fmt: skip
    assert lod.run(engine, options) == 0
    document = json.loads((tmp_path / "lod.json").read_text())
    assert [one["index"] for one in document["questions"]] == [0, 100]
    for one in document["questions"]:
        assert set(one["answers"]) == {"full detail", "75%", "auto"}
        for level in ("75%", "auto"):
            assert set(one["answers"][level]) == set(METHODS)
        assert one["answers"]["full detail"]["full detail"][1] == one["full"]
        assert all(shown[1] <= one["full"] * 0.75 for shown in one["answers"]["75%"].values())
        resized, balanced = (one["answers"]["auto"][name][1] for name in ("resize", "balanced"))
        assert resized <= balanced
