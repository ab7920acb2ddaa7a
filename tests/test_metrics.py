"""/metrics exports every field of the engine's snapshot with the right type, and docs/METRICS.md agrees."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from saccade.metrics import CONTENT_TYPE, EngineStats, ServerMetrics
from tests.exposed import OPEN, exposed

TIERS = ("gpu", "host", "disk")
TABLE = Path(__file__).parent.parent / "docs" / "METRICS.md"
GAUGES: dict[tuple[str, str | None], str] = {
    ("saccade_requests", "waiting"): "waiting",
    ("saccade_requests", "running"): "running",
    ("saccade_kv_blocks", "used"): "blocks_used",
    ("saccade_kv_blocks", "cached"): "blocks_cached",
    ("saccade_kv_blocks", "free"): "blocks_free",
    ("saccade_kv_vision_blocks", "used"): "vision_blocks_used",
    ("saccade_kv_vision_blocks", "cached"): "vision_blocks_cached",
    ("saccade_kv_vision_blocks", "free"): "vision_blocks_free",
    **{("saccade_feature_cache_bytes", tier): f"features.{tier}.bytes" for tier in TIERS},
    **{("saccade_feature_cache_entries", tier): f"features.{tier}.entries" for tier in TIERS},
    ("saccade_queue_choices", "encode"): "waiting_encode",
    ("saccade_queue_choices", "other"): "waiting_other",
    ("saccade_queue_oldest_seconds", None): "oldest_wait",
    ("saccade_kv_blocks", "pinned"): "blocks_pinned",
    ("saccade_kv_blocks_spared", None): "blocks_spared",
    ("saccade_swap_slots", "used"): "swap_slots_used",
    ("saccade_swap_slots", "free"): "swap_slots_free",
    ("saccade_swap_waiting_choices", None): "swap_waiting",
    ("saccade_step_error_ratio", None): "step_error",
    ("saccade_steps_to_prepare", None): "to_prepare",
}
COUNTERS: dict[tuple[str, str | None], str] = {
    ("saccade_tokens_total", "prompt"): "prompt_tokens",
    ("saccade_tokens_total", "cached"): "prefix_hit_tokens",
    ("saccade_tokens_total", "visual"): "visual_tokens",
    ("saccade_tokens_total", "visual_at_full_detail"): "full_visual_tokens",
    ("saccade_tokens_total", "generated"): "generated_tokens",
    ("saccade_looks_total", None): "looks",
    ("saccade_gated_looks_total", None): "gated_looks",
    ("saccade_zooms_total", None): "zooms",
    ("saccade_prefix_cache_queried_tokens_total", None): "prefix_queried_tokens",
    ("saccade_prefix_cache_hit_tokens_total", None): "prefix_hit_tokens",
    ("saccade_prefix_cache_copied_tokens_total", None): "prefix_copied_tokens",
    ("saccade_prefix_cache_queried_visual_tokens_total", None): "prefix_queried_visual_tokens",
    ("saccade_prefix_cache_hit_visual_tokens_total", None): "prefix_hit_visual_tokens",
    **{("saccade_feature_cache_hits_total", tier): f"features.{tier}.hits" for tier in TIERS},
    **{("saccade_feature_cache_evictions_total", tier): f"features.{tier}.evictions" for tier in TIERS},
    ("saccade_feature_cache_misses_total", None): "features.misses",
    ("saccade_feature_cache_moves_total", "down"): "features.downs",
    ("saccade_feature_cache_moves_total", "up"): "features.ups",
    ("saccade_feature_cache_moves_total", "write"): "features.writes",
    ("saccade_feature_cache_moves_total", "read"): "features.reads",
    ("saccade_feature_cache_failed_reads_total", None): "features.failed_reads",
    ("saccade_feature_cache_dropped_writes_total", None): "features.dropped_writes",
    ("saccade_preemptions_total", None): "preemptions",
    ("saccade_pin_refusals_total", None): "pin_refusals",
    ("saccade_swap_out_blocks_total", None): "swap_out_blocks",
    ("saccade_swap_in_blocks_total", None): "swap_in_blocks",
    ("saccade_swap_dropped_total", None): "swap_dropped",
    ("saccade_engine_steps_total", None): "steps",
    ("saccade_vision_encodes_total", None): "encodes",
    ("saccade_vision_encode_slices_total", None): "encode_slices",
    ("saccade_vision_encode_failures_total", None): "encode_failures",
    ("saccade_requests_started_total", None): "started",
    ("saccade_queue_wait_seconds_total", None): "wait_seconds",
    ("saccade_timed_steps_total", None): "timed_steps",
    ("saccade_step_seconds_total", "actual"): "step_seconds",
    ("saccade_step_seconds_total", "predicted"): "step_seconds_predicted",
}


def leaves(kind: type[msgspec.Struct], name: str = "") -> list[str]:
    """The numbers of a snapshot, by where they are in it."""
    found = []
    for field in msgspec.structs.fields(kind):
        inner = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        found += leaves(field.type, f"{name}{field.name}.") if inner else [name + field.name]
    return found


FIELDS = leaves(EngineStats)


def snapshot() -> EngineStats:
    """Every number another one."""
    tree: dict[str, Any] = {}
    for place, name in enumerate(FIELDS):
        *branches, leaf = name.split(".")
        inner = tree
        for branch in branches:
            inner = inner.setdefault(branch, {})
        inner[leaf] = 100 + place
    return msgspec.convert(tree, EngineStats)


STATS = snapshot()


def scrape(metrics: ServerMetrics) -> dict[tuple[str, str | None], tuple[str, float]]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            label = next(iter(sample.labels.values()), None)
            found[sample.name, label] = (family.type, sample.value)
    return found


def test_the_scheme_of_each_stage_and_the_weights_are_exported() -> None:
    metrics = ServerMetrics(EngineStats, 123, {"decoder": "fp8", "vision": "int8", "head": "none"})
    text = metrics.render().decode()
    assert 'saccade_quantization_info{decoder="fp8",head="none",vision="int8"} 1.0' in text
    assert "saccade_weight_bytes 123.0" in text


def test_every_field_of_the_snapshot_is_exported() -> None:
    assert set(GAUGES.values()) | set(COUNTERS.values()) == set(FIELDS)
    found = scrape(ServerMetrics(lambda: STATS))
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
        for key, name in table.items():
            assert found[key] == (kind, attrgetter(name)(STATS)), key


def test_scrape_shows_the_latest_snapshot() -> None:
    snapshots = [EngineStats(steps=1), EngineStats(steps=5)]
    metrics = ServerMetrics(lambda: snapshots[-1])
    assert scrape(metrics)["saccade_engine_steps_total", None][1] == 5
    snapshots.append(EngineStats(steps=9))
    assert scrape(metrics)["saccade_engine_steps_total", None][1] == 9


def test_two_servers_have_separate_registries() -> None:
    one, other = ServerMetrics(EngineStats), ServerMetrics(EngineStats)
    one.first_token.observe(0.2)
    one.finished.labels("stop").inc()
    assert scrape(one)["saccade_time_to_first_token_seconds_count", None][1] == 1
    assert scrape(other)["saccade_time_to_first_token_seconds_count", None][1] == 0
    assert ("saccade_finished_choices_total", "stop") not in scrape(other)


def test_times_are_histograms() -> None:
    metrics = ServerMetrics(EngineStats)
    families = {
        family.name: family.type for family in text_string_to_metric_families(metrics.render().decode())
    }
    for name in ("time_to_first_token", "inter_token", "request"):
        assert families[f"saccade_{name}_seconds"] == "histogram"
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_snapshot_survives_serialisation() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(STATS), type=EngineStats) == STATS
    assert all(attrgetter(name)(EngineStats()) == 0 for name in FIELDS)


def test_documented_metrics_are_the_exported_ones() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*)\| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    documented = {}
    for name, kind, label, text in rows:
        labels, _, values = label.strip().partition(": ")
        documented[name] = (kind, set(re.findall(r"\w+", labels)), set(re.findall(r"\w+", values)), text)
    assert len(documented) == len(rows)
    for name, one in exposed().items():
        values = {value for label in one.values if label not in OPEN for value in one.values[label]}
        text = one.text.replace("|", r"\|")
        expected = (one.kind, set(one.values), values, text)
        assert documented.pop(name, None) == expected, f"docs/METRICS.md, {name}"
    assert not documented, "metrics that do not exist"
