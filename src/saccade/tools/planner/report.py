"""How many requests of each kind fit into memory, and the report of `saccade plan`: tables, or JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.engine.cost_prior import ModelSize
from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import KVCacheOptions, PoolSizes, VisionBlocks
from saccade.scheduler.cost_model import Coefficients
from saccade.scheduler.policy import SchedulerConfig
from saccade.tools.planner.simulator import Latencies, SimulationResult
from saccade.tools.planner.traffic import TrafficKind, VisionSizes, arrivals
from saccade.tools.report import table

WORKSPACE = 2 << 30  # bytes assumed for activations, logits and libraries
PARTS = {"first": "TTFT", "between": "ITL", "whole": "whole answer"}


@dataclass(frozen=True)
class MemoryBudget:
    total: int  # bytes of the device
    utilization: float  # share of it to use
    features: int  # bytes of the encoder cache
    kv_bytes: int | None = None  # of the KV pool, if given

    def pool_bytes(self, network: ModelSize) -> int:
        """What weights, encoder cache and workspace leave."""
        if self.kv_bytes is not None:
            return self.kv_bytes
        left = int(self.total * self.utilization) - network.weight_bytes - self.features - WORKSPACE
        if left <= 0:
            raise ConfigError(
                f"{network.weight_bytes / 1e9:.1f} GB of weights, {self.features / 1e9:.1f} GB for features "
                f"and {WORKSPACE / 1e9:.1f} GB of workspace leave nothing for the KV cache in "
                f"{self.total * self.utilization / 1e9:.1f} GB; give more --memory, or --kv-cache-bytes"
            )
        return left


@dataclass(frozen=True)
class KindCapacity:
    """How many requests of one kind fit at a time, without other kinds."""

    kind: str
    tokens: int  # prompt, views and answer
    visual_tokens: int
    bytes: int  # of KV
    concurrent: float  # pool bytes / bytes
    whole: int  # in whole blocks
    binds: str  # the limit: memory, rows, or context (then none fits)


def fit_kind(
    kind: TrafficKind,
    network: ModelSize,
    vision: VisionSizes,
    limits: SchedulerConfig,
    pool_bytes: int,
    kv: KVCacheOptions,
) -> KindCapacity:
    tokens = kind.tokens(vision)
    shares = divide_pool(network, limits, pool_bytes, kv)
    wanted = limits.blocks_for(tokens)
    views = view_blocks(kind, vision, limits, kv) if shares.vision else 0
    text_bytes = (tokens - views * limits.block_size) * network.kv_bytes
    per_token = network.kv_bytes if kv.vision_format is None else network.quantized_kv_bytes
    view_bytes = views * limits.block_size * per_token
    whole, concurrent = shares.text // (wanted - views), pool_bytes / (text_bytes + view_bytes)
    if shares.vision:
        concurrent = shares.text * limits.block_size * network.kv_bytes / text_bytes
    if views:
        whole = min(whole, shares.vision // views)
        concurrent = min(concurrent, shares.vision / views)
    if tokens > limits.max_model_len:
        binds, whole = "context", 0
    else:
        binds = "memory" if whole < limits.max_num_seqs else "rows"
    return KindCapacity(
        kind=kind.name,
        tokens=tokens,
        visual_tokens=kind.visual_tokens(vision),
        bytes=text_bytes + view_bytes,
        concurrent=concurrent,
        whole=min(whole, limits.max_num_seqs),
        binds=binds,
    )


def divide_pool(
    network: ModelSize, limits: SchedulerConfig, pool_bytes: int, kv: KVCacheOptions
) -> PoolSizes:
    """The blocks of both pools."""
    plain, small = (limits.block_size * per for per in (network.kv_bytes, network.quantized_kv_bytes))
    return kv.divide_bytes(pool_bytes, plain, small)


def view_blocks(kind: TrafficKind, vision: VisionSizes, limits: SchedulerConfig, kv: KVCacheOptions) -> int:
    """Blocks of a request that lie in the pool for views."""
    request = next(arrivals([kind], vision, 0, seconds=None, requests=1)).request
    spans = lay_out_prompt(request).spans
    return VisionBlocks(spans, limits.block_size, kv.roles).among(0, limits.blocks_for(kind.tokens(vision)))


@dataclass(frozen=True)
class PlanReport:
    network: ModelSize
    pool_bytes: int
    shares: PoolSizes
    costs: Coefficients
    source: str  # where the costs are from
    fits: Sequence[KindCapacity]
    result: SimulationResult | None  # None: only the capacity was computed

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kv_bytes_per_token": self.network.kv_bytes,
            "weight_bytes": self.network.weight_bytes,
            "kv_pool_bytes": self.pool_bytes,
            "kv_blocks": self.shares.blocks,
            "kv_vision_blocks": self.shares.vision,
            "kv_compact_blocks": self.shares.compact,
            "costs_ms": asdict(self.costs),
            "costs_from": self.source,
            "kinds": {fit.kind: asdict(fit) for fit in self.fits},
        }
        if self.result is not None:
            found["played"] = _played(self.result)
            for name, latencies in self.result.kinds.items():
                found["kinds"][name]["waits_ms"] = _percentiles(latencies)
        return found

    def show(self, console: Console) -> None:
        per_token = f"{self.network.kv_bytes / 1e3:,.1f} kB of KV per token{self._vision_pool()}"
        console.print(f"{per_token}, {self.pool_bytes / 1e9:,.1f} GB of it; costs: {self.source}")
        console.print(self._capacity())
        if self.result is None:
            return
        console.print(_latency_table(self.result))
        played = _played(self.result)
        blocks = played["peak_blocks"] / max(self.shares.blocks, 1)
        console.print(
            f"{played['seconds']:,.1f} s simulated in {played['steps']:,} steps, device busy"
            f" {played['busy']:.0%}, at most {played['peak_rows']:,} sequences and {blocks:.0%} of the KV"
            f" blocks, {played['preemptions']:,} preemptions ({played['swapped_blocks']:,} blocks swapped"
            f" in); requests waited for: {played['binds']}"
        )

    def _vision_pool(self) -> str:
        if not self.shares.vision:
            return ""
        small = self.shares.compact == self.shares.vision and not self.network.quantized_kv
        per_token = self.network.quantized_kv_bytes if small else self.network.kv_bytes
        return f" ({per_token / 1e3:,.1f} of an image, {self.shares.vision:,} of the blocks)"

    def _capacity(self) -> Table:
        heads = ("kind", "tokens", "of them visual", "KV MB", "concurrent", "in whole blocks", "limit")
        rows = [
            (
                fit.kind,
                f"{fit.tokens:,}",
                f"{fit.visual_tokens:,}",
                f"{fit.bytes / 1e6:,.1f}",
                f"{fit.concurrent:,.0f}",
                f"{fit.whole:,}",
                fit.binds,
            )
            for fit in self.fits
        ]
        return table("How many requests of one kind fit", heads, rows, left=("kind", "limit"))


def _latency_table(result: SimulationResult) -> Table:
    heads = ["kind", "requests", "refused"]
    heads += [f"{name} {percentile}" for name in PARTS.values() for percentile in ("p50", "p99")]
    rows = []
    for kind, latencies in result.kinds.items():
        numbers = _percentiles(latencies)
        values = [numbers[f"{part}_{percentile}"] for part in PARTS for percentile in ("p50", "p99")]
        cells = ["-" if value is None else f"{value:,.1f}" for value in values]
        rows.append([kind, f"{numbers['requests']:,}", f"{numbers['refused']:,}", *cells])
    return table("Expected latencies, ms", heads, rows)


def _percentiles(latencies: Latencies) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": len(latencies.whole), "refused": latencies.refused}
    for part in PARTS:
        seconds = getattr(latencies, part)
        for percentile in (50, 99):
            value = float(np.percentile(seconds, percentile)) * 1e3 if len(seconds) else None
            found[f"{part}_p{percentile}"] = value
    return found


def _played(result: SimulationResult) -> dict[str, Any]:
    stats = result.stats
    return {
        "seconds": result.seconds,
        "steps": stats.steps,
        "busy": result.busy / result.seconds if result.seconds else 0.0,
        "peak_rows": result.peak_rows,
        "peak_blocks": result.peak_blocks,
        "preemptions": stats.preemptions,
        "swapped_blocks": stats.swap_in_blocks,
        "encodes": stats.encodes,
        "generated_tokens": stats.generated_tokens,
        "prediction_error": stats.step_error,
        "short_of_steps": dict(result.short_of),
        "binds": result.binds,
    }
