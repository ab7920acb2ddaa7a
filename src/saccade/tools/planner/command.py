"""`saccade plan`: capacity and expected latencies of a model on a machine. It imports no torch and downloads
nothing: a model is a folder, a config.json, or explicit numbers."""

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from saccade.config import GIB, VisionCache, check_fields, option_field
from saccade.encoder.partial_views import segment_layers
from saccade.engine.cost_prior import CHIPS, H200, ModelSize, coefficients, read_model_size
from saccade.errors import ConfigError
from saccade.kv_cache.pool_sizing import KVCacheOptions, KVDtype, VisionScope
from saccade.scheduler.cost_model import Coefficients, CostModel
from saccade.scheduler.policy import UNLIMITED, SchedulerConfig
from saccade.tools.planner.report import MemoryBudget, PlanReport, divide_pool, fit_kind
from saccade.tools.planner.simulator import SimulatedMachine, SimulationResult, Simulator
from saccade.tools.planner.traffic import TrafficKind, VisionSizes, arrivals, parse_kind
from saccade.worker.buckets import PREFILL_TOKENS

# 16 text requests and 6 images a second, as in `saccade bench mixed_load`.
DEFAULT_TRAFFIC = (
    "text:rate=16,prompt=130,output=64",
    "image:rate=6,prompt=64,image=1024x1024,output=64",
)
EMBEDDED = Path(__file__).parents[2] / "embedded"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    model: str | None = option_field(None, "A checkpoint folder or a config.json.")
    layers: int | None = option_field(None, "Without MODEL: decoder layers.")
    kv_heads: int | None = option_field(None, "Without MODEL: heads of K and V.")
    head_dim: int | None = option_field(None, "Without MODEL: values per head. [default: 128]")
    heads: int | None = option_field(None, "Without MODEL: query heads. [default: 8 per KV head]")
    hidden: int | None = option_field(None, "Without MODEL: width. [default: heads x head dim]")
    weight_bytes: int | None = option_field(None, "Size of the weights. [default: from MODEL]", size=True)
    value_bytes: int = option_field(2, "Bytes of a weight and of a K or V value: 2 for bf16.")
    memory: int = option_field(139 * GIB, "Of the device; the default is an H200's.", size=True)
    gpu_memory_utilization: float = option_field(0.9, "Share of the memory to use.")
    kv_cache_bytes: int | None = option_field(
        None, "Size of the KV pool. [default: what weights, features and workspace leave]", size=True
    )
    vision_cache: str = option_field("gpu=2GiB", "gpu=SIZE, for image features kept for reuse.")
    max_num_seqs: int = option_field(256, "Most sequences computed together.")
    max_num_batched_tokens: int = option_field(8192, "Most tokens in one step.")
    max_model_len: int = option_field(32768, "Longest prompt + answer in tokens.", at_least=2)
    block_size: int = option_field(16, "Tokens per KV block.")
    itl_target: float = option_field(11.0, "Milliseconds a step may take while answers stream; 0: any.")
    prefix_caching: bool = option_field(True, "Reuse the KV of equal prompt prefixes.")
    kv_cache_dtype: KVDtype = option_field("auto", "Of K and V: auto (as --value-bytes), fp8 or int8.")
    kv_vision_dtype: KVDtype = option_field(
        "auto", "The same for the blocks of images only, which then have their own pool."
    )
    kv_vision_share: float | None = option_field(
        None, "Share of the KV cache for that pool. [default: none, or 0.5]"
    )
    kv_vision_views: VisionScope | None = option_field(
        None, "Views whose blocks go there: all, or global. [default: all]"
    )
    swap_bytes: int = option_field(
        4 * GIB, "Host memory for the KV of preempted requests; 0: recompute.", size=True, at_least=0
    )
    traffic: tuple[str, ...] = option_field(
        DEFAULT_TRAFFIC,
        "A kind of request, NAME:key=value,... with the keys rate (per second), prompt, output "
        "(tokens), shared (leading prompt tokens that all of the kind share), image=WxH, video=WxH, "
        "frames, images (per request), view_tokens (instead of a size), distinct (number of different"
        " images), priority. Repeat the option.",
        metavar="KIND",
    )
    seconds: float = option_field(60.0, "Of simulated traffic; 0: only compute what fits.")
    costs: str = option_field(
        "cuda",
        "What a step takes: `cuda` (peak rates of an H200: a lower bound), `cpu`, or a JSON file of "
        "measured coefficients in ms, as `--json` prints them under costs_ms.",
    )
    seed: int = option_field(0, "Of the arrivals.", at_least=0)
    json: bool = option_field(False, "Print everything as JSON.")

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("seconds", "itl_target"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; use 0 or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it is a share, 0 to 1"
            )
        cache = VisionCache.parse(self.vision_cache)
        if cache.host or cache.disk or cache.ttl:
            raise ConfigError(f"vision_cache is {self.vision_cache}; a plan takes gpu=SIZE only")
        self.kv_options()
        self._check_model()

    @property
    def feature_bytes(self) -> int:
        gpu = VisionCache.parse(self.vision_cache).gpu
        return 2 * GIB if gpu is None else gpu

    def kv_options(self) -> KVCacheOptions:
        return KVCacheOptions(
            cache_dtype=self.kv_cache_dtype,
            vision_dtype=self.kv_vision_dtype,
            vision_share=self.kv_vision_share,
            vision_views=self.kv_vision_views,
        )

    def _check_model(self) -> None:
        """A model is either named or described by numbers."""
        missing = [name for name in ("layers", "kv_heads", "weight_bytes") if getattr(self, name) is None]
        if self.model is None and missing:
            option = missing[0].replace("_", "-")
            raise ConfigError(f"give a MODEL folder, or its numbers: --{option} is missing")
        given = [
            name for name in ("layers", "kv_heads", "head_dim", "heads", "hidden") if getattr(self, name)
        ]
        if self.model is not None and given:
            option = given[0].replace("_", "-")
            raise ConfigError(f"MODEL already gives --{option}; leave out one of them")


