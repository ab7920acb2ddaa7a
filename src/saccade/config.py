"""Options of the engine and of the server: frozen, validated once. None means: decided at startup."""

from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import KVCacheOptions, KVDtype, VisionScope
from saccade.quantization.stages import parse_quantization

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Kernels = Literal["auto", "torch", "triton"]
Switch = Literal["auto", "on", "off"]
Tuning = Literal["cached", "auto", "off"]
ReasoningParserName = Literal["auto", "none", "think", "mistral", "gemma"]
ToolParserName = Literal["auto", "none", "hermes", "qwen-xml", "llama3", "mistral", "gemma"]

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


def size_text(size: int) -> str:
    """The form `parse_size` reads, in the largest unit that divides it."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size % _UNITS[unit.lower()] == 0), "")
    return f"{size // _UNITS[unit.lower()]}{unit}" if unit else str(size)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def option_field(default: Any, help_text: str = "", **details: Any) -> Any:
    """A field; with a help text it is also a command line option.

    details: `at_least` of an integer; `seconds` that must be positive; `size` in bytes, written as 2GiB;
    `flag` and `metavar` of the command line.
    """
    return field(default=default, metadata={"help": help_text, **details})


def field_type(one: Field[Any]) -> tuple[Any, bool]:
    """The type of a field without None, and whether it may be None."""
    inner = [kind for kind in get_args(one.type) if kind is not NoneType]
    optional = NoneType in get_args(one.type)
    return (inner[0] if optional else one.type), optional


def check_fields(config: Any) -> None:
    for one in fields(config):
        name, value, details = one.name, getattr(config, one.name), one.metadata
        kind, optional = field_type(one)
        if value is None and optional:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is bool:
            _require(isinstance(value, bool), f"{name} is {value!r}; it is true or false")
        elif get_origin(kind) is Literal:
            choices = get_args(kind)
            _require(value in choices, f"{name} is {value!r}; choose one of {', '.join(choices)}")
        elif details.get("seconds"):
            positive = number and 0 < value < float("inf")
            _require(positive, f"{name} is {value!r} seconds; it must be positive")
        elif kind is int:
            low = details.get("at_least", 1)
            enough = number and isinstance(value, int) and value >= low
            _require(enough, f"{name} is {value!r}; it must be an integer of at least {low}")


@dataclass(frozen=True, kw_only=True)
class VisionCache:
    """Sizes in bytes of the encoder cache's tiers; 0 is off."""

    gpu: int | None = option_field(
        None, at_least=0
    )  # of the device, also of a CPU; None: 2 GiB on cuda, 256 MiB on cpu
    host: int = option_field(0, at_least=0)  # host memory, pinned on cuda
    disk: int = option_field(0, at_least=0)  # files in `dir`
    dir: str | None = None  # a folder; several servers may share it
    ttl: float | None = option_field(None, seconds=True)  # unused entries are evicted after it; None: never

    def __post_init__(self) -> None:
        check_fields(self)
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
    device: Device = option_field("auto", "Device.")
    dtype: Dtype = option_field(
        "auto", "Type of weights and KV cache. auto: the checkpoint's on a GPU, float32 on a CPU."
    )
    load_format: LoadFormat = option_field(
        "auto", "dummy: random weights of the model's shapes, to measure speed without its weights."
    )
    max_model_len: int | None = option_field(
        None, "Context length, prompt and answer. [default: the checkpoint's]", at_least=2
    )
    max_num_seqs: int = option_field(256, "Most sequences in one step.")
    max_num_batched_tokens: int | None = option_field(
        None, "Most tokens in one step. [default: 8192 on a GPU, 2048 on a CPU]"
    )
    max_queue: int = option_field(4096, "Most waiting requests; further ones are refused.")
    max_queue_bytes: int = option_field(
        8 * GIB, "Most bytes of pixels of unfinished requests; further ones are refused.", size=True
    )
    block_size: int = option_field(16, "Tokens per KV block.")
    num_blocks: int | None = option_field(None, "KV blocks. [default: from the available memory]")
    gpu_memory_utilization: float = option_field(
        0.9, "Share of the GPU's memory for weights, KV cache and encoder cache."
    )
    kv_cache_bytes: int | None = option_field(
        None, "Size of the KV cache. [default: what is left; 1GiB on a CPU]", size=True
    )
    kv_cache_dtype: KVDtype = option_field(
        "auto",
        "Type of the KV cache. fp8 and int8 take half the memory and change answers slightly."
        " auto: as --dtype.",
    )
    kv_vision_dtype: KVDtype = option_field(
        "auto", "The same for the KV blocks of images only, which get their own pool."
    )
    kv_vision_share: float | None = option_field(
        None,
        "Share of the KV cache for a separate pool of image blocks. [default: no separate pool; 0.5 if"
        " another --kv-vision option asks for one]",
        metavar="SHARE",
    )
    kv_vision_views: VisionScope | None = option_field(
        None, "Images whose blocks go to that pool: all, or only those below full detail. [default: all]"
    )
    vision_cache: VisionCache = option_field(
        VisionCache(),
        "Encoder cache sizes: any of gpu=8GiB,host=32GiB,disk=100GiB,dir=PATH,ttl=SECONDS; a size of 0"
        " is off. On a CPU, gpu means its memory. [default: gpu=2GiB; gpu=256MiB on a CPU]",
        metavar="TIERS",
    )
    prefix_caching: bool = option_field(True, "Reuse the KV cache of equal prefixes.")
    pin_prefix: tuple[str, ...] = option_field(
        (),
        "A text file with a system prompt whose KV blocks are never evicted, for any tenant (repeat the"
        " option).",
        metavar="FILE",
    )
    pinned_prefix_bytes: int = option_field(
        256 << 20,
        "Most KV cache that pinned system prompts may take per tenant.",
        size=True,
        at_least=0,
    )
    swap_bytes: int | None = option_field(
        None,
        "Host memory for the KV blocks of preempted sequences; 0: they are recomputed."
        " [default: 4GiB on a GPU, 0 on a CPU]",
        size=True,
        at_least=0,
    )
    overlap: bool | None = option_field(None, "Plan the next step while one runs. [default: on a GPU]")
    itl_target: float | None = option_field(
        None,
        "Inter-token latency target: prefill and encoding of other requests are sliced so that a step"
        " keeps it; three times as long while prompts wait; 0: no target. [default: 11 on a GPU, 0 on a CPU]",
        metavar="MS",
    )
    quantization: str | None = option_field(
        None,
        "Quantise a 16-bit checkpoint while loading: fp8, int8 or int4, or by stage, such as "
        "decoder=fp8,vision=none,head=none.",
        metavar="SCHEME",
    )
    kernels: Kernels = option_field("auto", "auto: Triton kernels where they measured faster, else torch.")
    graphs: Switch = option_field(
        "auto", "CUDA graphs for decode steps and short prompts. auto: on a GPU with Triton attention."
    )
    early_launch: Switch = option_field(
        "auto", "Programmatic dependent launch of kernels. auto: with CUDA graphs on a Hopper GPU or newer."
    )
    tuning: Tuning = option_field(
        "cached",
        "Launch parameters of products whose shapes no table names. cached: what `saccade tune` found on this"
        " machine, else a model's choice; auto: search them for at most 10 seconds of a start and keep them;"
        " off: shipped tables and the model only.",
    )
    deterministic: bool = option_field(False, "Make a request's tokens independent of the batch; slower.")
    seed: int = option_field(0, "Base seed for requests that set none.", at_least=-(1 << 63))
    step_log: str | None = option_field(
        None,
        "Write a line of JSON per step: its contents, its predicted and its measured time.",
        metavar="FILE",
    )

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
        check_fields(self)
        cache = self.vision_cache
        _require(isinstance(cache, VisionCache), f"vision_cache is {cache!r}; give a VisionCache")
        _require(self.block_size <= 1024, f"block_size is {self.block_size}; use 1 to 1024")
        share = self.gpu_memory_utilization
        _require(
            0 < share <= 1, f"gpu_memory_utilization is {share}; use a share of the memory, above 0 up to 1"
        )
        texts: object = self.pin_prefix
        _require(
            isinstance(texts, tuple) and all(isinstance(text, str) and text.strip() for text in texts),
            f"pin_prefix is {str(texts)[:60]!r}; use a tuple of non-empty texts",
        )
        _require(self.prefix_caching or not texts, "pin_prefix needs prefix_caching; leave out one of them")
        target = self.itl_target
        _require(target is None or 0 <= target < float("inf"), f"itl_target is {target} ms; use 0 or more")
        self.kv_cache_options()
        if self.quantization is not None:
            parse_quantization(self.quantization)
        blocks, kv = self.num_blocks, self.kv_cache_bytes
        _require(
            blocks is None or kv is None,
            f"num_blocks ({blocks}) and kv_cache_bytes ({kv}) both size the KV cache; give one",
        )


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits on images and videos, and where they may be fetched from."""

    images_per_prompt: int = option_field(16, at_least=0)
    videos_per_prompt: int = option_field(4, at_least=0)
    max_pixels: int = option_field(
        64_000_000, "Larger images are refused undecoded.", flag="--max-image-pixels"
    )
    max_request_pixels: int = 256_000_000  # of all images and frames of a request; 3 bytes each
    max_bytes: int = 32 << 20  # encoded, per image
    max_video_bytes: int = 256 << 20
    max_frames: int = option_field(768, at_least=2)  # sampled video frames
    max_redirects: int = option_field(3, at_least=0)
    # None: any public host; (): no remote media
    allowed_domains: tuple[str, ...] | None = option_field(
        None,
        "Fetch images only from these hosts (repeat the option). [default: any public host]",
        flag="--allowed-media-domains",
        metavar="HOST",
    )
    allowed_local_path: Path | None = option_field(
        None, "Allow file: URLs below this folder. [default: none]", flag="--allowed-local-media-path"
    )
    fetch_timeout: float = option_field(
        10.0, "Seconds to fetch one remote image.", flag="--media-fetch-timeout", seconds=True
    )
    allow_private_addresses: bool = False  # for tests and closed networks

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the API server."""

    host: str = option_field("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option_field(8000, "Port to listen on; 0 picks a free one.", at_least=0)
    api_keys: tuple[str, ...] = option_field(
        (), "Require one of these keys (repeat the option).", flag="--api-key", metavar="KEY"
    )
    # Empty: the checkpoint's name.
    served_model_names: tuple[str, ...] = option_field(
        (), "Names clients may use for the model.", flag="--served-model-name", metavar="NAME"
    )
    max_body_bytes: int = option_field(64 << 20, "Largest request body.", size=True)
    request_timeout: float = option_field(600.0, "Seconds from arrival to the last token.", seconds=True)
    read_timeout: float = option_field(60.0, "Seconds for a request to arrive.", seconds=True)
    slow_request_seconds: float = option_field(
        30.0, "Log the time per stage of requests that take longer; 0: never."
    )
    shutdown_timeout: float = option_field(
        30.0, "Seconds to finish running requests after SIGTERM.", seconds=True
    )
    reasoning_parser: ReasoningParserName = option_field(
        "auto",
        "How answers mark reasoning. auto: from the checkpoint; none: it stays in the text.",
    )
    tool_parser: ToolParserName = option_field(
        "auto", "How answers write tool calls. auto: from the chat template; none: tools are refused."
    )
    max_choices: int = 16  # limit of `n`
    media: MediaLimits = MediaLimits()

    def __post_init__(self) -> None:
        check_fields(self)
        slow = self.slow_request_seconds
        _require(0 <= slow < float("inf"), f"slow_request_seconds is {slow}; use 0 (off) or more")
        _require(0 <= self.port <= 65535, f"port is {self.port}; it must be 0 to 65535")
        _require(all(self.api_keys), "an API key is empty; remove it or give it a value")
