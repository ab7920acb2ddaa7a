"""Builds the parts of an engine core from its options, in the order in which their sizes become known."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.config import EngineConfig
from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.cache.transfer import build_encoder_cache
from saccade.encoder.encoder_graphs import build_encoder_graphs
from saccade.encoder.encoder_runner import EncoderRunner, PartialEncoding
from saccade.encoder.partial_views import PartialViews, segment_layers
from saccade.engine.cost_prior import (
    CHIPS,
    CPU,
    Chip,
    ModelSize,
    coefficients,
    early_exit_tokens,
    read_model_size,
)
from saccade.engine.ipc import EngineInfo
from saccade.engine.memory import budget, resolve_device, resolve_dtype, side_width
from saccade.errors import ConfigError
from saccade.executor.executor import SingleProcessExecutor
from saccade.host.malloc import limit_onednn_cache
from saccade.inputs.chat_template import ChatTemplate
from saccade.inputs.tokenizer import Tokenizer
from saccade.kernels.attention.quantized_kv import FORMATS
from saccade.kernels.cuda_graph import CudaRecorder, PlainRecorder
from saccade.kernels.dispatch import TORCH
from saccade.kernels.gemm.skinny import MOST_ROWS
from saccade.kernels.gemm.tuning_model import LIMITS
from saccade.kernels.gemm.tuning_search import entries
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.groups import single_group
from saccade.kv_cache.pages import Pages
from saccade.kv_cache.prefix_cache import PinnedPrefixes, PrefixCache
from saccade.kv_cache.swap_copies import HostPages
from saccade.kv_cache.swap_space import SwapSpace
from saccade.lod.checkpoint_views import checkpoint_views
from saccade.lod.controller import LodController
from saccade.lod.image_maps import build_image_map_runner
from saccade.lod.relevance_pass import RelevancePass, layers_needed
from saccade.lod.scorers import RelevanceHeadWeights
from saccade.models.loader import load_model, weight_bytes
from saccade.quantization.online import online_scheme, stage_schemes
from saccade.quantization.stages import NONE, parse_quantization
from saccade.sampling.sampler import Sampler
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.kv_manager import Caches
from saccade.scheduler.policy import UNLIMITED, EarlyExit, SchedulerConfig
from saccade.scheduler.scheduler import Scheduler
from saccade.worker.buckets import DECODES, PREFILL_TOKENS
from saccade.worker.cuda_graphs import StepGraphCache
from saccade.worker.encoder_warmup import TowerWarmup, likely_tower_shapes, warm_up_encoder
from saccade.worker.execution_mode import resolve_execution_mode
from saccade.worker.graph_step import GraphStep
from saccade.worker.input_batch import InputBatch, Slots
from saccade.worker.model_runner import ModelRunner, VisionParts
from saccade.worker.product_tuning import SECONDS, can_tune, load_tunings, model_tasks, tune, untuned
from saccade.worker.warmup import IdleWarmup, WarmupStep, compile_kernels, compilers

log = logging.getLogger(__name__)

SLOW_START = 10.0  # seconds; a start that takes longer logs its parts
# ms, on cuda: beside 6 images a second the 99th percentile of an H200's inter-token latency is then about 1.5
# times that beside texts alone. A CPU's steps are longer than any useful target.
DEFAULT_ITL_TARGET = 11.0


@dataclass(frozen=True)
class EngineParts:
    info: EngineInfo
    scheduler: Scheduler
    executor: SingleProcessExecutor
    encoder_cache: EncoderCache[Tensor]
    overlap: bool
    seconds: Mapping[str, float]  # of the start, by part


def build_engine(config: EngineConfig, checkpoint: Checkpoint, *, progress: bool) -> EngineParts:
    device = resolve_device(config)
    if device.type == "cpu":
        limit_onednn_cache()
        return EngineBuilder(config, checkpoint, device, progress=progress).build()
    with compilers(wanted=config.kernels != TORCH):
        return EngineBuilder(config, checkpoint, device, progress=progress).build()


class StartTimes:
    """How long each part of a start takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def note(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return f"{sum(self.seconds.values()):.1f} s: " + ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in self.seconds.items()
        )


