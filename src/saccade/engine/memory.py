"""The memory budget: weights, workspace, encoder cache; what is left becomes KV blocks. Decided once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from saccade.checkpoint import Checkpoint
from saccade.config import GIB, EngineConfig
from saccade.encoder import upload
from saccade.encoder.encoder_graphs import MAX_PATCHES, MAX_SHAPES, EncoderBuffers
from saccade.encoder.preprocess import Preprocessor
from saccade.errors import ConfigError
from saccade.inputs.image_processor import PatchSettings
from saccade.kernels.attention.decode import DecodeTuning, default_splits
from saccade.kernels.attention.metadata import MOST_GATHERED
from saccade.kernels.dispatch import use_triton
from saccade.kv_cache.groups import resolve_groups
from saccade.kv_cache.pages import Pages
from saccade.kv_cache.pool_sizing import PoolSizes
from saccade.kv_cache.swap_copies import HostPages
from saccade.lod import image_maps
from saccade.lod.checkpoint_views import checkpoint_views
from saccade.models.interface import LanguageModel, VisionTower
from saccade.request import View
from saccade.worker.buckets import MAX_GRAPHS, PREFILL_TOKENS, PREFILLS, max_decodes
from saccade.worker.warmup import run_prompt

MIB = 1 << 20
GRAPH_BYTES = 8 * MIB  # of the driver, for the CUDA graph of a step
TOWER_GRAPH_BYTES = 10 * MIB  # of the driver, for the graphs of a tower shape, some 300 kernels
MAX_SOURCE_SIDE = 8000  # pixels: with 64 million, the largest image that the API server accepts
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Budget:
    """Bytes of each use, and the lengths and counts that follow from them."""

    step_tokens: int
    encode_patches: int  # vision tower work per step
    feature_bytes: int
    kv: PoolSizes
    max_model_len: int
    swap_slots: int = 0  # KV blocks in host memory

    @property
    def blocks(self) -> int:
        return self.kv.blocks


def resolve_device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but this machine has no CUDA device; use --device cpu")
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)


def resolve_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32  # CPUs without bf16 units compute it several times slower
    # config.json names it on either level, under its new or its old key.
    levels = (checkpoint.text_config, checkpoint.config)
    stored = [level[key] for level in levels for key in ("dtype", "torch_dtype") if level.get(key)]
    named = str(stored[0]).removeprefix("torch.") if stored else "bfloat16"
    if named not in DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype is {named}; choose one of {', '.join(DTYPES)} with --dtype"
        )
    return DTYPES[named]


def budget(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: LanguageModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    graphs: bool = False,
) -> Budget:
    on_gpu = device.type == "cuda"
    step_tokens = config.max_num_batched_tokens or (8192 if on_gpu else 2048)
    features = config.vision_cache.gpu
    if features is None:
        features = 2 * GIB if on_gpu else 256 * MIB
    if model.vision is None:
        features = 0
    wanted_len = config.max_model_len or checkpoint.max_position_embeddings
    if wanted_len > checkpoint.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {wanted_len}, but the checkpoint's positions end at "
            f"{checkpoint.max_position_embeddings}; lower --max-model-len"
        )
    encode_patches = 4 * max(step_tokens, 4096)
    vision = EncoderMemory(0, 0)
    sized = config.num_blocks is not None or config.kv_cache_bytes is not None  # by the user
    if on_gpu and model.vision is not None and not sized:
        processing = [one for one in (checkpoint.image, checkpoint.video) if one is not None]
        vision = measure_encoder_memory(model.vision, processing, device, dtype, wanted_len, encode_patches)
    reserve = features + vision.kept
    reserve += graph_bytes(model, config.max_num_seqs, wanted_len, dtype) if graphs else 0
    free = _kv_bytes(config, model, device, step_tokens, reserve, vision.peak)
    bytes_of = _block_bytes(config, model, side_width(checkpoint, model))
    options = config.kv_cache_options()
    if options.split and model.vision is None:
        raise ConfigError("the model takes no images; leave out the options --kv-vision-...")
    blocks = config.num_blocks
    shares = options.divide_bytes(free, *bytes_of) if blocks is None else options.divide_blocks(blocks)
    if not sized:
        # At most all sequences at their longest, twice for the prefix cache.
        shares = options.cap(shares, 2 * config.max_num_seqs * -(-wanted_len // config.block_size))
    longest = min(wanted_len, shares.text * config.block_size)  # a prompt may be text only
    if longest < 2 or (config.max_model_len is not None and longest < config.max_model_len):
        raise ConfigError(
            f"the KV pool of {shares.text} blocks holds {shares.text * config.block_size} tokens, fewer than "
            f"max_model_len {wanted_len}; give it more memory or lower --max-model-len"
        )
    plain = shares.compact < shares.blocks  # a host block holds any block
    per_block = bytes_of[0 if plain else 1]
    slots = _swap_bytes(config, device) // per_block
    if config.swap_bytes and not slots:
        raise ConfigError(
            f"swap_bytes is {config.swap_bytes}, less than a KV block of {per_block} bytes; give more, or 0"
        )
    return Budget(step_tokens, encode_patches, features, shares, longest, slots)


def _swap_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.swap_bytes is not None:
        return config.swap_bytes
    return 4 * GIB if device.type == "cuda" else 0


def _block_bytes(config: EngineConfig, model: LanguageModel, side: int = 0) -> tuple[int, int]:
    """Bytes of a block in every KV cache group, in the groups' dtypes and in 8 bits; `side`: numbers per
    token beside K and V, which are not quantized."""
    groups = resolve_groups(model.kv_cache_groups, config.block_size)
    plain = sum(Pages.bytes_per_block(group, None, side) for group in groups)
    return plain, sum(Pages.bytes_per_block(group, torch.int8, side) for group in groups)


def _kv_width(model: LanguageModel) -> int:
    """Numbers of K of one token in the widest layer."""
    return max(group.kv_heads * group.head_dim for group in model.kv_cache_groups)


def side_width(checkpoint: Checkpoint, model: LanguageModel) -> int:
    """Numbers kept per token beside K and V, for a relevance head."""
    head = checkpoint_views(checkpoint).head
    return head.width if head is not None and model.vision is not None else 0


def _kv_bytes(
    config: EngineConfig,
    model: LanguageModel,
    device: torch.device,
    step_tokens: int,
    reserve: int,
    largest_view: int,
) -> int:
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type != "cuda" or config.num_blocks is not None:
        return GIB
    workspace = _measure_workspace(model, device, step_tokens, config.max_num_seqs, config.block_size)
    workspace = max(workspace, largest_view)
    if config.kv_cache_options().format and not use_triton(
        "decode_attention", next(model.parameters()), model.mode
    ):
        # The reference implementation's copies of 8-bit blocks: bytes, float32 twice, both kinds of block.
        workspace += 13 * MOST_GATHERED * _kv_width(model)
    free, total = torch.cuda.mem_get_info(device)
    if _swap_bytes(config, device):
        workspace += HostPages.staging_bytes(_block_bytes(config, model)[0])
    left = int(total * config.gpu_memory_utilization) - (total - free) - workspace - reserve
    if left <= 0:
        raise ConfigError(
            f"weights, workspace ({workspace / GIB:.1f} GiB), vision cache, CUDA graphs and partial "
            f"views ({reserve / GIB:.1f} GiB) leave no memory for the KV cache at "
            f"gpu_memory_utilization {config.gpu_memory_utilization}; raise it"
        )
    return left


def graph_bytes(model: LanguageModel, rows: int, longest: int, dtype: torch.dtype) -> int:
    """Of the CUDA graphs of steps: one pool as large as the largest graph needs, long contexts included, and
    the driver's data of each graph."""
    rows, kv_heads = max_decodes(rows), min(group.kv_heads for group in model.kv_cache_groups)
    splits = default_splits(rows, kv_heads, longest, DecodeTuning().chunk)
    attention = rows * splits * model.hidden_size * 4 * 2  # float32; heads may be wider than hidden
    activations = 16 * (rows + PREFILL_TOKENS[-1]) * model.hidden_size * dtype.itemsize
    logits = 2 * (rows + PREFILLS[-1]) * model.vocab_size * dtype.itemsize  # one of them for "logits" endings
    return attention + activations + logits + MAX_GRAPHS * GRAPH_BYTES


