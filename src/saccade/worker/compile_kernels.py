"""What every start launches, compiled side by side before any of it runs: prompts, copies of blocks, pixels,
textures, the tower.

takes   the model, what the checkpoint does to pictures
gives   nothing; the first to launch these kernels finds them compiled
owns    while an engine is made, the processes that compile
never   runs one of them; what does not compile says so when it is launched for real

Captured steps have theirs compiled by `graphs`, ordinary ones beside answers by an idle engine.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Thread

import torch
from torch import Tensor

from saccade.encoder.preprocess import Preprocessor
from saccade.inputs.image_processor import ImageProcessor, plain_view
from saccade.kernels.compile_pool import CompilePool, default_workers
from saccade.kernels.dispatch import TORCH, KernelMode
from saccade.kernels.jit import INTERPRETED, TRITON, cache_is_cold, compile_only, hash_triton
from saccade.kernels.sampling.greedy import greedy
from saccade.kv_cache.groups import single_group
from saccade.kv_cache.pages import Paged, Pages
from saccade.lod.scorers import image_maps
from saccade.lod.texture import texture
from saccade.models.interface import LanguageModel, VisionTower

TOKENS = 513  # of the prompt: kernels are the same for any number that no captured step has
SHORT = 100  # of another: 65 to 128 launch one of their own, where no captured step has them
# Width, height: between them they launch every kernel that pictures of other sizes launch.
SIZES = ((1280, 720), (1023, 767), (1040, 767), (1023, 784))
SIDE = 14  # tokens of the view that goes through the tower


@contextmanager
def compilers(*, wanted: bool) -> Iterator[None]:
    """Within: what is missing in Triton's cache is compiled by processes, where the machine has cores for
    them. They start with the first kernel that is missing; at once where that is plainly the case: then they
    are ready when the weights are."""
    if not wanted or not TRITON or INTERPRETED:
        yield
        return
    Thread(target=hash_triton, daemon=True).start()  # beside the weights; a third of a second
    with CompilePool(default_workers()) as workers:
        if cache_is_cold():
            workers.start()
        yield


@torch.inference_mode()
def compile_first(
    model: LanguageModel,
    image: ImageProcessor | None,
    device: torch.device,
    block_size: int,
    rows: int,
    compact: torch.dtype | None = None,
) -> None:
    """`rows`: the most that are sampled at once; `compact`: of some blocks of the pages."""
    if model.mode.kernels == TORCH:
        return
    with compile_only():
        lone_prompt(model, device, SHORT, block_size)
        hidden = lone_prompt(model, device, TOKENS, block_size)
        for count in {1, rows}:
            greedy(model.logits(hidden[:count]), model.mode)
        _copies(model, device, block_size, compact)
        if model.vision is not None and image is not None:
            dtype = model.dtype
            _pixels(image, device, dtype, SIZES, model.mode)
            _textures(device, SIZES[:1], mode=model.mode)
            _tower(model.vision, device, dtype)


def lone_prompt(model: LanguageModel, device: torch.device, tokens: int, block_size: int) -> Tensor:
    """The hidden states of a prompt of so many tokens in a step of its own, whose pages nobody reads."""
    pages = Pages.allocate(single_group(model.kv_cache_groups, block_size), 1, device)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    paged = Paged(
        pages=pages,
        slots=zeros,
        tables=torch.zeros(1, -(-tokens // block_size), dtype=torch.int32, device=device),
        lengths=torch.tensor([tokens], dtype=torch.int32, device=device),
        offsets=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        counts=(tokens,),
        contexts=(tokens,),
        decodes=0,
    )
    hidden: Tensor = model(model.embed(zeros), zeros.expand(3, -1), paged, None)
    return hidden


def _copies(model: LanguageModel, device: torch.device, block_size: int, compact: torch.dtype | None) -> None:
    """Of blocks of every kind, each onto itself."""
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
    """Pictures to patches."""
    preprocessor = Preprocessor(image, device, mode=mode)
    for size in sizes:
        pixels = torch.zeros(1, size[1], size[0], 3, dtype=torch.uint8, device=device)
        preprocessor.patches(pixels, plain_view(bytes(16), size, image), dtype)


def _textures(
    device: torch.device, sizes: Iterable[tuple[int, int]], side: int = SIDE, *, mode: KernelMode
) -> None:
    """What looks need to know of pictures by themselves, over global views of `side` tokens along each."""
    for width, height in sizes:
        pixels = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        image_maps(texture(pixels, mode), (side, side), mode=mode)


def _tower(tower: VisionTower, device: torch.device, dtype: torch.dtype) -> None:
    """Patches to features, through the first layers alone: the others launch the same."""
    grid = SIDE * tower.merge, SIDE * tower.merge
    patches = torch.zeros(grid[0] * grid[1], tower.patch_dim, dtype=dtype, device=device)
    last = tower.deep[0] if tower.deep else 0
    first = max(last - 1, 0)  # a layer behind another, and one that has a deep level
    layout = tower.layout([grid])
    stream, levels = tower.carry(tower.begin(patches, layout), layout, first, last + 1)
    tower.finish(stream, levels * tower.depth_levels)
