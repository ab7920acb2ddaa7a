"""Builds an engine's rooms from its options and wires them, in the order their sizes become known."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from saccade.checkpoint import Checkpoint
from saccade.config import EngineConfig
from saccade.encoder.cache.store import EncoderCache
from saccade.encoder.cache.transfer import build_encoder_cache
from saccade.encoder.encoder_graphs import EncoderGraphs, build_encoder_graphs
from saccade.encoder.encoder_runner import EncoderRunner, PartialEncoding
from saccade.encoder.partial_views import PartialViews, segment_layers
from saccade.engine.ipc import EngineInfo
from saccade.engine.memory import Budget, budget, resolve_device, resolve_dtype, side_width
from saccade.engine.model_size import read_network
from saccade.engine.pinned_prefixes import pinned_tokens
from saccade.host.malloc import limit_onednn_cache
from saccade.inputs.image_processor import ImageProcessor
from saccade.kernels.attention.quantized_kv import FORMATS
from saccade.kernels.cuda_graph import CudaRecorder, PlainRecorder
from saccade.kernels.dispatch import TORCH
from saccade.kernels.gemm.skinny import LIMITS, MOST_ROWS
from saccade.kv_cache.block_pool import BlockPool
from saccade.kv_cache.groups import single_group
from saccade.kv_cache.pages import Pages
from saccade.kv_cache.pinned_prefixes import PinnedPrefixes, validate_pinned_prefixes
from saccade.kv_cache.prefix_cache import PrefixCache
from saccade.kv_cache.swap_copies import HostPages
from saccade.kv_cache.swap_space import SwapSpace
from saccade.lod.checkpoint_views import checkpoint_views
from saccade.lod.controller import LodController
from saccade.lod.image_maps import captured_stills
from saccade.lod.relevance_pass import Head, Lookout, layers_needed
from saccade.models.interface import LanguageModel
from saccade.models.loader import load_model
from saccade.sampling.sampler import Sampler
from saccade.scheduler.cost_model import CostModel
from saccade.scheduler.cost_prior import (
    CHIPS,
    CPU,
    Chip,
    ModelSize,
    coefficients,
    copy_tokens,
    early_exit_tokens,
)
from saccade.scheduler.kv_manager import Caches
from saccade.scheduler.policy import UNLIMITED, EarlyExit, SchedulerConfig
from saccade.scheduler.scheduler import Scheduler
from saccade.worker.buckets import DECODES, TOKENS
from saccade.worker.compile_kernels import compile_first, compilers
from saccade.worker.cuda_graphs import Graphs
from saccade.worker.execution_mode import Way, resolve_way
from saccade.worker.graph_step import FixedStep
from saccade.worker.idle_warmup import Ahead, likely_shapes
from saccade.worker.input_batch import Batch
from saccade.worker.model_runner import Rehearsal, Runner
from saccade.worker.slots import DeviceRows
from saccade.worker.warmup import warm_pictures

log = logging.getLogger(__name__)

SLOW_START = 10.0  # seconds, from which on a start says what took how long
# ms, on cuda: an H200's tokens beside 6 pictures a second then take about 1.5 times what they take beside
# texts alone, at the 99th percentile. A CPU's steps are longer than any target worth having.
DEFAULT_ITL_TARGET = 11.0


@dataclass(frozen=True)
class Machine:
    info: EngineInfo
    scheduler: Scheduler
    runner: Runner
    store: EncoderCache[Tensor]
    overlap: bool
    seconds: Mapping[str, float]  # what making each part took


def build_machine(config: EngineConfig, checkpoint: Checkpoint, *, progress: bool) -> Machine:
    device = resolve_device(config)
    if device.type == "cpu":
        limit_onednn_cache()
        return _build(config, checkpoint, device, progress=progress)
    with compilers(wanted=config.kernels != TORCH):
        return _build(config, checkpoint, device, progress=progress)


def _build(config: EngineConfig, checkpoint: Checkpoint, device: torch.device, *, progress: bool) -> Machine:
    dtype = resolve_dtype(config, checkpoint, device)
    laps = Laps()
    way = resolve_way(config, device, dtype)
    model = load_model(checkpoint, device, dtype, config.load_format, progress, way.mode)
    laps.note("weights")
    if device.type == "cuda":
        small = _compact_dtype(config)
        compile_first(model, checkpoint.image, device, config.block_size, config.max_num_seqs, small)
        laps.note("kernels")
    shares = budget(config, checkpoint, model, device, dtype, graphs=way.graphs)
    laps.note("workspace")
    store = build_encoder_cache(config, shares.feature_bytes, model, device)
    unfinished: PartialViews[PartialEncoding] = PartialViews(shares.encode_patches)
    pages = _pages(config, checkpoint, model, shares, device, dtype)
    host = HostPages(pages, shares.swap_slots) if shares.swap_slots else None
    scheduler = _scheduler(config, checkpoint, shares, store, unfinished, host, device, dtype, way)
    laps.note("memory")
    made = Machine(
        info=_info(config, checkpoint, model, shares, device, dtype),
        scheduler=scheduler,
        runner=_runner(
            config, checkpoint, model, shares, store, unfinished, pages, host, way, progress, laps
        ),
        store=store,
        overlap=config.overlap if config.overlap is not None else device.type == "cuda",
        seconds=laps.seconds,
    )
    log.log(logging.INFO if sum(laps.seconds.values()) > SLOW_START else logging.DEBUG, "made in %s", laps)
    return made


class Laps:
    """How long each part of a start took."""

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


def _scheduler(
    config: EngineConfig,
    checkpoint: Checkpoint,
    shares: Budget,
    store: EncoderCache[Tensor],
    unfinished: PartialViews[PartialEncoding],
    host: HostPages | None,
    device: torch.device,
    dtype: torch.dtype,
    way: Way,
) -> Scheduler:
    network = read_network(checkpoint.config, dtype.itemsize, small=config.kv_cache_dtype != "auto")
    chip = CHIPS.get(device.type, CPU)
    # With a relevance head prompts with views are never captured: smaller pieces would gain nothing.
    sizes = TOKENS if way.graphs and checkpoint_views(checkpoint).head is None else ()
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=shares.step_tokens,
        max_model_len=shares.max_model_len,
        block_size=config.block_size,
        max_encode_patches=shares.encode_patches,
        max_queue=config.max_queue,
        max_queue_bytes=config.max_queue_bytes,
        seed=config.seed,
        itl_target=_itl_target(config, device),
        copy_tokens=copy_tokens(network, chip, config.block_size),
        encode_layers=max(network.vision_depth, 1),
        encode_unit=segment_layers(network.vision_depth) if way.tower else 1,
        stream_tokens=sizes[-1] if sizes else UNLIMITED,
        early_exit=_early_exit(checkpoint, network, chip),
    )
    pool = BlockPool(shares.blocks, shares.kv.vision, config.kv_cache_options().roles)
    prefix = None
    if config.prefix_caching:
        prefix = PrefixCache(pool, config.block_size, _pins(config, checkpoint, shares, network))
    cost = CostModel(coefficients(network, chip), sizes=sizes)
    caches = Caches(pool, prefix, store, unfinished, _swap_space(host))
    return Scheduler(limits, caches, cost, host_decisions=LodController(checkpoint_views(checkpoint).rule))


def _early_exit(checkpoint: Checkpoint, network: ModelSize, chip: Chip) -> EarlyExit:
    """Steps that stop after the last layer the relevance pass needs."""
    share = layers_needed(checkpoint_views(checkpoint).head, network.layers) / network.layers
    return EarlyExit(early_exit_tokens(network, chip), share)


def _pins(config: EngineConfig, checkpoint: Checkpoint, shares: Budget, network: ModelSize) -> PinnedPrefixes:
    """System prompts to be kept for good, in what a request of the longest context leaves of the pool."""
    prefixes = pinned_tokens(checkpoint, config.pin_prefix)
    room = shares.kv.text - -(-shares.max_model_len // config.block_size)
    block_bytes = config.block_size * network.kv_bytes
    validate_pinned_prefixes(prefixes, config.block_size, block_bytes, config.pinned_prefix_bytes, room)
    return PinnedPrefixes(prefixes, max(room, 0))


def _swap_space(host: HostPages | None) -> SwapSpace | None:
    if host is None:
        return None
    rate = host.measure_rate()
    log.info("%d KV blocks of host memory for swapping, at %.1f GB/s", host.slots, rate / 1e9)
    return SwapSpace(host.slots, 2e3 * host.slot_bytes / rate)


def _itl_target(config: EngineConfig, device: torch.device) -> float | None:
    if config.itl_target is None:
        return DEFAULT_ITL_TARGET if device.type == "cuda" else None
    return config.itl_target or None


def _runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: LanguageModel,
    shares: Budget,
    store: EncoderCache[Tensor],
    unfinished: PartialViews[PartialEncoding],
    pages: Pages,
    host: HostPages | None,
    way: Way,
    progress: bool,
    laps: Laps,
) -> Runner:
    device, dtype = pages.k.device, pages.k.dtype
    encoder, lookout, ahead = None, None, None
    processing = [one for one in (checkpoint.image, checkpoint.video) if one is not None]
    if model.vision is not None and processing:
        tower = build_encoder_graphs(model.vision, device, dtype) if way.tower else None
        encoder = EncoderRunner(model.vision, processing, device, dtype, unfinished, tower)
        head = _head(config, checkpoint, model, device)
        stills = captured_stills(device, graphs=way.tower, mode=way.mode)
        lookout = Lookout(model, pages, head, device, encoder.upload, stills)
        store.on_delete = partial(_forget, lookout, encoder)
        if tower is not None and device.type == "cuda" and checkpoint.image is not None:
            warm_pictures(encoder, checkpoint.image, shares.max_model_len, progress=progress)
            ahead = _ahead(checkpoint, checkpoint.image, tower, shares, way)
        laps.note("pictures")
    blocks_per_row = -(-shares.max_model_len // config.block_size)
    rows = DeviceRows(config.max_num_seqs, blocks_per_row, device)
    batch = Batch(pages, rows, device)
    sampler = Sampler(config.max_num_seqs, model.vocab_size, device, way.mode)
    captured = None
    if way.graphs:
        step = FixedStep(
            model,
            pages,
            rows,
            sampler,
            config.max_num_seqs,
            device,
            early=way.early,
            sees=lookout is None or not lookout.watches_views,
            watched=() if lookout is None else lookout.watched,
        )
        most, longest = config.max_num_seqs, shares.max_model_len
        if device.type == "cuda":
            graphs = Graphs(step, CudaRecorder(device), sampler, most, longest)
            with torch.inference_mode():
                graphs.warm(progress)
        else:
            graphs = Graphs(step, PlainRecorder(), sampler, most, longest, sightings=1)
        captured = step, graphs
        laps.note("steps")
    runner = Runner(model, encoder, store, rows, batch, sampler, captured, host, lookout, ahead)
    if captured is not None and device.type == "cuda":  # so that no twin computes, and writes, for real
        _rehearse(runner, config.max_num_seqs)
        laps.note("prompts")
    return runner


def _rehearse(runner: Runner, rows: int) -> None:
    """What ordinary steps launch: of a lone prompt now, for the first there is would wait for it, the rest by
    and by. Of few tokens too, which nothing is captured for at first: products of so many rows have kernels
    of their own (those of more are compiled before, `compile.SHORT`)."""
    alone = Rehearsal(0)
    runner.rehearse([alone], draws=False)
    beside = [Rehearsal(size) for size in DECODES if size < rows]
    short = [Rehearsal(0, limit) for limit in LIMITS if 1 < limit <= MOST_ROWS]
    runner.rehearsals = [alone, *beside, *short]


def _forget(lookout: Lookout, encoder: EncoderRunner, content: bytes) -> None:
    lookout.forget(content)
    encoder.forget_image(content)


def _ahead(
    checkpoint: Checkpoint, image: ImageProcessor, tower: EncoderGraphs, shares: Budget, way: Way
) -> Ahead:
    rule, alone = checkpoint_views(checkpoint).rule, way.mode.deterministic
    return Ahead(tower, likely_shapes(image, rule, tower, shares.max_model_len, alone=alone))


def _head(
    config: EngineConfig, checkpoint: Checkpoint, model: LanguageModel, device: torch.device
) -> Head | None:
    named = checkpoint_views(checkpoint).head
    if named is None:
        return None
    return Head.load(checkpoint, named, model.hidden_size, device, dummy=config.load_format == "dummy")


def _compact_dtype(config: EngineConfig) -> torch.dtype | None:
    """Of the blocks in 8 bits, if any are wished for."""
    form = config.kv_cache_options().format
    return FORMATS[form] if form else None


def _pages(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: LanguageModel,
    shares: Budget,
    device: torch.device,
    dtype: torch.dtype,
) -> Pages:
    return Pages.allocate(
        single_group(model.kv_cache_groups, config.block_size),
        shares.blocks,
        device,
        shares.kv.compact,
        _compact_dtype(config) if shares.kv.compact else None,
        side_width(checkpoint, model),
        model.mode,
    )


def _info(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: LanguageModel,
    shares: Budget,
    device: torch.device,
    dtype: torch.dtype,
) -> EngineInfo:
    return EngineInfo(
        model=checkpoint.name,
        max_model_len=shares.max_model_len,
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        num_blocks=shares.blocks,
        max_num_seqs=config.max_num_seqs,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
    )
