"""Options of the engine and of the server: frozen, validated once. None means: decided at startup."""

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


def _check_integers(config: object, minimums: Mapping[str, int]) -> None:
    for name, low in minimums.items():
        value = getattr(config, name)
        if value is not None:
            integer = isinstance(value, int) and not isinstance(value, bool)
            _require(
                integer and value >= low, f"{name} is {value!r}; it must be an integer of at least {low}"
            )


def _check_seconds(config: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(is_number and 0 < value < float("inf"), f"{name} is {value!r} seconds; it must be positive")


def _check_choice(config: object, name: str, literal: Any) -> None:
    value, choices = getattr(config, name), get_args(literal)
    _require(value in choices, f"{name} is {value!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class VisionCache:
    """Sizes in bytes of the encoder cache's tiers; 0 is off."""

    gpu: int | None = None  # memory of the device, CPU included; None: 2 GiB on cuda, 256 MiB on cpu
    host: int = 0  # host memory, pinned on cuda
    disk: int = 0  # files in `dir`
    dir: str | None = None  # a folder; several servers may share it
    ttl: float | None = None  # seconds after which unused entries are evicted; None: never

    def __post_init__(self) -> None:
        _check_integers(self, {"gpu": 0, "host": 0, "disk": 0})
        for name in ("host", "disk"):
            _require(getattr(self, name) is not None, f"vision cache: {name} is None; give a size, or 0")
        if self.ttl is not None:
            _check_seconds(self, ("ttl",))
        if self.disk:
            _require(bool(self.dir), f"vision cache: disk is {self.disk} bytes; give a dir for them")
        else:
            _require(self.dir is None, f"vision cache: dir is {self.dir!r}, but disk is 0; give it a size")

    def __str__(self) -> str:
        """The form `parse` reads."""
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
                f"{part!r} is not a part of a vision cache; {example}",
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
    """Options of the engine core."""

    model: str  # a checkpoint folder, a hub id, or "embedded"
    device: Device = "auto"  # auto: cuda if available
    dtype: Dtype = "auto"  # auto: the checkpoint's on cuda, float32 on cpu
    load_format: LoadFormat = "auto"  # dummy: random weights, made on the device
    max_model_len: int | None = None  # None: the checkpoint's, or the KV cache's if less
    max_num_seqs: int = 256  # slots
    max_num_batched_tokens: int | None = None  # None: 8192 on cuda, 2048 on cpu
    max_queue: int = 4096  # waiting requests; more are refused
    max_queue_bytes: int = 8 * GIB  # pixels of unfinished requests; more are refused
    block_size: int = 16
    num_blocks: int | None = None  # None: from the memory budget
    gpu_memory_utilization: float = 0.9  # share of GPU memory for weights, KV cache and encoder cache
    kv_cache_bytes: int | None = None  # None: what is left on cuda, 1 GiB on cpu
    kv_cache_dtype: KVDtype = "auto"  # fp8 and int8 are lossy; auto: the model's
    kv_vision_dtype: KVDtype = "auto"  # of image blocks, which then have their own pool
    kv_vision_share: float | None = None  # of the KV cache, for that pool; None: half if there is one
    kv_vision_views: VisionScope | None = None  # images whose blocks go there; None: all
    vision_cache: VisionCache = field(default_factory=VisionCache)  # the encoder cache
    prefix_caching: bool = True
    pin_prefix: tuple[str, ...] = ()  # system prompts whose KV blocks are never evicted
    pinned_prefix_bytes: int = 256 << 20  # most KV that they may take per tenant
    swap_bytes: int | None = None  # host memory for preempted KV blocks; None: 4 GiB on cuda, 0 on cpu
    overlap: bool | None = None  # plan step N+1 while N runs; None: on cuda
    itl_target: float | None = None  # ms between tokens; 0: no target; None: 11 on cuda, no target on cpu
    kernels: Kernels = "auto"  # auto: those measured faster (kernels/dispatch.py); triton: all; torch: none
    graphs: Switch = "auto"  # CUDA graphs of decode steps and short prompts; auto: with Triton attention
    early_launch: Switch = "auto"  # programmatic dependent launch; auto: with graphs from sm_90
    deterministic: bool = False  # a request's tokens do not depend on the batch
    seed: int = 0  # base seed for requests that set none
    step_log: str | None = None  # file that gets a line of JSON per step

    def options(self) -> dict[str, Any]:
        """All options but the model, as `LLM` and `AsyncEngine` take them."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "model"}

    def kv_cache_options(self) -> KVCacheOptions:
        return KVCacheOptions(
            cache_dtype=self.kv_cache_dtype,
            vision_dtype=self.kv_vision_dtype,
            vision_share=self.kv_vision_share,
            vision_views=self.kv_vision_views,
        )

    def __post_init__(self) -> None:
        literals = {"device": Device, "dtype": Dtype, "load_format": LoadFormat, "kernels": Kernels}
        for name, literal in {**literals, "graphs": Switch, "early_launch": Switch}.items():
            _check_choice(self, name, literal)
        minimums = {"max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_queue": 1}
        minimums |= {"max_queue_bytes": 1, "block_size": 1, "num_blocks": 1, "kv_cache_bytes": 1}
        _check_integers(self, {**minimums, "swap_bytes": 0, "pinned_prefix_bytes": 0, "seed": -(1 << 63)})
        cache = self.vision_cache
        _require(isinstance(cache, VisionCache), f"vision_cache is {cache!r}; give a VisionCache")
        _require(self.block_size <= 1024, f"block_size is {self.block_size}; use 1 to 1024")
        share = self.gpu_memory_utilization
        _require(
            0 < share <= 1, f"gpu_memory_utilization is {share}; use a share of the memory, above 0 up to 1"
        )
        _require(self.deterministic is not None, "deterministic is None; it is true or false")
        texts: object = self.pin_prefix
        _require(
            isinstance(texts, tuple) and all(isinstance(text, str) and text.strip() for text in texts),
            f"pin_prefix is {str(texts)[:60]!r}; use a tuple of non-empty texts",
        )
        _require(self.prefix_caching or not texts, "pin_prefix needs prefix_caching; leave out one of them")
        for name in ("prefix_caching", "overlap", "deterministic"):
            value = getattr(self, name)
            _require(value in (True, False, None), f"{name} is {value!r}; it is true or false")
        target = self.itl_target
        _require(target is None or 0 <= target < float("inf"), f"itl_target is {target} ms; use 0 or more")
        self.kv_cache_options()
        blocks, kv = self.num_blocks, self.kv_cache_bytes
        _require(
            blocks is None or kv is None,
            f"num_blocks ({blocks}) and kv_cache_bytes ({kv}) both size the KV cache; give one",
        )


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits on images and videos, and where they may be fetched from."""

    images_per_prompt: int = 16
    videos_per_prompt: int = 4
    max_pixels: int = 64_000_000  # per image, checked before decoding
    max_request_pixels: int = 256_000_000  # of all images and frames of a request; 3 bytes each
    max_bytes: int = 32 << 20  # encoded, per image
    max_video_bytes: int = 256 << 20
    max_frames: int = 768  # sampled video frames
    fetch_timeout: float = 10.0  # seconds to fetch one remote image, redirects included
    max_redirects: int = 3
    allowed_domains: tuple[str, ...] | None = None  # None: any public host; (): no remote media
    allowed_local_path: Path | None = None  # None: no file: URLs
    allow_private_addresses: bool = False  # for tests and closed networks

    def __post_init__(self) -> None:
        _check_seconds(self, ("fetch_timeout",))
        counts = ("images_per_prompt", "videos_per_prompt", "max_redirects")
        _check_integers(self, {**dict.fromkeys(counts, 0), "max_frames": 2})
        _check_integers(
            self, dict.fromkeys(("max_pixels", "max_request_pixels", "max_bytes", "max_video_bytes"), 1)
        )


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the API server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    served_model_names: tuple[str, ...] = ()  # empty: the checkpoint's name
    max_body_bytes: int = 64 << 20
    read_timeout: float = 60.0  # seconds for the headers, and then for the body, to arrive
    request_timeout: float = 600.0  # seconds from arrival to the last token
    shutdown_timeout: float = 30.0  # seconds for running requests to finish after SIGTERM
    slow_request_seconds: float = 30.0  # slower requests are logged with their stages; 0: never
    max_choices: int = 16  # limit of `n`
    media: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        _check_seconds(self, ("read_timeout", "request_timeout", "shutdown_timeout"))
        slow = self.slow_request_seconds
        _require(0 <= slow < float("inf"), f"slow_request_seconds is {slow}; use 0 (off) or more")
        _check_integers(self, {"port": 0, "max_body_bytes": 1, "max_choices": 1})
        _require(0 <= self.port <= 65535, f"port is {self.port}; it must be 0 to 65535")
        _require(all(self.api_keys), "an API key is empty; remove it or give it a value")
