"""`saccade plan`: what it says fits, what it says of waits, and that it says so from the real scheduler."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from saccade.cli import plan as entry
from saccade.engine.cost_prior import read_model_size
from saccade.errors import ConfigError
from saccade.tools.planner.command import PlanOptions, make_report, run
from saccade.tools.planner.report import PlanReport

# A 90B model: 80 layers, 8 KV heads of 128, bf16; 50 GB are left for the KV cache.
BIG: dict[str, Any] = {
    "layers": 80,
    "kv_heads": 8,
    "head_dim": 128,
    "weight_bytes": 180 * 10**9,
    "kv_cache_bytes": 50 * 10**9,
    "max_num_seqs": 1024,
}
EIGHT: dict[str, Any] = {
    "layers": 36,
    "kv_heads": 8,
    "head_dim": 128,
    "heads": 32,
    "hidden": 4096,
    "weight_bytes": 15_136_000_000,
}


def big(*traffic: str, **options: Any) -> PlanReport:
    return make_report(PlanOptions(**{**BIG, "seconds": 0, "traffic": traffic, **options}))


def test_the_worked_example_of_a_90b_model() -> None:
    report = big(
        "text:prompt=400,output=100",
        "image:prompt=400,view_tokens=576,output=100",
        "video:prompt=99,view_tokens=404,images=20,output=1",
    )
    text, image, video = report.fits
    assert report.network.kv_bytes == 327_680
    assert (text.tokens, image.tokens) == (500, 1_076)
    assert round(text.bytes / 1e6) == 164
    assert round(text.concurrent) == 305
    assert int(image.bytes / 1e6) == 352
    assert round(image.concurrent) == 142
    assert video.tokens == 8_180
    assert round(video.bytes / 1e9, 2) == 2.68
    assert round(video.bytes / text.bytes) == 16  # what a video costs against a text


def test_whole_blocks_hold_a_little_less_and_rows_or_context_may_bind_first() -> None:
    (fit,) = big("text:prompt=400,output=100").fits
    assert fit.whole == 298  # 32 blocks of 16 tokens each, of 9,536
    assert fit.binds == "memory"
    (fit,) = big("text:prompt=400,output=100", max_num_seqs=64).fits
    assert (fit.whole, fit.binds) == (64, "rows")
    (fit,) = big("text:prompt=400,output=100", max_model_len=300).fits
    assert (fit.whole, fit.binds) == (0, "context")


def test_eight_bits_fit_almost_twice_as_many_and_a_pool_for_views_binds_alone() -> None:
    kinds = ("text:prompt=400,output=100", "image:prompt=400,view_tokens=576,output=100")
    plain = big(*kinds)
    small = big(*kinds, kv_cache_dtype="fp8")
    assert small.network.kv_bytes == 2 * 80 * 8 * (128 + 4)
    assert small.fits[0].bytes == small.fits[0].tokens * small.network.kv_bytes
    assert small.fits[0].whole / plain.fits[0].whole == pytest.approx(256 / 132, rel=0.01)

    views = big(*kinds, kv_vision_dtype="int8", kv_vision_share=0.25)
    text, image = views.fits
    assert text.bytes == plain.fits[0].bytes
    assert text.concurrent == pytest.approx(0.75 * plain.fits[0].concurrent, rel=0.01)
    # 36 blocks of 16 are the image's: an image stands in front, so all its blocks are whole ones.
    saved = 576 * (plain.network.kv_bytes - plain.network.quantized_kv_bytes)
    assert image.bytes == plain.fits[1].bytes - saved
    assert image.whole == min(views.shares.text // 32, views.shares.vision // 36)
    assert views.shares.compact == views.shares.vision


def test_traffic_over_two_pools_is_played_and_all_of_it_answered() -> None:
    options: dict[str, Any] = {"kv_vision_dtype": "fp8", "kv_cache_bytes": 10**9, "kv_vision_share": 0.5}
    report = make_report(PlanOptions(**EIGHT, **options, seconds=5))
    assert report.result is not None
    assert report.result.stats.vision_blocks_cached > 0
    assert report.result.stats.blocks_used == 0
    assert all(waits.refused == 0 for waits in report.result.kinds.values())
    assert report.as_json()["kv_vision_blocks"] == report.shares.vision
    with pytest.raises(ConfigError, match="kv_vision_share"):
        PlanOptions(**EIGHT, kv_vision_share=2.0)


def test_the_pool_is_what_weights_features_and_workspace_leave() -> None:
    report = make_report(PlanOptions(**EIGHT, memory=40 * 10**9, seconds=0))
    tower = report.network.vision_parameters * 2
    left = int(40e9 * 0.9) - 15_136_000_000 - tower - (2 << 30) - (2 << 30)
    assert report.pool_bytes == left
    with pytest.raises(ConfigError, match=r"16\.0 GB of weights.* leave nothing"):
        make_report(PlanOptions(**EIGHT, memory=16 * 10**9, seconds=0))


def test_light_traffic_waits_for_nothing_and_takes_what_its_steps_cost() -> None:
    report = make_report(PlanOptions(**EIGHT, traffic=("text:rate=2,prompt=130,output=64",), seconds=20))
    assert report.result is not None
    waits = report.as_json()["kinds"]["text"]["waits_ms"]
    assert 3.2 < waits["between_p50"] < 4.0  # reading the weights
    assert waits["first_p50"] < 12
    assert report.result.binds == "nothing"
    assert report.result.stats.preemptions == 0


def test_the_itl_target_holds_while_images_arrive() -> None:
    traffic = ("text:rate=16,prompt=130,output=64", "image:rate=6,prompt=64,image=1024x1024,output=64")

    def between(target: float) -> float:
        plan = make_report(PlanOptions(**EIGHT, traffic=traffic, seconds=15, itl_target=target))
        return float(plan.as_json()["kinds"]["text"]["waits_ms"]["between_p99"])

    assert between(20.0) <= 21.0
    assert between(0) > 30.0


def test_it_names_what_binds() -> None:
    few_rows = make_report(
        PlanOptions(**EIGHT, traffic=("text:rate=60,prompt=64,output=64",), seconds=5, max_num_seqs=4)
    )
    assert few_rows.result is not None
    assert few_rows.result.binds == "rows"
    small_pool = make_report(
        PlanOptions(**EIGHT, traffic=("text:rate=60,prompt=512,output=64",), seconds=5, kv_cache_bytes=10**9)
    )
    assert small_pool.result is not None
    assert small_pool.result.binds == "memory"


def test_measured_costs_replace_the_peak_rates(tmp_path: Path) -> None:
    first = make_report(PlanOptions(**EIGHT, seconds=0)).as_json()
    slower = {name: 2 * value for name, value in first["costs_ms"].items() if name != "ridge"}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs_ms": {**slower, "ridge": first["costs_ms"]["ridge"]}}))
    traffic = ("text:rate=2,prompt=130,output=64",)
    plans = [
        make_report(PlanOptions(**EIGHT, traffic=traffic, seconds=10, costs=costs, itl_target=0)).as_json()
        for costs in ("cuda", str(file))
    ]
    fast, slow = (plan["kinds"]["text"]["waits_ms"]["between_p50"] for plan in plans)
    assert slow == pytest.approx(2 * fast, rel=0.05)
    file.write_text(json.dumps({"fixed": 1.0}))
    with pytest.raises(ConfigError, match="exactly the costs"):
        make_report(PlanOptions(**EIGHT, costs=str(file)))


def test_a_config_json_says_what_its_model_needs(tmp_path: Path) -> None:
    text = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "vision_config": vision}))
    report = make_report(PlanOptions(model=str(tmp_path), seconds=0))
    assert report.network.kv_bytes == 147_456
    assert report.network.parameters == pytest.approx(7.57e9, rel=0.01)
    assert report.network.vision_parameters == pytest.approx(0.42e9, rel=0.05)
    assert report.fits[1].visual_tokens == 1024  # 1024 x 1024
    quantized = make_report(PlanOptions(model=str(tmp_path), seconds=0, weight_bytes=8 * 10**9))
    assert quantized.pool_bytes - report.pool_bytes == report.network.weight_bytes - 8 * 10**9


def test_both_outputs_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {**EIGHT, "seconds": 2}
    assert run(PlanOptions(**options, json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kinds"]["image"]["waits_ms"]["requests"] > 0
    assert printed["played"]["steps"] > 0
    assert run(PlanOptions(**options)) == 0
    shown = capsys.readouterr().out
    assert "Expected latencies" in shown
    assert "KV per token" in shown


def test_the_same_seed_gives_the_same_plan() -> None:
    plans = [make_report(PlanOptions(**EIGHT, seconds=5, seed=3)).as_json() for _ in range(2)]
    assert plans[0] == plans[1]


def test_every_option_has_a_help_text() -> None:
    assert all(field.metadata["help"] for field in fields(PlanOptions))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--layers is missing"),
        ({**BIG, "block_size": 0}, "block_size is 0"),
        ({**BIG, "gpu_memory_utilization": 1.5}, "1.5"),
        ({**BIG, "itl_target": -1.0}, "itl_target"),
        ({"model": ".", "layers": 3}, "MODEL already gives --layers"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**options)


def test_the_command_line_reaches_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[PlanOptions] = []
    monkeypatch.setattr(entry, "run", taken.append)  # its None is an exit code of 0
    command = entry.command
    words = ["--layers", "80", "--kv-heads", "8", "--weight-bytes", "2GiB", "--no-prefix-caching", "--json"]
    words += ["--traffic", "a:rate=1", "--traffic", "b:rate=2", "--itl-target", "0", "--costs", "cpu"]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert taken[0] == PlanOptions(
        layers=80,
        kv_heads=8,
        weight_bytes=2 << 30,
        prefix_caching=False,
        json=True,
        traffic=("a:rate=1", "b:rate=2"),
        itl_target=0,
        costs="cpu",
    )
    shown = CliRunner().invoke(command, ["--help"]).output
    for name in (field.name for field in fields(PlanOptions)):
        assert name == "model" or "--" + name.replace("_", "-") in shown


QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def test_sizes_of_qwen2_5_vl_and_qwen2_vl_are_read() -> None:
    size = read_model_size(QWEN2_5_VL_7B, 2)
    assert size.kv_bytes == 28 * 2 * 4 * 128 * 2
    assert 7.0e9 < size.parameters < 7.2e9  # 7.6e9 with the embedding
    assert 0.62e9 < size.vision_parameters < 0.68e9
    assert (size.vision_hidden, size.vision_windowed) == (1280, 28)
    tower = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584, "num_heads": 16}
    older = read_model_size({**QWEN2_5_VL_7B, "vision_config": tower}, 2)
    assert (older.vision_hidden, older.vision_windowed) == (1280, 0)
    assert 0.62e9 < older.vision_parameters < 0.68e9


def test_experts_that_a_token_does_not_take_count_as_memory_alone() -> None:
    text = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    size = read_model_size({"text_config": text}, 2)  # 30B-A3B
    assert 2.9e9 < size.parameters < 3.2e9
    assert 30.0e9 < size.parameters + size.idle_parameters < 30.6e9
    assert size.weight_bytes == 2 * (size.parameters + size.idle_parameters)
    dense = read_model_size({"text_config": {**text, "mlp_only_layers": list(range(48))}}, 2)
    assert dense.idle_parameters == 0
