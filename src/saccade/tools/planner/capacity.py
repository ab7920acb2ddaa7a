"""How many requests of each kind fit into memory."""

from dataclasses import dataclass

from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.engine.cost_prior import ModelSize
from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import KVCacheOptions, PoolSizes, VisionBlocks
from saccade.scheduler.policy import SchedulerConfig
from saccade.tools.planner.traffic import TrafficKind, VisionSizes, arrivals

WORKSPACE = 2 << 30  # bytes assumed for activations, logits and libraries


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
    view_bytes = views * limits.block_size * _bytes(network, kv.vision_format)
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


def _bytes(network: ModelSize, form: str | None) -> int:
    return network.kv_bytes if form is None else network.quantized_kv_bytes