class EngineBuilder:
    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, device: torch.device, *, progress: bool
    ) -> None:
        """Loads the model, compiles its kernels and allocates the caches."""
        self._config, self._checkpoint, self._device, self._progress = config, checkpoint, device, progress
        self._views = checkpoint_views(checkpoint)
        self._dtype = dtype = resolve_dtype(config, checkpoint, device)
        self._times = StartTimes()
        tunings = load_tunings(device, cached=config.tuning != "off")
        self._execution = resolve_execution_mode(config, device, dtype).with_tunings(tunings)
        online = config.quantization and online_scheme(parse_quantization(config.quantization))
        self._model = load_model(
            checkpoint, device, dtype, config.load_format, progress, self._execution.mode, online or None
        )
        self._times.note("weights")
        schemes = stage_schemes(self._model)
        if set(schemes.values()) != {NONE}:
            named = ", ".join(f"{stage} {scheme}" for stage, scheme in schemes.items())
            log.info("%.2f GB of weights; quantisation: %s", weight_bytes(self._model) / 1e9, named)
        if config.tuning == "auto" and can_tune(device, self._execution.mode):
            self._tune_products()
        if device.type == "cuda":
            image, seqs, compact = checkpoint.image, config.max_num_seqs, self._compact_dtype
            compile_kernels(self._model, image, device, config.block_size, seqs, compact)
            self._times.note("kernels")
        self._budget = budget(config, checkpoint, self._model, device, dtype, graphs=self._execution.graphs)
        self._times.note("workspace")
        self._encoder_cache = build_encoder_cache(config, self._budget.feature_bytes, self._model, device)
        self._partial_views: PartialViews[PartialEncoding] = PartialViews(self._budget.encode_patches)
        self._pages = self._allocate_pages()
        self._host_pages: HostPages | None = None
        if self._budget.swap_slots:
            self._host_pages = HostPages(self._pages, self._budget.swap_slots)

    def _tune_products(self) -> None:
        """For shapes that no table names; before the KV pool takes the memory."""
        mode, pdl = self._execution.mode, self._execution.pdl
        tasks = untuned(model_tasks(self._model, self._config.max_num_seqs), mode.tunings)
        found = list(tune(tasks, mode.tunings, self._device, SECONDS, pdl=pdl)) if tasks else []
        if tasks:
            log.info(
                "launch parameters of %d of %d products searched; see `saccade tune`", len(found), len(tasks)
            )
        self._execution = self._execution.with_tunings(mode.tunings.extended(entries(found)))
        self._model.mode = self._execution.mode
        self._times.note("tuning")

    def build(self) -> EngineParts:
        scheduler = self._build_scheduler()
        self._times.note("memory")
        executor = self._build_executor()
        seconds, overlap = self._times.seconds, self._config.overlap
        level = logging.INFO if sum(seconds.values()) > SLOW_START else logging.DEBUG
        log.log(level, "engine started in %s", self._times)
        return EngineParts(
            info=self._info(),
            scheduler=scheduler,
            executor=executor,
            encoder_cache=self._encoder_cache,
            overlap=overlap if overlap is not None else self._device.type == "cuda",
            seconds=seconds,
        )

    def _build_scheduler(self) -> Scheduler:
        config, shares = self._config, self._budget
        small = config.kv_cache_dtype != "auto"
        size = read_model_size(self._checkpoint.config, self._dtype.itemsize, small=small)
        chip = CHIPS.get(self._device.type, CPU)
        # With a relevance head, prefills with views never run as CUDA graphs: smaller chunks would gain
        # nothing.
        sizes = PREFILL_TOKENS if self._execution.graphs and self._views.head is None else ()
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=shares.step_tokens,
            max_model_len=shares.max_model_len,
            block_size=config.block_size,
            max_encode_patches=shares.encode_patches,
            max_queue=config.max_queue,
            max_queue_bytes=config.max_queue_bytes,
            seed=config.seed,
            itl_target=self._itl_target,
            encode_layers=max(size.vision_depth, 1),
            encode_unit=segment_layers(size.vision_depth) if self._execution.tower_graphs else 1,
            stream_tokens=sizes[-1] if sizes else UNLIMITED,
            early_exit=self._early_exit(size, chip),
        )
        pool = BlockPool(shares.blocks, shares.kv.vision, config.kv_cache_options().roles)
        prefix = None
        if config.prefix_caching:
            prefix = PrefixCache(pool, config.block_size, self._pinned_prefixes(size))
        cost = CostModel(coefficients(size, chip), sizes=sizes)
        caches = Caches(pool, prefix, self._encoder_cache, self._partial_views, self._build_swap_space())
        return Scheduler(limits, caches, cost, host_decisions=LodController(self._views.rule))

    def _early_exit(self, size: ModelSize, chip: Chip) -> EarlyExit:
        share = layers_needed(self._views.head, size.layers) / size.layers
        return EarlyExit(early_exit_tokens(size, chip), share)

    def _pinned_prefixes(self, size: ModelSize) -> PinnedPrefixes:
        """System prompts that are never evicted, in what a request of the longest context leaves of the
        pool."""
        config, shares = self._config, self._budget
        prefixes = pinned_tokens(self._checkpoint, config.pin_prefix)
        room = shares.kv.text - -(-shares.max_model_len // config.block_size)
        block_bytes = config.block_size * size.kv_bytes
        validate_pinned_prefixes(prefixes, config.block_size, block_bytes, config.pinned_prefix_bytes, room)
        return PinnedPrefixes(prefixes, max(room, 0))

    def _build_swap_space(self) -> SwapSpace | None:
        host = self._host_pages
        if host is None:
            return None
        rate = host.measure_rate()
        log.info("%d KV blocks of host memory for swapping, at %.1f GB/s", host.slots, rate / 1e9)
        return SwapSpace(host.slots, 2e3 * host.slot_bytes / rate)

    @property
    def _itl_target(self) -> float | None:
        if self._config.itl_target is None:
            return DEFAULT_ITL_TARGET if self._device.type == "cuda" else None
        return self._config.itl_target or None

    def _build_executor(self) -> SingleProcessExecutor:
        config, model, device = self._config, self._model, self._device
        vision, tower_warmup = self._build_vision()
        slots = Slots(config.max_num_seqs, -(-self._budget.max_model_len // config.block_size), device)
        sampler = Sampler(config.max_num_seqs, model.vocab_size, device, self._execution.mode)
        graphs = None
        if self._execution.graphs:
            graphs = self._build_graphs(slots, sampler, None if vision is None else vision.relevance)
            self._times.note("steps")
        runner = ModelRunner(model, InputBatch(self._pages, slots), sampler, vision, graphs, self._host_pages)
        steps: list[WarmupStep] = []
        # Only on a GPU: reference implementations would compute, and write, for real.
        if graphs is not None and device.type == "cuda":
            steps = _warmup_steps(config.max_num_seqs)
            runner.compile_step(steps[0].scheduled(runner.max_context), draws=False)
            self._times.note("prompts")
        return SingleProcessExecutor(runner, IdleWarmup(runner, graphs, tower_warmup, steps))

    def _build_vision(self) -> tuple[VisionParts | None, TowerWarmup | None]:
        checkpoint, model, device = self._checkpoint, self._model, self._device
        processing = [one for one in (checkpoint.image, checkpoint.video) if one is not None]
        if model.vision is None or not processing:
            return None, None
        mode, use_graphs = self._execution.mode, self._execution.tower_graphs
        graphs = build_encoder_graphs(model.vision, device, self._dtype) if use_graphs else None
        encoder = EncoderRunner(model.vision, processing, device, self._dtype, self._partial_views, graphs)
        image_maps = build_image_map_runner(device, graphs=use_graphs, mode=mode)
        relevance = RelevancePass(model, self._pages, self._load_head(), encoder.upload, image_maps)
        self._encoder_cache.on_delete = partial(_forget_image, relevance, encoder)
        warmup = None
        if graphs is not None and device.type == "cuda" and checkpoint.image is not None:
            length = self._budget.max_model_len
            warm_up_encoder(encoder, checkpoint.image, length, progress=self._progress)
            shapes = likely_tower_shapes(
                checkpoint.image, self._views.rule, graphs, length, alone=mode.deterministic
            )
            warmup = TowerWarmup(graphs, shapes)
        self._times.note("images")
        return VisionParts(encoder, self._encoder_cache, relevance, model.vision.depth_levels), warmup

    def _load_head(self) -> RelevanceHeadWeights | None:
        head = self._views.head
        if head is None:
            return None
        dummy = self._config.load_format == "dummy"
        return RelevanceHeadWeights.load(
            self._checkpoint, head, self._model.hidden_size, self._device, dummy=dummy
        )

    def _build_graphs(
        self, slots: Slots, sampler: Sampler, relevance: RelevancePass | None
    ) -> StepGraphCache:
        step = GraphStep(
            self._model,
            self._pages,
            slots,
            sampler,
            pdl=self._execution.pdl,
            visual=relevance is None or not relevance.stores_view_vectors,
            tapped_layers=() if relevance is None else relevance.tapped_layers,
        )
        seqs, length = self._config.max_num_seqs, self._budget.max_model_len
        if self._device.type != "cuda":
            return StepGraphCache(step, PlainRecorder(), sampler, seqs, length, min_uses=1)
        graphs = StepGraphCache(step, CudaRecorder(self._device), sampler, seqs, length)
        with torch.inference_mode():
            graphs.warm_up(self._progress)
        return graphs

    @property
    def _compact_dtype(self) -> torch.dtype | None:
        """Of KV blocks in 8 bits, if there are any."""
        form = self._config.kv_cache_options().format
        return FORMATS[form] if form else None

    def _allocate_pages(self) -> Pages:
        shares = self._budget
        return Pages.allocate(
            single_group(self._model.kv_cache_groups, self._config.block_size),
            shares.blocks,
            self._device,
            shares.kv.compact,
            self._compact_dtype if shares.kv.compact else None,
            side_width(self._checkpoint, self._model),
            self._model.mode,
        )

    def _info(self) -> EngineInfo:
        return EngineInfo(
            model=self._checkpoint.name,
            max_model_len=self._budget.max_model_len,
            vocab_size=self._model.vocab_size,
            block_size=self._config.block_size,
            num_blocks=self._budget.blocks,
            max_num_seqs=self._config.max_num_seqs,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            weight_bytes=weight_bytes(self._model),
            quantization=stage_schemes(self._model),
        )


def _warmup_steps(max_seqs: int) -> list[WarmupStep]:
    """Eager steps: a lone prefill, prefills beside decodes, and short prefills, whose products have kernels
    of their own (those of more tokens: `warmup.SHORT`)."""
    beside = [WarmupStep(size) for size in DECODES if size < max_seqs]
    short = [WarmupStep(0, limit) for limit in LIMITS if 1 < limit <= MOST_ROWS]
    return [WarmupStep(0), *beside, *short]


def _forget_image(relevance: RelevancePass, encoder: EncoderRunner, content: bytes) -> None:
    relevance.forget_image(content)
    encoder.forget_image(content)


def pinned_tokens(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    """The common prefix of two conversations with the same system prompt."""
    if not texts:
        return []
    if checkpoint.chat_template is None:
        raise ConfigError("the model has no chat template, so no system prompts; leave out --pin-prefix")
    tokens = Tokenizer.load(checkpoint)
    template = ChatTemplate(checkpoint.chat_template, tokens, checkpoint.special_tokens)
    found = []
    for text in texts:
        one, other = (
            template.encode([{"role": "system", "content": text}, {"role": "user", "content": word}])
            for word in ("a", "b")
        )
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        found.append([token for token, _ in shared])
    return found


def validate_pinned_prefixes(
    prefixes: Sequence[Sequence[int]], block_size: int, block_bytes: int, budget: int, room: int
) -> None:
    """Raise unless each prefix fills a block, and all fit a tenant's `budget` (bytes) and the `room`
    (blocks)."""
    shortest = min(map(len, prefixes), default=block_size)
    if shortest < block_size:
        raise ConfigError(
            f"a prefix to pin has {shortest} tokens, and KV is kept by blocks of {block_size}; leave it out, "
            "lengthen it, or lower --block-size"
        )
    blocks = sum(len(prefix) // block_size for prefix in prefixes)
    tokens = sum(len(prefix) for prefix in prefixes)
    if blocks * block_bytes > budget:
        raise ConfigError(
            f"the prefixes to pin have {tokens} tokens, {blocks} KV blocks of {block_bytes} bytes, together "
            f"{blocks * block_bytes}; a tenant may pin {budget}; raise --pinned-prefix-bytes or shorten them"
        )
    if blocks > room:
        raise ConfigError(
            f"the prefixes to pin need {blocks} KV blocks; beside a request of the longest context there is "
            f"room for {max(room, 0)}; give the KV cache more memory or lower --max-model-len"
        )
