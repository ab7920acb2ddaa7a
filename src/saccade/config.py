"""The options of an engine and of a server: small, frozen, resolved once, refusing nonsense.

Every field has an effect. `None` means "decide from the machine and the checkpoint"; who decides is said
next to the field.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from saccade.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]

GIB = 1 << 30


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine process needs to know."""

    model: str  # a checkpoint folder, a hub id, or "embedded"
    device: Device = "auto"  # auto: cuda when there is one
    dtype: Dtype = "auto"  # auto: the checkpoint's on cuda, float32 on cpu
    load_format: LoadFormat = "auto"  # dummy: random weights of the right shapes, made on the device
    max_model_len: int | None = None  # None: the checkpoint's, or what the KV pool holds if less
    max_num_seqs: int = 256  # device rows
    max_num_batched_tokens: int | None = None  # None: 8192 on cuda, 1024 on cpu
    max_queue: int = 4096  # requests waiting; more are refused
    block_size: int = 16
    num_blocks: int | None = None  # None: from the memory budget
    gpu_memory_utilization: float = 0.9  # share of the device's memory for weights, KV and caches (cuda)
    kv_cache_bytes: int | None = None  # None: what is left on cuda, 1 GiB on cpu
    vision_cache_bytes: int | None = None  # features kept for reuse; None: 2 GiB on cuda, 256 MiB on cpu
    prefix_caching: bool = True
    overlap: bool | None = None  # plan step N+1 while N runs; None: on cuda
    # ms between two tokens of an answer that prompts and pictures of others may lead to; 0: any.
    # None: 20 on cuda, any on cpu
    itl_target: float | None = None
    seed: int = 0  # root of the seeds given to requests that name none

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        _require(1 <= self.block_size <= 1024, f"block_size is {self.block_size}; use 1 to 1024")
        budget = self.max_num_batched_tokens
        _require(budget is None or budget >= 1, f"max_num_batched_tokens is {budget}; it must be at least 1")
        length = self.max_model_len
        _require(length is None or length >= 2, f"max_model_len is {length}; it must be at least 2")
        blocks = self.num_blocks
        _require(blocks is None or blocks >= 1, f"num_blocks is {blocks}; it must be at least 1")
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, f"gpu_memory_utilization is {share}; it is a share of the memory, 0 to 1")
        _require(self.max_queue >= 1, f"max_queue is {self.max_queue}; it must be at least 1")
        kv = self.kv_cache_bytes
        _require(kv is None or kv > 0, f"kv_cache_bytes is {kv}; it must be positive")
        vision = self.vision_cache_bytes
        _require(vision is None or vision >= 0, f"vision_cache_bytes is {vision}; it must not be negative")
        target = self.itl_target
        _require(target is None or 0 <= target < float("inf"), f"itl_target is {target} ms; use 0 or more")
        _require(
            blocks is None or kv is None,
            f"num_blocks ({blocks}) and kv_cache_bytes ({kv}) both size the KV pool; give one",
        )


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What a picture or video may be, and where it may come from. security.md rows 1-14."""

    images_per_prompt: int = 16
    videos_per_prompt: int = 4
    max_pixels: int = 64_000_000  # per picture, before decoding
    max_bytes: int = 32 << 20  # encoded, per picture
    max_video_bytes: int = 256 << 20
    max_frames: int = 768  # sampled video frames
    fetch_timeout: float = 10.0  # seconds for one remote picture, everything included
    max_redirects: int = 3
    allowed_domains: tuple[str, ...] | None = None  # None: any public host; () : no remote media at all
    allowed_local_path: Path | None = None  # None: no file: URLs
    allow_private_addresses: bool = False  # for tests and closed networks


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What the front process needs to know."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # none: open
    served_model_names: tuple[str, ...] = ()  # none: the model's own name
    max_body_bytes: int = 64 << 20
    read_timeout: float = 60.0  # seconds a request's header, and then its body, may take to arrive
    request_timeout: float = 600.0  # seconds from arrival to the last token
    shutdown_timeout: float = 30.0  # seconds running requests get after SIGTERM
    max_choices: int = 16  # n
    media: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"port is {self.port}; it must be 0 to 65535")
        _require(all(self.api_keys), "an API key is empty; remove it or give it a value")
