"""How much fits: memory against what a request of each kind needs. Arithmetic only, no time passes.

takes   a network's sizes, the memory, the kinds of requests
gives   bytes and numbers of requests
never   rounds in secret: `concurrent` is a ratio, `whole` counts whole requests in whole blocks
"""

from dataclasses import dataclass

from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import KVCacheOptions, PoolSizes, VisionBlocks
from saccade.scheduler.cost_prior import Network
from saccade.scheduler.policy import Limits
from saccade.tools.planner.traffic import Kind, Vision, arrivals

WORKSPACE = 2 << 30  # bytes for activations, logits and libraries, where nothing was measured


@dataclass(frozen=True)
class Memory:
    total: int  # bytes of the device
    utilization: float  # share of it to use
    features: int  # bytes for vision features
    kv_bytes: int | None = None  # the KV pool, when its size is given

    def pool_bytes(self, network: Network) -> int:
        """What is left for the KV pool beside weights, features and workspace."""
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
class Fit:
    """How many requests of one kind fit at a time, were there no others."""

    kind: str
    tokens: int  # prompt, views and answer
    visual_tokens: int
    bytes: int  # of KV
    concurrent: float  # pool bytes / bytes
    whole: int  # in whole blocks
    binds: str  # what keeps it from being more: memory, rows, or context (then it does not fit at all)


def fit_kind(
    kind: Kind, network: Network, vision: Vision, limits: Limits, pool_bytes: int, wish: KVCacheOptions
) -> Fit:
    tokens = kind.tokens(vision)
    shares = divide(network, limits, pool_bytes, wish)
    wanted = limits.blocks_for(tokens)
    views = view_blocks(kind, vision, limits, wish) if shares.vision else 0
    text_bytes = (tokens - views * limits.block_size) * network.kv_bytes
    view_bytes = views * limits.block_size * _bytes(network, wish.vision_format)
    whole, concurrent = shares.text // (wanted - views), pool_bytes / (text_bytes + view_bytes)
    if shares.vision:
        concurrent = shares.text * limits.block_size * network.kv_bytes / text_bytes
    if views:
        whole = min(whole, shares.vision // views)
        concurrent = min(concurrent, shares.vision / views)
    if tokens > limits.max_model_len:
        binds, whole = "context", 0
    else:
        binds = "memory" if whole < limits.max_rows else "rows"
    return Fit(
        kind=kind.name,
        tokens=tokens,
        visual_tokens=kind.visual_tokens(vision),
        bytes=text_bytes + view_bytes,
        concurrent=concurrent,
        whole=min(whole, limits.max_rows),
        binds=binds,
    )


def divide(network: Network, limits: Limits, pool_bytes: int, wish: KVCacheOptions) -> PoolSizes:
    """The blocks of both pools. A network whose KV is all in 8 bits says so itself."""
    plain, small = (limits.block_size * per for per in (network.kv_bytes, network.small_kv_bytes))
    return wish.divide_bytes(pool_bytes, plain, small)


def view_blocks(kind: Kind, vision: Vision, limits: Limits, wish: KVCacheOptions) -> int:
    """Blocks of a request of this kind that are nothing but views of the vision pool."""
    request = next(arrivals([kind], vision, 0, seconds=None, requests=1)).request
    spans = lay_out_prompt(request).spans
    return VisionBlocks(spans, limits.block_size, wish.roles).among(0, limits.blocks_for(kind.tokens(vision)))


def _bytes(network: Network, form: str | None) -> int:
    return network.kv_bytes if form is None else network.small_kv_bytes
