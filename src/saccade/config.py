"""The options of an engine and of a server: small, frozen, resolved once, refusing nonsense.

Every field has an effect. `None` means "decide from the machine and the checkpoint"; who decides is said
next to the field.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import KVCacheOptions, KVDtype, VisionScope

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Kernels = Literal["auto", "torch", "triton"]
Switch = Literal["auto", "on", "off"]

GIB = 1 << 30


_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(text: str) -> int:
    """'2GiB', '512MiB' or a plain number of bytes."""
    lower = text.strip().lower()
    unit = next((unit for unit in _UNITS if lower.endswith(unit)), "")
    try:
        return int(float(lower.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a size; write for example 2GiB or 512MiB") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _whole(config: object, least: Mapping[str, int]) -> None:
    """Fields that are integers of at least so much, or None where that means something."""
    for name, low in least.items():
        value = getattr(config, name)
        if value is not None:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            _require(
                is_whole and value >= low, f"{name} is {value!r}; it must be an integer of at least {low}"
            )


def _seconds(config: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(is_number and 0 < value < float("inf"), f"{name} is {value!r} seconds; it must be positive")


def _one_of(config: object, name: str, known: Any) -> None:
    value, choices = getattr(config, name), get_args(known)
    _require(value in choices, f"{name} is {value!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class VisionCache:
    """Where image features are kept for reuse, and how many bytes of them; 0 is none."""

    gpu: int | None = None  # in the device's memory, whatever the device; None: 2 GiB on cuda, 256 MiB on cpu
    host: int = 0  # in host memory, pinned on cuda
    disk: int = 0  # in files; needs `dir`
    dir: str | None = None  # a folder; several servers may share it
    ttl: float | None = None  # seconds features may go unused; None: any

    def __post_init__(self) -> None:
        _whole(self, {"gpu": 0, "host": 0, "disk": 0})
        for name in ("host", "disk"):
            _require(getattr(self, name) is not None, f"vision cache: {name} is None; give a size, or 0")
        if self.ttl is not None:
            _seconds(self, ("ttl",))
        if self.disk:
            _require(bool(self.dir), f"vision cache: disk is {self.disk} bytes, but no dir says where")
        else:
            _require(self.dir is None, f"vision cache: dir is {self.dir!r}, but disk is 0; give it a size")

    def __str__(self) -> str:
        """What `parse` reads."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return ",".join(f"{name}={value}" for name, value in given.items() if value is not None)

    @classmethod
    def parse(cls, text: str) -> "VisionCache":
        """'gpu=8GiB,host=32GiB,disk=100GiB,dir=/var/cache/saccade,ttl=86400', any of them."""
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            example = "write for example gpu=8GiB,host=32GiB,disk=100GiB,dir=/var/cache/saccade,ttl=86400"
            _require(
                name in ("gpu", "host", "disk", "dir", "ttl") and bool(value),
                f"{part!r} is no part of a vision cache; {example}",
            )
            _require(name not in found, f"vision cache: {name} is given twice")
            found[name] = value
        for name in {"gpu", "host", "disk"} & set(found):
            found[name] = parse_size(found[name])
        if "ttl" in found:
            try:
                found["ttl"] = float(found["ttl"])
            except ValueError:
                raise ConfigError(f"vision cache: ttl is {found['ttl']!r}; give seconds") from None
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine process needs to know."""

    model: str  # a checkpoint folder, a hub id, or "embedded"
    device: Device = "auto"  # auto: cuda when there is one
    dtype: Dtype = "auto"  # auto: the checkpoint's on cuda, float32 on cpu
    load_format: LoadFormat = "auto"  # dummy: random weights of the right shapes, made on the device
    max_model_len: int | None = None  # None: the checkpoint's, or what the KV pool holds if less
    max_num_seqs: int = 256  # device rows
    max_num_batched_tokens: int | None = None  # None: 8192 on cuda, 2048 on cpu
    max_queue: int = 4096  # requests waiting; more are refused
    max_queue_bytes: int = 8 * GIB  # pixels of requests not answered yet; more are refused
    block_size: int = 16
    num_blocks: int | None = None  # None: from the memory budget
    gpu_memory_utilization: float = 0.9  # share of the device's memory for weights, KV and caches (cuda)
    kv_cache_bytes: int | None = None  # None: what is left on cuda, 1 GiB on cpu
    kv_cache_dtype: KVDtype = "auto"  # of all KV blocks: fp8 and int8 are lossy; auto: the model's
    kv_vision_dtype: KVDtype = "auto"  # of the blocks of views, which then have a pool of their own
    kv_vision_share: float | None = None  # of the KV bytes, for views' own pool; None: half if there is one
    kv_vision_views: VisionScope | None = (
        None  # whose blocks go there; None: all whole pictures', if there is one
    )
    vision_cache: VisionCache = field(default_factory=VisionCache)  # image features kept for reuse
    prefix_caching: bool = True
    pin_prefix: tuple[str, ...] = ()  # system prompts whose KV is never given up
    pinned_prefix_bytes: int = 256 << 20  # of KV that a tenant's system prompts may take for good
    # Host memory for the KV of requests that give way; None: 4 GiB on cuda, none on cpu
    swap_bytes: int | None = None
    overlap: bool | None = None  # plan step N+1 while N runs; None: on cuda
    # ms between two tokens of an answer that prompts and pictures of others may lead to; 0: any.
    # None: 11 on cuda, any on cpu
    itl_target: float | None = None
    kernels: Kernels = "auto"  # auto: those measured faster (kernels/dispatch.py); triton: all; torch: none
    graphs: Switch = "auto"  # captured decode steps and short prompts; auto: on cuda with Triton attention
    early_launch: Switch = "auto"  # kernels start while the one before ends; auto: on from sm_90, with graphs
    deterministic: bool = False  # a request's tokens do not depend on what else is computed beside it
    seed: int = 0  # root of the seeds given to requests that name none
    step_log: str | None = None  # a file: a line of JSON for every step goes there

    def options(self) -> dict[str, Any]:
        """Everything but the model, as `LLM` and `AsyncEngine` take it."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "model"}

    def kv_wish(self) -> KVCacheOptions:
        return KVCacheOptions(
            cache_dtype=self.kv_cache_dtype,
            vision_dtype=self.kv_vision_dtype,
            vision_share=self.kv_vision_share,
            vision_views=self.kv_vision_views,
        )

    def __post_init__(self) -> None:
        _one_of(self, "device", Device)
        _one_of(self, "dtype", Dtype)
        _one_of(self, "load_format", LoadFormat)
        _one_of(self, "kernels", Kernels)
        _one_of(self, "graphs", Switch)
        _one_of(self, "early_launch", Switch)
        least = {"max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_queue": 1}
        least |= {"max_queue_bytes": 1, "block_size": 1, "num_blocks": 1, "kv_cache_bytes": 1}
        _whole(self, {**least, "swap_bytes": 0, "pinned_prefix_bytes": 0, "seed": -(1 << 63)})
        cache = self.vision_cache
        _require(isinstance(cache, VisionCache), f"vision_cache is {cache!r}; give a VisionCache")
        _require(self.block_size <= 1024, f"block_size is {self.block_size}; use 1 to 1024")
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, f"gpu_memory_utilization is {share}; it is a share of the memory, 0 to 1")
        _require(self.deterministic is not None, "deterministic is None; it is true or false")
        texts: object = self.pin_prefix
        _require(
            isinstance(texts, tuple) and all(isinstance(text, str) and text.strip() for text in texts),
            f"pin_prefix is {str(texts)[:60]!r}; it is a tuple of texts, none of them empty",
        )
        _require(self.prefix_caching or not texts, "pin_prefix needs prefix_caching; leave out one of them")
        for name in ("prefix_caching", "overlap", "deterministic"):
            value = getattr(self, name)
            _require(value in (True, False, None), f"{name} is {value!r}; it is true or false")
        target = self.itl_target
        _require(target is None or 0 <= target < float("inf"), f"itl_target is {target} ms; use 0 or more")
        self.kv_wish()
        blocks, kv = self.num_blocks, self.kv_cache_bytes
        _require(
            blocks is None or kv is None,
            f"num_blocks ({blocks}) and kv_cache_bytes ({kv}) both size the KV pool; give one",
        )


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What a picture or video may be, and where it may come from."""

    images_per_prompt: int = 16
    videos_per_prompt: int = 4
    max_pixels: int = 64_000_000  # per picture, before decoding
    max_request_pixels: int = 256_000_000  # of all pictures and frames of a request; 3 bytes each, decoded
    max_bytes: int = 32 << 20  # encoded, per picture
    max_video_bytes: int = 256 << 20
    max_frames: int = 768  # sampled video frames
    fetch_timeout: float = 10.0  # seconds for one remote picture, everything included
    max_redirects: int = 3
    allowed_domains: tuple[str, ...] | None = None  # None: any public host; () : no remote media at all
    allowed_local_path: Path | None = None  # None: no file: URLs
    allow_private_addresses: bool = False  # for tests and closed networks

    def __post_init__(self) -> None:
        _seconds(self, ("fetch_timeout",))
        counts = ("images_per_prompt", "videos_per_prompt", "max_redirects")
        _whole(self, {**dict.fromkeys(counts, 0), "max_frames": 2})
        _whole(self, dict.fromkeys(("max_pixels", "max_request_pixels", "max_bytes", "max_video_bytes"), 1))


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
    slow_request_seconds: float = 30.0  # requests that take longer are logged stage by stage; 0: none is
    max_choices: int = 16  # n
    media: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        _seconds(self, ("read_timeout", "request_timeout", "shutdown_timeout"))
        slow = self.slow_request_seconds
        _require(0 <= slow < float("inf"), f"slow_request_seconds is {slow}; use 0 (off) or more")
        _whole(self, {"port": 0, "max_body_bytes": 1, "max_choices": 1})
        _require(0 <= self.port <= 65535, f"port is {self.port}; it must be 0 to 65535")
        _require(all(self.api_keys), "an API key is empty; remove it or give it a value")