def run(options: PlanOptions) -> int:
    """Returns the exit status."""
    report = make_report(options)
    if options.json:
        json.dump(report.as_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        report.show(Console())
    return 0


def make_report(options: PlanOptions) -> PlanReport:
    network, vision = _model(options)
    kinds = tuple(parse_kind(text) for text in options.traffic)
    _check_names(kinds)
    padded = () if options.costs == "cpu" else PREFILL_TOKENS  # sizes of the captured steps
    limits = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_step_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        max_encode_patches=4 * max(options.max_num_batched_tokens, 4096),  # as in engine/memory.py
        max_queue=1 << 30,
        itl_target=options.itl_target or None,
        encode_layers=max(network.vision_depth, 1),
        encode_unit=segment_layers(network.vision_depth),
        stream_tokens=padded[-1] if padded else UNLIMITED,
    )
    memory = MemoryBudget(
        options.memory, options.gpu_memory_utilization, options.feature_bytes, options.kv_cache_bytes
    )
    pool_bytes = memory.pool_bytes(network)
    block_bytes = network.kv_bytes * limits.block_size
    kv = options.kv_options()
    shares = divide_pool(network, limits, pool_bytes, kv)
    costs, source = _costs(options, network)
    fits = [fit_kind(kind, network, vision, limits, pool_bytes, kv) for kind in kinds]
    result: SimulationResult | None = None
    if options.seconds:
        machine = SimulatedMachine(
            limits=limits,
            blocks=shares.blocks,
            vision=shares.vision,
            roles=kv.roles,
            feature_budget=options.feature_bytes,
            feature_bytes=4 * network.hidden * network.value_bytes,  # an embedding and 3 deepstack levels
            truth=CostModel(costs, learning=False, sizes=padded),
            believed=CostModel(costs, sizes=padded),
            prefix_caching=options.prefix_caching,
            swap_slots=options.swap_bytes // block_bytes,
            swap_seconds=block_bytes / CHIPS.get(options.costs, H200).link,
        )
        result = Simulator(machine).run(arrivals(kinds, vision, options.seed, seconds=options.seconds))
    return PlanReport(network, pool_bytes, shares, costs, source, fits, result)


def _check_names(kinds: tuple[TrafficKind, ...]) -> None:
    names = [kind.name for kind in kinds]
    if len(set(names)) != len(names):
        raise ConfigError(f"two kinds of traffic have the same name; they are {', '.join(names)}")


def _model(options: PlanOptions) -> tuple[ModelSize, VisionSizes]:
    """From the config of MODEL, or from the given numbers."""
    if options.model is not None:
        config = _read_config(options.model)
        network = read_model_size(config, options.value_bytes, small=options.kv_cache_dtype != "auto")
        if options.weight_bytes is not None:
            decoder = options.weight_bytes // options.value_bytes - network.vision_parameters
            network = replace(network, parameters=max(decoder, 1))
        tower = config.get("vision_config") or {}
        sizes = {"patch": "patch_size", "merge": "spatial_merge_size", "frames": "temporal_patch_size"}
        return network, VisionSizes(**{name: tower[key] for name, key in sizes.items() if key in tower})
    layers, kv_heads = options.layers or 0, options.kv_heads or 0
    heads, head_dim = options.heads or 8 * kv_heads, options.head_dim or 128
    network = ModelSize(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=options.hidden or heads * head_dim,
        vocab=128_000,
        parameters=(options.weight_bytes or 0) // options.value_bytes,
        value_bytes=options.value_bytes,
        vision_depth=27,  # the tower of Qwen3-VL
        vision_hidden=1152,
        vision_parameters=27 * (4 * 1152 * 1152 + 2 * 1152 * 4304),
        quantized_kv=options.kv_cache_dtype != "auto",
    )
    return network, VisionSizes()


def _read_config(model: str) -> dict[str, Any]:
    path = EMBEDDED if model == "embedded" else Path(model).expanduser()
    return _read_json(path / "config.json" if path.is_dir() else path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; an object is needed")
    return value


def _costs(options: PlanOptions, network: ModelSize) -> tuple[Coefficients, str]:
    if options.costs in CHIPS:
        chip = CHIPS[options.costs]
        note = "'s peak rates, a lower bound" if chip is H200 else ", an order of magnitude"
        return coefficients(network, chip), chip.name + note
    value = _read_json(Path(options.costs).expanduser())
    given = value.get("costs_ms", value)
    names = {one.name for one in fields(Coefficients)}
    if not isinstance(given, dict) or set(given) != names:
        raise ConfigError(f"{options.costs} must give exactly the costs {', '.join(sorted(names))}")
    return Coefficients(**given), f"measured, {options.costs}"
