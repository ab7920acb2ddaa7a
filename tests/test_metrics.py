"""/metrics: every number of the engine is there, of the right kind, and belongs to one server."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from saccade.metrics import CONTENT_TYPE, EngineStats, FrontMetrics

GAUGES = {
    ("saccade_requests", "waiting"): "waiting",
    ("saccade_requests", "running"): "running",
    ("saccade_kv_blocks", "used"): "blocks_used",
    ("saccade_kv_blocks", "cached"): "blocks_cached",
    ("saccade_kv_blocks", "free"): "blocks_free",
    ("saccade_feature_cache_bytes", None): "feature_bytes",
    ("saccade_queue_choices", "encode"): "waiting_encode",
    ("saccade_queue_choices", "other"): "waiting_other",
    ("saccade_queue_oldest_seconds", None): "oldest_wait",
    ("saccade_step_error_ratio", None): "step_error",
}
COUNTERS = {
    ("saccade_tokens_total", "prompt"): "prompt_tokens",
    ("saccade_tokens_total", "cached"): "prefix_hit_tokens",
    ("saccade_tokens_total", "visual"): "visual_tokens",
    ("saccade_tokens_total", "generated"): "generated_tokens",
    ("saccade_prefix_cache_queried_tokens_total", None): "prefix_queried_tokens",
    ("saccade_prefix_cache_hit_tokens_total", None): "prefix_hit_tokens",
    ("saccade_prefix_cache_copied_tokens_total", None): "prefix_copied_tokens",
    ("saccade_feature_cache_hits_total", None): "feature_hits",
    ("saccade_feature_cache_misses_total", None): "feature_misses",
    ("saccade_preemptions_total", None): "preemptions",
    ("saccade_engine_steps_total", None): "steps",
    ("saccade_vision_encodes_total", None): "encodes",
    ("saccade_vision_encode_slices_total", None): "encode_slices",
    ("saccade_requests_started_total", None): "started",
    ("saccade_queue_wait_seconds_total", None): "wait_seconds",
    ("saccade_timed_steps_total", None): "timed_steps",
    ("saccade_step_seconds_total", "actual"): "step_seconds",
    ("saccade_step_seconds_total", "predicted"): "step_seconds_predicted",
}
FIELDS = [field.name for field in msgspec.structs.fields(EngineStats)]
STATS = EngineStats(**{name: 100 + place for place, name in enumerate(FIELDS)})


def scrape(metrics: FrontMetrics) -> dict[tuple[str, str | None], tuple[str, float]]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            label = next(iter(sample.labels.values()), None)
            found[sample.name, label] = (family.type, sample.value)
    return found


def test_every_field_of_the_snapshot_is_exported() -> None:
    assert set(GAUGES.values()) | set(COUNTERS.values()) == set(FIELDS)
    found = scrape(FrontMetrics(lambda: STATS))
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
        for key, name in table.items():
            assert found[key] == (kind, getattr(STATS, name)), key


def test_scrape_shows_the_latest_snapshot() -> None:
    snapshots = [EngineStats(steps=1), EngineStats(steps=5)]
    metrics = FrontMetrics(lambda: snapshots[-1])
    assert scrape(metrics)["saccade_engine_steps_total", None][1] == 5
    snapshots.append(EngineStats(steps=9))
    assert scrape(metrics)["saccade_engine_steps_total", None][1] == 9


def test_two_servers_do_not_mix() -> None:
    one, other = FrontMetrics(EngineStats), FrontMetrics(EngineStats)
    one.first_token.observe(0.2)
    one.finished.labels("stop").inc()
    assert scrape(one)["saccade_time_to_first_token_seconds_count", None][1] == 1
    assert scrape(other)["saccade_time_to_first_token_seconds_count", None][1] == 0
    assert ("saccade_finished_choices_total", "stop") not in scrape(other)


def test_times_are_histograms() -> None:
    metrics = FrontMetrics(EngineStats)
    families = {
        family.name: family.type for family in text_string_to_metric_families(metrics.render().decode())
    }
    for name in ("time_to_first_token", "inter_token", "request"):
        assert families[f"saccade_{name}_seconds"] == "histogram"
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_snapshot_survives_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(STATS), type=EngineStats) == STATS
    assert EngineStats() == EngineStats(**dict.fromkeys(FIELDS, 0))
