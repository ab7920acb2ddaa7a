"""What a server tells about itself: the engine's snapshot and the front's own clocks, for Prometheus.

takes   `EngineStats`, the totals the engine sends with its steps, and the front's notes about each request
gives   the text of /metrics
owns    one registry per `ServerMetrics`, so that two servers in one process never mix
never   imports anything of ours; counts anything twice (engine totals are exported as they are)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds. From one decode step of a small model to the slowest request anybody waits for.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
LATE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
END_TO_END_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


# Where a request's time goes, in this order; saccade/stages.py says what each is.
STAGES = (
    "receive",
    "prepare",
    "tokenise",
    "fetch",
    "unpack",
    "send",
    "queue",
    "look",
    "encode",
    "prefill",
    "first_token",
    "decode",
    "total",
)


class TierStats(msgspec.Struct, frozen=True):
    """One tier of the feature store."""

    bytes: int = 0
    entries: int = 0
    hits: int = 0  # views a step needed that this tier had
    evictions: int = 0  # given up for others, or unused for too long


class FeatureStats(msgspec.Struct, frozen=True, kw_only=True):
    """Visual features kept for reuse; totals but for bytes and entries."""

    gpu: TierStats = TierStats()
    host: TierStats = TierStats()
    disk: TierStats = TierStats()  # its bytes are those of the folder, whoever wrote them
    misses: int = 0  # views no tier had: they were encoded
    downs: int = 0  # moves from the device to host memory
    ups: int = 0  # and back
    writes: int = 0  # files written
    reads: int = 0  # files read, in vain or not
    failed_reads: int = 0  # of those, files that were damaged or gone
    dropped_writes: int = 0  # the writing thread had no room, or the disk refused

    @property
    def hits(self) -> int:
        return self.gpu.hits + self.host.hits + self.disk.hits


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine. The first group are states, the second are totals that only grow."""

    waiting: int = 0  # requests not yet admitted
    waiting_encode: int = 0  # choices in the queue that have a view to encode
    waiting_other: int = 0  # the other choices in the queue
    oldest_wait: float = 0.0  # seconds the longest waiting request has not been started for
    running: int = 0  # requests holding device rows
    blocks_used: int = 0  # KV blocks held by requests
    blocks_cached: int = 0  # KV blocks kept only for the prefix cache
    blocks_free: int = 0
    vision_blocks_used: int = 0  # of the blocks, those of the pool for views, where there is one
    vision_blocks_cached: int = 0
    vision_blocks_free: int = 0
    blocks_pinned: int = 0  # KV blocks of pinned beginnings that no request holds at the moment
    blocks_spared: int = 0  # KV blocks that would be used beside, were none shared by several requests
    swap_slots_used: int = 0  # KV blocks in host memory, of requests that gave way
    swap_slots_free: int = 0  # more would fit
    swap_waiting: int = 0  # choices that gave way and are to come back with what they had
    step_error: float = 0.0  # recent mean of |predicted - actual| / actual step time
    to_prepare: int = 0  # kinds of steps an idle engine would still compile and capture ahead

    prefix_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int = 0  # of those, found
    prefix_copied_tokens: int = 0  # of those found, the ones in a block that is shared only in part: copied
    prefix_queried_visual_tokens: int = 0  # of those looked up, tokens of pictures
    prefix_hit_visual_tokens: int = 0  # of those found
    pin_refusals: int = 0  # choices of tenants whose beginnings could not be pinned for want of room
    preemptions: int = 0  # choices that gave way for want of KV blocks
    swap_out_blocks: int = 0  # KV blocks copied to the host for them
    swap_in_blocks: int = 0  # and back
    swap_dropped: int = 0  # choices that lost what was set aside for them, and computed again
    prompt_tokens: int = 0  # prompt tokens of admitted requests, visual and cached ones included
    generated_tokens: int = 0
    visual_tokens: int = 0  # of the prompt tokens, those that stand for pictures
    full_visual_tokens: int = 0  # those there would have been at full detail
    looks: int = 0  # pictures looked at to choose zoomed views
    gated_looks: int = 0  # of those, where the global view was enough
    zooms: int = 0  # zoomed views chosen
    steps: int = 0
    encodes: int = 0  # views run through the vision tower
    encode_slices: int = 0  # pieces in which some of them went, spread over steps
    encode_failures: int = 0  # views the device could not make
    started: int = 0  # requests that have had a row
    wait_seconds: float = 0.0  # they waited for it, all together
    timed_steps: int = 0  # measurements of step time; one may span steps that yield nothing to wait for
    step_seconds: float = 0.0  # all of them
    step_seconds_predicted: float = 0.0  # what the cost model expected of those

    features: FeatureStats = FeatureStats()