@torch.inference_mode()
def _measure_workspace(
    model: LanguageModel, device: torch.device, tokens: int, rows: int, block_size: int
) -> int:
    """Peak bytes of the largest step beyond the weights: one long chunk, a full set of logits."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = run_prompt(model, device, tokens, block_size, model.mode)
    for _ in range(3):  # the sampler keeps up to three copies of the logits
        logits = model.logits(hidden[:rows])
        hidden = hidden + logits.mean() * 0
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    dtype = model.dtype
    gathered = 2 * MOST_GATHERED * _kv_width(model) * dtype.itemsize  # of a decode step, one layer
    penalties = 5 * rows * model.vocab_size  # token counts and prompt marks of all slots
    slack = 512 * MIB  # allocator and library handles
    return max(peak, gathered) + 3 * rows * model.vocab_size * 4 + penalties + slack


class EncoderMemory(NamedTuple):
    peak: int  # while the largest view is computed
    kept: int  # static buffers, graph memory, partial views


def largest_grid(tower: VisionTower, processing: Sequence[PatchSettings], max_tokens: int) -> tuple[int, int]:
    """Patch rows and columns of the largest view that the processors give, or that a context of `max_tokens`
    holds, if that is less. Nearly square: the shape does not change the bytes."""
    merge = tower.merge
    tokens = max(one.max_pixels // (one.patch_size * merge) ** 2 for one in processing)
    tokens = max(min(tokens, max_tokens), 1)
    rows = math.isqrt(tokens)
    return rows * merge, tokens // rows * merge


def partial_view_bytes(tower: VisionTower, dtype: torch.dtype, count: int) -> int:
    """Of `count` patches between two layers: hidden states, and all DeepStack levels."""
    levels = tower.depth_levels * tower.out_dim / tower.merge**2
    return int(count * (tower.hidden_dim + levels) * dtype.itemsize)


@torch.inference_mode()
def measure_encoder_memory(
    tower: VisionTower,
    processing: Sequence[PatchSettings],
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    encode_patches: int,
) -> EncoderMemory:
    """What images need beside weights, KV and encoder cache. `encode_patches`: of all partial views."""
    grid = largest_grid(tower, processing, max_tokens)
    size = grid[0] * grid[1]
    peak = _measure(tower, processing[0], grid, device, dtype)
    side = math.isqrt(min(MAX_PATCHES, size)) // tower.merge * tower.merge
    captured = _measure(tower, None, (side, side), device, dtype)
    kept = partial_view_bytes(tower, dtype, max(encode_patches, size))
    kept += (
        EncoderBuffers.nbytes(tower, dtype)
        + captured
        + MAX_SHAPES * TOWER_GRAPH_BYTES
        + image_maps.MAX_BYTES
        + upload.UPLOADED_BYTES
    )
    return EncoderMemory(peak, kept)


def _measure(
    tower: VisionTower,
    processing: PatchSettings | None,
    grid: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Peak bytes of a view: pixels to patches (with `processing`), one layer with its DeepStack level (the
    others need the same), the merger."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    if processing is not None:
        side = MAX_SOURCE_SIDE
        pixels = torch.zeros(1, side, side, 3, dtype=torch.uint8, device=device)
        view = View(bytes(16), (0, 0, side, side), grid, tower.merge, processing.digest)
        cut = Preprocessor(processing, device, mode=tower.mode).patches(pixels, view, dtype)
        del pixels
    else:
        cut = torch.zeros(grid[0] * grid[1], tower.patch_dim, dtype=dtype, device=device)
    layout = tower.layout([grid])
    stream = tower.begin(cut, layout)
    del cut
    layer = tower.deep[0] if tower.deep else 0
    stream, levels = tower.carry(stream, layout, layer, layer + 1)
    features = tower.finish(stream, [levels[0]] * tower.depth_levels if levels else [])
    del stream, levels, features
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
