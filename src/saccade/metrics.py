"""The Prometheus metrics of a server: the engine's snapshot and what only the API server can measure.

The engine core sends `EngineStats` with its outputs; totals are exported as they are.
A server has its own registry.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds: from one decode step of a small model to the slowest request a client waits for.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
LOOP_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
END_TO_END_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)

# Stages of a request, in order; `RequestTiming` describes them.
STAGES = (
    *("receive", "prepare", "tokenise", "fetch", "unpack", "send"),
    *("queue", "look", "encode", "prefill", "first_token", "decode", "total"),
)

NOT_QUANTIZED = {"decoder": "none", "vision": "none", "head": "none"}


class TierStats(msgspec.Struct, frozen=True):
    """One tier of the encoder cache."""

    bytes: int = 0
    entries: int = 0
    hits: int = 0
    evictions: int = 0


class FeatureStats(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder cache; totals except for bytes and entries."""

    gpu: TierStats = TierStats()
    host: TierStats = TierStats()
    disk: TierStats = TierStats()  # bytes and entries of the folder, also those of other servers
    misses: int = 0
    downs: int = 0
    ups: int = 0
    writes: int = 0
    reads: int = 0  # failed ones included
    failed_reads: int = 0
    dropped_writes: int = 0

    @property
    def hits(self) -> int:
        return self.gpu.hits + self.host.hits + self.disk.hits