class _EngineCollector(Collector):
    """Exports the latest snapshot at scrape time; totals become real Prometheus counters."""

    def __init__(self, latest: Callable[[], EngineStats]) -> None:
        self._latest = latest

    def describe(self) -> Iterable[Metric]:
        return _engine_families(EngineStats())

    def collect(self) -> Iterable[Metric]:
        return _engine_families(self._latest())


def _engine_families(stats: EngineStats) -> Iterator[Metric]:
    requests = GaugeMetricFamily("saccade_requests", "Requests inside the engine.", labels=["state"])
    requests.add_metric(["waiting"], stats.waiting)
    requests.add_metric(["running"], stats.running)
    yield requests
    queue = GaugeMetricFamily(
        "saccade_queue_choices",
        "Choices waiting for a device row, by class: with a view to encode, or without.",
        labels=["class"],
    )
    queue.add_metric(["encode"], stats.waiting_encode)
    queue.add_metric(["other"], stats.waiting_other)
    yield queue
    blocks = GaugeMetricFamily(
        "saccade_kv_blocks",
        "KV blocks held by requests (used), kept only for the prefix cache (cached), pinned, and free.",
        labels=["state"],
    )
    blocks.add_metric(["used"], stats.blocks_used)
    blocks.add_metric(["cached"], stats.blocks_cached)
    blocks.add_metric(["free"], stats.blocks_free)
    blocks.add_metric(["pinned"], stats.blocks_pinned)
    yield blocks
    vision = GaugeMetricFamily(
        "saccade_kv_vision_blocks", "Of those, the ones of the pool for pictures.", labels=["state"]
    )
    vision.add_metric(["used"], stats.vision_blocks_used)
    vision.add_metric(["cached"], stats.vision_blocks_cached)
    vision.add_metric(["free"], stats.vision_blocks_free)
    yield vision
    yield from _swap_families(stats)
    yield from _feature_families(stats.features)
    for name, text, state in (
        ("kv_blocks_spared", "KV blocks saved by sharing, at the moment.", stats.blocks_spared),
        ("queue_oldest_seconds", "How long the longest waiting request has waited.", stats.oldest_wait),
        ("step_error_ratio", "Recent mean relative error of predicted step times.", stats.step_error),
        ("steps_to_prepare", "Kinds of steps not compiled and captured ahead yet.", stats.to_prepare),
    ):
        yield GaugeMetricFamily(f"saccade_{name}", text, state)
    times = CounterMetricFamily(
        "saccade_step_seconds", "Step time by kind: measured, and as predicted.", labels=["kind"]
    )
    times.add_metric(["actual"], stats.step_seconds)
    times.add_metric(["predicted"], stats.step_seconds_predicted)
    yield times
    tokens = CounterMetricFamily(
        "saccade_tokens",
        "Tokens by kind; cached and visual ones are part of the prompt tokens, those at full detail are not.",
        labels=["kind"],
    )
    tokens.add_metric(["prompt"], stats.prompt_tokens)
    tokens.add_metric(["cached"], stats.prefix_hit_tokens)
    tokens.add_metric(["visual"], stats.visual_tokens)
    tokens.add_metric(["visual_at_full_detail"], stats.full_visual_tokens)
    tokens.add_metric(["generated"], stats.generated_tokens)
    yield tokens
    yield from _totals(stats)


def _swap_families(stats: EngineStats) -> Iterator[Metric]:
    slots = GaugeMetricFamily(
        "saccade_swap_slots", "KV blocks that host memory holds, or could hold.", labels=["state"]
    )
    slots.add_metric(["used"], stats.swap_slots_used)
    slots.add_metric(["free"], stats.swap_slots_free)
    yield slots
    yield GaugeMetricFamily(
        "saccade_swap_waiting_choices", "Choices that are to come back from host memory.", stats.swap_waiting
    )


