"""Warm-up of the engine core: kernels compiled before serving begins, eager steps and CUDA graphs when
idle."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.encoder.preprocess import Preprocessor
from saccade.inputs.image_processor import ImageProcessor, plain_view
from saccade.kernels.attention.metadata import AttentionMetadata
from saccade.kernels.compile_pool import CompilePool, default_workers
from saccade.kernels.dispatch import TORCH, KernelMode
from saccade.kernels.jit import INTERPRETED, TRITON, cache_is_cold, compile_only, hash_triton
from saccade.kernels.sampling.greedy import greedy
from saccade.kv_cache.groups import single_group
from saccade.kv_cache.pages import Paged, Pages
from saccade.lod.scorers import image_maps
from saccade.lod.texture import texture
from saccade.models.interface import LanguageModel, VisionTower
from saccade.step_plan import ScheduledSequence
from saccade.worker.buckets import PREFILL_TOKENS
from saccade.worker.cuda_graphs import StepGraphCache
from saccade.worker.encoder_warmup import TowerWarmup
from saccade.worker.model_runner import ModelRunner

log = logging.getLogger(__name__)

TOKENS = 513  # of a prompt: the kernels are the same for any number beyond those of CUDA graph steps
SHORT = 100  # of another prompt: 65 to 128 tokens launch a kernel of their own if they run eagerly
# Width, height of images: together they launch every kernel that images of other sizes launch.
IMAGE_SIZES = ((1280, 720), (1023, 767), (1040, 767), (1023, 784))
SIDE = 14  # tokens of the view that goes through the tower


@contextmanager
def compilers(*, wanted: bool) -> Iterator[None]:
    """Within, kernels missing in Triton's cache are compiled by a pool of processes, if the machine has cores
    for it. It starts with the first missing kernel, or at once if the cache is cold: then it is ready when
    the weights are."""
    if not wanted or not TRITON or INTERPRETED:
        yield
        return
    Thread(target=hash_triton, daemon=True).start()  # beside the weights; a third of a second
    with CompilePool(default_workers()) as workers:
        if cache_is_cold():
            workers.start()
        yield


@torch.inference_mode()
def compile_kernels(
    model: LanguageModel,
    image: ImageProcessor | None,
    device: torch.device,
    block_size: int,
    max_seqs: int,
    compact: torch.dtype | None = None,
) -> None:
    """Compile what every engine launches. `max_seqs`: the most that sample at once; `compact`: dtype of the
    KV blocks in 8 bits, if there are any."""
    if model.mode.kernels == TORCH:
        return
    mode = model.mode._replace(compile_only=True)
    with compile_only():
        run_prompt(model, device, SHORT, block_size, mode)
        hidden = run_prompt(model, device, TOKENS, block_size, mode)
        for count in {1, max_seqs}:
            greedy(model.logits(hidden[:count]), model.mode)
        _copies(model, device, block_size, compact)
        if model.vision is not None and image is not None:
            dtype = model.dtype
            _pixels(image, device, dtype, IMAGE_SIZES, model.mode)
            _textures(device, IMAGE_SIZES[:1], mode=model.mode)
            _tower(model.vision, device, dtype)


def run_prompt(
    model: LanguageModel, device: torch.device, tokens: int, block_size: int, mode: KernelMode
) -> Tensor:
    """The hidden states of a lone prompt of so many tokens, on pages of its own."""
    pages = Pages.allocate(single_group(model.kv_cache_groups, block_size), 1, device)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    rows = AttentionMetadata(
        block_tables=torch.zeros(1, -(-tokens // block_size), dtype=torch.int32, device=device),
        seq_lens=offsets[1:],
        query_start_loc=offsets,
        query_lens=(tokens,),
        seq_lens_cpu=(tokens,),
        num_decodes=0,
        block_size=block_size,
    )
    paged = Paged(pages, zeros, rows)
    hidden: Tensor = model(model.embed(zeros), zeros.expand(3, -1), paged, None, mode=mode)
    return hidden


def _copies(model: LanguageModel, device: torch.device, block_size: int, compact: torch.dtype | None) -> None:
    """Copy a block of each dtype onto itself."""
    small, group = int(compact is not None), single_group(model.kv_cache_groups, block_size)
    pages = Pages.allocate(group, 1 + small, device, small, compact, mode=model.mode)
    for block in range(1 + small):
        pages.copy_block(block, block)


def _pixels(
    image: ImageProcessor,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Iterable[tuple[int, int]],
    mode: KernelMode,
) -> None:
    """From pixels to patches."""
    preprocessor = Preprocessor(image, device, mode=mode)
    for size in sizes:
        pixels = torch.zeros(1, size[1], size[0], 3, dtype=torch.uint8, device=device)
        preprocessor.patches(pixels, plain_view(bytes(16), size, image), dtype)


def _textures(
    device: torch.device, sizes: Iterable[tuple[int, int]], side: int = SIDE, *, mode: KernelMode
) -> None:
    """Image maps over global views of `side` by `side` tokens."""
    for width, height in sizes:
        pixels = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        image_maps(texture(pixels, mode), (side, side), mode=mode)


def _tower(tower: VisionTower, device: torch.device, dtype: torch.dtype) -> None:
    """From patches to features, through the first layers only: the others launch the same kernels."""
    grid = tower.grid or (SIDE * tower.merge, SIDE * tower.merge)
    patches = torch.zeros(grid[0] * grid[1], tower.patch_dim, dtype=dtype, device=device)
    last = tower.deep[0] if tower.deep else 0
    first = max(last - 1, 0)  # a layer after another, and one with a DeepStack level
    layout = tower.layout([grid])
    stream, levels = tower.carry(tower.begin(patches, layout), layout, first, last + 1)
    tower.finish(stream, levels * tower.depth_levels)


class WarmupStep(NamedTuple):
    """An eager step that no request asked for: so many decodes beside a prefill."""

    decodes: int
    tokens: int = PREFILL_TOKENS[-1] + 1  # of the prefill: more than CUDA graph steps hold

    def scheduled(self, max_context: int) -> tuple[ScheduledSequence, ...]:
        def sequence(slot: int, start: int, count: int) -> ScheduledSequence:
            positions = np.zeros((3, count), dtype=np.float32)
            return ScheduledSequence(slot, slot, start, count, (0,) * count, positions, (), True, 0)

        return (
            *(sequence(slot, min(640, max_context - 1), 1) for slot in range(self.decodes)),
            sequence(self.decodes, 0, min(self.tokens, max_context)),
        )


class IdleWarmup:
    """What an idle engine core compiles and captures, one at a time: a request that arrives waits for one."""

    def __init__(
        self,
        runner: ModelRunner,
        graphs: StepGraphCache | None = None,
        tower: TowerWarmup | None = None,
        steps: Sequence[WarmupStep] = (),
    ) -> None:
        self._runner, self._graphs, self._tower = runner, graphs, tower
        self.steps = steps

    @property
    def pending(self) -> int:
        """Calls of `run_next` until nothing is left, at most."""
        graphs = 0 if self._graphs is None else self._graphs.pending
        return graphs + len(self.steps) + (0 if self._tower is None else len(self._tower))

    @torch.inference_mode()
    def run_next(self) -> bool:
        """Returns whether anything was left."""
        if self._graphs is not None and self._graphs.capture_next():
            return True
        if self.steps:
            self._compile_next()
            return True
        return self._tower is not None and self._tower.capture_next()

    def _compile_next(self) -> None:
        """A step that fails is compiled when a request needs it."""
        step, *self.steps = self.steps
        try:
            self._runner.compile_step(step.scheduled(self._runner.max_context))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self.steps = ()
            log.warning("eager steps cannot be compiled ahead: %s", str(error).partition("\n")[0])