class SchedulerCounters(msgspec.Struct, kw_only=True):
    """Totals counted by the scheduler. `COUNTERS` describes each."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_copied_tokens: int = 0
    prefix_queried_visual_tokens: int = 0
    prefix_hit_visual_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    visual_tokens: int = 0
    full_visual_tokens: int = 0
    looks: int = 0
    gated_looks: int = 0
    zooms: int = 0
    steps: int = 0
    encodes: int = 0
    encode_slices: int = 0
    encode_failures: int = 0
    started: int = 0
    wait_seconds: float = 0.0
    timed_steps: int = 0
    step_seconds: float = 0.0
    step_seconds_predicted: float = 0.0


class EngineStats(SchedulerCounters, kw_only=True):
    """A snapshot of the engine core: values and totals. `GAUGES` and `COUNTERS` describe each."""

    waiting: int = 0
    waiting_encode: int = 0
    waiting_other: int = 0
    oldest_wait: float = 0.0
    running: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    vision_blocks_used: int = 0
    vision_blocks_cached: int = 0
    vision_blocks_free: int = 0
    blocks_pinned: int = 0
    blocks_spared: int = 0
    swap_slots_used: int = 0
    swap_slots_free: int = 0
    swap_waiting: int = 0
    step_error: float = 0.0
    to_prepare: int = 0
    pin_refusals: int = 0
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    swap_dropped: int = 0

    features: FeatureStats = FeatureStats()


# Metric name -> (description, field of EngineStats). A labelled metric has a field per label value instead:
# "label: value=field value=field".
GAUGES = {
    "requests": ("Requests in the engine, by state.", "state: waiting=waiting running=running"),
    "queue_choices": (
        "Sequences in the waiting queue, by whether they have a view to encode.",
        "class: encode=waiting_encode other=waiting_other",
    ),
    "queue_oldest_seconds": ("Waiting time of the oldest waiting request.", "oldest_wait"),
    "kv_blocks": (
        "KV blocks: used by requests, cached for prefix reuse only, free, or pinned and used by no request.",
        "state: used=blocks_used cached=blocks_cached free=blocks_free pinned=blocks_pinned",
    ),
    "kv_vision_blocks": (
        "KV blocks of the separate pool for images; included in saccade_kv_blocks.",
        "state: used=vision_blocks_used cached=vision_blocks_cached free=vision_blocks_free",
    ),
    "kv_blocks_spared": ("KV blocks saved by sharing between requests.", "blocks_spared"),
    "swap_slots": (
        "KV blocks in host memory: used by preempted sequences, or free.",
        "state: used=swap_slots_used free=swap_slots_free",
    ),
    "swap_waiting_choices": ("Preempted sequences waiting to be swapped back in.", "swap_waiting"),
    "feature_cache_bytes": (
        "Bytes in the encoder cache, by tier.",
        "tier: gpu=features.gpu.bytes host=features.host.bytes disk=features.disk.bytes",
    ),
    "feature_cache_entries": (
        "Views in the encoder cache, by tier.",
        "tier: gpu=features.gpu.entries host=features.host.entries disk=features.disk.entries",
    ),
    "step_error_ratio": ("Recent mean of |predicted - actual| / actual step time.", "step_error"),
    "steps_to_prepare": ("Step shapes that warm-up has not compiled or captured yet.", "to_prepare"),
}
COUNTERS = {
    "tokens": (
        "Tokens by kind; prompt includes cached and visual. visual_at_full_detail: visual without LOD.",
        "kind: prompt=prompt_tokens cached=prefix_hit_tokens visual=visual_tokens"
        " visual_at_full_detail=full_visual_tokens generated=generated_tokens",
    ),
    "requests_started": ("Requests that left the waiting queue.", "started"),
    "queue_wait_seconds": ("Total waiting time of started requests.", "wait_seconds"),
    "preemptions": ("Sequences preempted for lack of KV blocks.", "preemptions"),
    "swap_out_blocks": ("KV blocks swapped out to host memory.", "swap_out_blocks"),
    "swap_in_blocks": ("KV blocks swapped back in.", "swap_in_blocks"),
    "swap_dropped": (
        "Preempted sequences recomputed: their swapped blocks were lost.",
        "swap_dropped",
    ),
    "pin_refusals": ("Sequences whose system prompt could not be pinned for lack of room.", "pin_refusals"),
    "engine_steps": ("Steps.", "steps"),
    "step_seconds": (
        "Step time: measured, and as the cost model predicted it.",
        "kind: actual=step_seconds predicted=step_seconds_predicted",
    ),
    "timed_steps": ("Measurements behind saccade_step_seconds; one may span several steps.", "timed_steps"),
    "prefix_cache_queried_tokens": ("Prompt tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    "prefix_cache_hit_tokens": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    "prefix_cache_queried_visual_tokens": (
        "Visual tokens looked up in the prefix cache.",
        "prefix_queried_visual_tokens",
    ),
    "prefix_cache_hit_visual_tokens": (
        "Visual tokens found in the prefix cache.",
        "prefix_hit_visual_tokens",
    ),
    "prefix_cache_copied_tokens": (
        "Tokens found in the prefix cache in a partly shared block, which is copied.",
        "prefix_copied_tokens",
    ),
    "feature_cache_hits": (
        "Views found in the encoder cache, by tier.",
        "tier: gpu=features.gpu.hits host=features.host.hits disk=features.disk.hits",
    ),
    "feature_cache_misses": ("Views not found in the encoder cache, and encoded.", "features.misses"),
    "feature_cache_evictions": (
        "Views evicted from the encoder cache for lack of room or by age, by tier.",
        "tier: gpu=features.gpu.evictions host=features.host.evictions disk=features.disk.evictions",
    ),
    "feature_cache_moves": (
        "Views moved in the encoder cache: down to host memory, up to the device, to and from disk.",
        "move: down=features.downs up=features.ups write=features.writes read=features.reads",
    ),
    "feature_cache_failed_reads": (
        "Encoder cache files that were damaged or missing.",
        "features.failed_reads",
    ),
    "feature_cache_dropped_writes": (
        "Views not written to disk because it was too slow or full.",
        "features.dropped_writes",
    ),
    "looks": ("Images with a relevance pass.", "looks"),
    "gated_looks": ("Relevance passes after which the global view was enough.", "gated_looks"),
    "zooms": ("Zoomed views chosen by LOD.", "zooms"),
    "vision_encodes": ("Views run through the vision encoder.", "encodes"),
    "vision_encode_slices": ("Slices of views whose encoding is spread over steps.", "encode_slices"),
    "vision_encode_failures": ("Views the device failed to encode.", "encode_failures"),
}


class _EngineCollector(Collector):
    """Exports the latest snapshot at scrape time."""

    def __init__(self, latest: Callable[[], EngineStats]) -> None:
        self._latest = latest

    def describe(self) -> Iterable[Metric]:
        return self._families(EngineStats())

    def collect(self) -> Iterable[Metric]:
        return self._families(self._latest())

    def _families(self, stats: EngineStats) -> Iterator[Metric]:
        for table, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (text, source) in table.items():
                label, labelled, fields = source.partition(": ")
                if not labelled:
                    yield kind(f"saccade_{name}", text, attrgetter(source)(stats))
                    continue
                family = kind(f"saccade_{name}", text, labels=[label])
                for pair in fields.split():
                    value, _, field = pair.partition("=")
                    family.add_metric([value], attrgetter(field)(stats))
                yield family


class ServerMetrics:
    """The metrics of one server."""

    def __init__(
        self,
        latest: Callable[[], EngineStats],
        weight_bytes: int = 0,
        quantization: Mapping[str, str] = NOT_QUANTIZED,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(latest))
        Gauge("saccade_weight_bytes", "Bytes of the model's weights.", registry=self.registry).set(
            weight_bytes
        )
        schemes = Gauge(
            "saccade_quantization_info",
            "1; the labels name the scheme of each stage: none, fp8, int8, int4 or expanded, joined by +.",
            sorted(quantization),
            registry=self.registry,
        )
        schemes.labels(**quantization).set(1)
        histogram = partial(Histogram, registry=self.registry)
        self.first_token = histogram(
            "saccade_time_to_first_token_seconds",
            "Time from a request's arrival to the first token of each of its prompts.",
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = histogram(
            "saccade_inter_token_seconds",
            "Time between successive tokens of a sequence.",
            buckets=INTER_TOKEN_BUCKETS,
        )
        self.end_to_end = histogram(
            "saccade_request_seconds", "Time from a request's arrival to its end.", buckets=END_TO_END_BUCKETS
        )
        self.loop_lag = histogram(
            "saccade_front_late_seconds",
            "Lag of the API server's event loop, sampled 20 times a second.",
            buckets=LOOP_LAG_BUCKETS,
        )
        stage = histogram(
            "saccade_stage_seconds", "Time of finished requests, by stage.", ["stage"], buckets=STAGE_BUCKETS
        )
        self.stages = {name: stage.labels(name) for name in STAGES}
        self.in_flight = Gauge(
            "saccade_http_requests_in_flight", "Generation requests in flight.", registry=self.registry
        )
        self.finished = Counter(
            "saccade_finished_choices",
            "Sequences by finish reason: stop, length, cancelled or error.",
            ["outcome"],
            registry=self.registry,
        )
        self.responses = Counter(
            "saccade_http_responses",
            "HTTP responses by route and status; 499: the client disconnected before the response began.",
            ["route", "status"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The Prometheus text format; CONTENT_TYPE names it."""
        return generate_latest(self.registry)