def _totals(stats: EngineStats) -> Iterator[Metric]:
    for name, text, total in (
        ("prefix_cache_queried_tokens", "Prompt tokens looked up.", stats.prefix_queried_tokens),
        ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
        (
            "prefix_cache_queried_visual_tokens",
            "Of the prompt tokens looked up, those of pictures.",
            stats.prefix_queried_visual_tokens,
        ),
        (
            "prefix_cache_hit_visual_tokens",
            "Of the prompt tokens found, those of pictures.",
            stats.prefix_hit_visual_tokens,
        ),
        ("prefix_cache_copied_tokens", "Of those, inside a copied block.", stats.prefix_copied_tokens),
        ("feature_cache_misses", "Views that had to be encoded.", stats.features.misses),
        ("preemptions", "Times a choice gave way for want of KV blocks.", stats.preemptions),
        ("swap_out_blocks", "KV blocks copied to host memory.", stats.swap_out_blocks),
        ("swap_in_blocks", "KV blocks brought back from it.", stats.swap_in_blocks),
        ("swap_dropped", "Choices that lost what was set aside for them.", stats.swap_dropped),
        ("pin_refusals", "Choices of tenants whose prefixes could not be pinned.", stats.pin_refusals),
        ("engine_steps", "Steps the engine ran.", stats.steps),
        ("timed_steps", "Measurements behind the step times.", stats.timed_steps),
        ("requests_started", "Requests that got a device row.", stats.started),
        ("queue_wait_seconds", "Time those waited for it, all together.", stats.wait_seconds),
        ("vision_encodes", "Views run through the vision tower.", stats.encodes),
        ("looks", "Pictures looked at to choose zoomed views.", stats.looks),
        ("gated_looks", "Of those, where the global view was enough.", stats.gated_looks),
        ("zooms", "Zoomed views chosen.", stats.zooms),
        ("vision_encode_slices", "Pieces of views spread over several steps.", stats.encode_slices),
        ("vision_encode_failures", "Views the device could not encode.", stats.encode_failures),
    ):
        yield CounterMetricFamily(f"saccade_{name}", text, total)


def _feature_families(features: FeatureStats) -> Iterator[Metric]:
    """By tier: gpu (the device's memory, on a CPU too), host, disk."""
    tiers = {"gpu": features.gpu, "host": features.host, "disk": features.disk}
    for name, text, kind in (
        ("bytes", "Bytes of visual features kept for reuse.", GaugeMetricFamily),
        ("entries", "Views whose features are kept.", GaugeMetricFamily),
        (
            "hits",
            "Views a tier had kept from before.",
            CounterMetricFamily,
        ),
        ("evictions", "Views given up for others, or unused for too long.", CounterMetricFamily),
    ):
        family = kind(f"saccade_feature_cache_{name}", text, labels=["tier"])
        for tier, stats in tiers.items():
            family.add_metric([tier], getattr(stats, name))
        yield family
    moves = CounterMetricFamily(
        "saccade_feature_cache_moves",
        "Views moved: down to host memory, up to the device, written to and read from disk.",
        labels=["move"],
    )
    moves.add_metric(["down"], features.downs)
    moves.add_metric(["up"], features.ups)
    moves.add_metric(["write"], features.writes)
    moves.add_metric(["read"], features.reads)
    yield moves
    for name, text, total in (
        ("failed_reads", "Files of features that were damaged or gone.", features.failed_reads),
        (
            "dropped_writes",
            "Features not written, for want of room.",
            features.dropped_writes,
        ),
    ):
        yield CounterMetricFamily(f"saccade_feature_cache_{name}", text, total)


class ServerMetrics:
    """The metrics of one server: the engine's snapshot plus what only the front can time."""

    def __init__(self, latest: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(latest))
        self.first_token = Histogram(
            "saccade_time_to_first_token_seconds",
            "From a request's arrival to the first token of each of its prompts.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "saccade_inter_token_seconds",
            "Between two successive tokens of one choice.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.end_to_end = Histogram(
            "saccade_request_seconds",
            "From a request's arrival to its end.",
            buckets=END_TO_END_BUCKETS,
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "saccade_front_late_seconds",
            "How late the server's event loop was, asked twenty times a second.",
            buckets=LATE_BUCKETS,
            registry=self.registry,
        )
        stage = Histogram(
            "saccade_stage_seconds",
            "Where the time of answered requests went, stage by stage.",
            labelnames=["stage"],
            buckets=STAGE_BUCKETS,
            registry=self.registry,
        )
        self.stages = {name: stage.labels(name) for name in STAGES}
        self.in_flight = Gauge(
            "saccade_http_requests_in_flight", "Generation requests being served.", registry=self.registry
        )
        self.finished = Counter(
            "saccade_finished_choices",
            "Choices by how they ended: stop, length, cancelled or error.",
            labelnames=["outcome"],
            registry=self.registry,
        )
        self.responses = Counter(
            "saccade_http_responses",
            "HTTP responses by route and status; 499 is a client that left before its answer began.",
            labelnames=["route", "status"],
            registry=self.registry,
        )

    def observe_stages(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self.stages[name].observe(value)

    def render(self) -> bytes:
        """The Prometheus text format; CONTENT_TYPE names it."""
        return generate_latest(self.registry)
