"""From pixels to features: correctness, and speed by image size beside the peak rates of the chip.

    PYTHONPATH=src python3 -m bench.vision               Qwen3-VL-8B's tower, on a GPU
    PYTHONPATH=src python3 -m bench.vision --sizes 1024x1024 --parts check,tower
    PYTHONPATH=src python3 -m bench.vision --tiny        a small tower; what a CPU can run, without peak rates

First every implementation is checked: patches by the kernel against the reference implementation bit for bit;
features of CUDA graphs bit for bit against the same attention without them, and whole against slices of
layers; cuDNN's attention against flash within the dtype's rounding. A size that fails is not timed. Then the
times: patches, the tower (plain, with plans for its shape, captured), the cost of a new size, attention at
head 72 by backend and padded to 80, the MLP's first product with its activation. "of ceiling" is the time at
644 TFLOP/s of matrix products, 360 of attention and 4.29 TB/s of copies, over the time taken."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.encoder.encoder_graphs import MAX_PATCHES, PACKED_PATCHES, TowerGraph, build_encoder_graphs
from saccade.encoder.encoder_runner import EncoderRunner, PartialEncoding
from saccade.encoder.partial_views import PartialViews, segment_layers
from saccade.encoder.preprocess import Preprocessor
from saccade.inputs.image_processor import plain_view
from saccade.inputs.qwen_vl_processor import Qwen2VLImageProcessor
from saccade.kernels.dispatch import KernelMode
from saccade.models.config import VisionDims
from saccade.models.interface import Layout
from saccade.models.layers import ModelBuilder
from saccade.models.vit import QwenVision, VisionLayer
from saccade.step_plan import EncodeTask

PRODUCT, ATTENTION, COPY = 644e12, 360e12, 4.29e12  # an H200's, measured
PARTS = ("check", "patches", "tower", "first", "attention", "mlp")
SIZES = "448x448,640x480,1024x1024,1920x1080,4096x4096"
QWEN3_VL_8B = VisionDims(27, 1152, 4304, 16, "gelu_pytorch_tanh", 3, 16, 2, 2, 4096, 48, 10000.0, (8, 16, 24))
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
TINY = VisionDims(4, 64, 128, 2, "gelu_pytorch_tanh", 3, 16, 2, 2, 64, 8, 10000.0, (1, 2))


class Lab(NamedTuple):
    tower: QwenVision
    processing: Qwen2VLImageProcessor
    device: torch.device
    dtype: torch.dtype

    def encoder(
        self, *, captured: bool, unfinished: PartialViews[PartialEncoding] | None = None
    ) -> EncoderRunner:
        graphs = build_encoder_graphs(self.tower, self.device, self.dtype) if captured else None
        return EncoderRunner(self.tower, self.processing, self.device, self.dtype, unfinished, graphs)

    def image(self, size: tuple[int, int], seed: int = 0) -> EncodeTask:
        """Noise: every pixel matters."""
        width, height = size
        pixels = np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
        view = plain_view(seed.to_bytes(16, "little"), size, self.processing)
        return EncodeTask(view, view.key, pixels)

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("torch", "triton") if self.device.type == "cuda" else ("torch",)


def build(tiny: bool, device: torch.device) -> Lab:
    dims = TINY if tiny else QWEN3_VL_8B
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    tower = QwenVision(dims, ModelBuilder(device, dtype))
    for name, parameter in tower.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    most = 65_536 if tiny else 16_777_216
    processing = Qwen2VLImageProcessor(
        patch_size=dims.patch,
        merge_size=dims.merge,
        temporal_patch_size=dims.frames,
        min_pixels=min(65_536, most),
        max_pixels=most,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255,
    )
    return Lab(tower, processing, device, dtype)


# Correctness


def sliced(lab: Lab, encode: EncodeTask, *, captured: bool) -> Tensor:
    """The features after slices of one segment of layers each."""
    unfinished: PartialViews[PartialEncoding] = PartialViews(1 << 30)
    encoder = lab.encoder(captured=captured, unfinished=unfinished)
    first, step = 0, segment_layers(lab.tower.depth)
    for stop in range(step, lab.tower.depth, step):
        unfinished.advance(encode.key, encode.patches, stop)
        encoder.encode([EncodeTask(encode.view, encode.key, encode.pixels, first, stop)], capture=True)
        first = stop
    unfinished.finish(encode.key)
    last = EncodeTask(encode.view, encode.key, encode.pixels, first)
    return encoder.encode([last], capture=True)[encode.key]


def replayed(lab: Lab, encode: EncodeTask) -> Tensor:
    """By captured stretches, another image first, turned: of as many patches, and of another grid unless it
    is square. What is given must come from the replay, and from the image's own tables."""
    encoder = lab.encoder(captured=True)
    turned = msgspec.structs.replace(encode.view, grid=encode.view.grid[::-1])
    other = EncodeTask(turned, b"other", np.flip(encode.pixels, 1).copy())
    encoder.encode([other], capture=True)
    return encoder.encode([encode], capture=True)[encode.key]


@torch.inference_mode()
def check(lab: Lab, size: tuple[int, int]) -> list[str]:
    """The faults found."""
    encode, wrong = lab.image(size), []
    grid = [encode.view.grid]
    layout = lab.tower.layout(grid)
    frames = torch.from_numpy(encode.pixels).to(lab.device)
    made = {}
    for kernels in lab.kernels:
        preprocessor = Preprocessor(lab.processing, lab.device, mode=KernelMode(kernels))
        made[kernels] = preprocessor.patches(frames, encode.view, lab.dtype)
    if not all(torch.equal(one, made["torch"]) for one in made.values()):
        wrong.append("patches by the kernel differ from the reference implementation's")
    stream = lab.tower.begin(made["torch"], layout)
    planned, levels = lab.tower.carry(stream, layout, 0, lab.tower.depth, recurring=True)
    same = lab.tower.finish(planned, levels)
    captured = encode.patches <= MAX_PATCHES
    if captured and not torch.equal(replayed(lab, encode), same):
        wrong.append("captured stretches give other features")
    whole = same if captured else lab.encoder(captured=False).encode([encode])[encode.key]
    if not torch.equal(sliced(lab, encode, captured=captured), whole):
        wrong.append("slices give other features than the whole")
    plain = lab.tower(made["torch"], grid)
    error = float((same.float() - plain.float()).norm() / plain.float().norm())
    limit = 3e-2 if lab.dtype == torch.bfloat16 else 1e-5
    if not error < limit:
        wrong.append(f"plans for the shape give features {error:.1e} away, more than {limit:.0e}")
    return wrong


# Speed


def seconds(call: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """The median of calls, each from an idle device to its end: launches count, as for a lone image."""
    taken: list[float] = []
    call()
    while len(taken) < 3 or (sum(taken) < budget and len(taken) < 50):
        finish(device)
        began = time.perf_counter()
        call()
        finish(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations(tower: QwenVision, patches: int) -> tuple[float, float]:
    """Of products and of attention in the tower, for one view."""
    weights = sum(
        one.numel() for name, one in tower.named_parameters() if "layers" in name and one.dim() == 2
    )
    mergers = sum(
        one.numel() for name, one in tower.named_parameters() if "merger" in name and one.dim() == 2
    )
    embedding = tower.patch_embedding.get_parameter("weight").numel()
    products = 2.0 * patches * (weights + embedding + mergers / tower.merge**2)
    return products, 4.0 * tower.depth * patches**2 * tower.hidden_dim


def tower_ceiling(lab: Lab, patches: int) -> float:
    products, attention = operations(lab.tower, patches)
    return products / PRODUCT + attention / ATTENTION


Row = tuple[str, float, float | None]  # what, seconds, the ceiling's seconds


def patches_rows(lab: Lab, size: tuple[int, int]) -> Iterator[Row]:
    encode = lab.image(size)
    frames = torch.from_numpy(encode.pixels).to(lab.device)
    moved = encode.pixels.nbytes * 3 + encode.patches * lab.tower.patch_dim * lab.dtype.itemsize
    for kernels in lab.kernels:
        preprocessor = Preprocessor(lab.processing, lab.device, mode=KernelMode(kernels))
        cut = partial(preprocessor.patches, frames, encode.view, lab.dtype)
        yield f"patches, {kernels}", seconds(cut, lab.device), moved / COPY
    encoder = lab.encoder(captured=False)
    yield (
        "pixels up",
        seconds(partial(encoder.upload, encode.pixels), lab.device),
        encode.pixels.nbytes / 50e9,
    )


def tower_rows(lab: Lab, size: tuple[int, int]) -> Iterator[Row]:
    encode = lab.image(size)
    grid, count = encode.view.grid, encode.patches
    made = torch.randn(count, lab.tower.patch_dim, device=lab.device, dtype=lab.dtype)
    ceiling = tower_ceiling(lab, count)
    layout, turned = (lab.tower.layout([one]) for one in (grid, grid[::-1]))

    def planned() -> Tensor:
        begun = lab.tower.begin(made, layout)
        stream, levels = lab.tower.carry(begun, layout, 0, lab.tower.depth, recurring=True)
        return lab.tower.finish(stream, levels)

    for kernels in lab.kernels:
        lab.tower.mode = KernelMode(kernels)
        yield f"tower, {kernels}", seconds(partial(lab.tower, made, [grid]), lab.device), ceiling
        yield f"tower, {kernels}, planned", seconds(planned, lab.device), ceiling
        for views in (1, 2, 4):
            graphs = build_encoder_graphs(lab.tower, lab.device, lab.dtype)
            found = graphs.find(graphs.shape_for(grid, views), now=True)
            if found is None or (views > 1 and views * count > PACKED_PATCHES):
                continue
            packed = lab.tower.layout([grid] * views)
            call = partial(through, found, made.repeat(views, 1), [packed], lab.tower.depth)
            call()
            name = f"tower, {kernels}, captured" + (f", {views} views" if views > 1 else "")
            yield name, seconds(call, lab.device), views * ceiling
            if views == 1 and turned.grids != layout.grids:
                both = partial(through, found, made, [layout, turned], lab.tower.depth)
                yield f"{name}, grids by turns", seconds(both, lab.device) / 2, ceiling


def through(found: TowerGraph, made: Tensor, layouts: list[Layout], depth: int) -> Tensor:
    """A call for each layout; gives what the last gave."""
    for layout in layouts:
        stream, levels = found.carry(found.begin(made, layout), layout, 0, depth)
        given = found.finish(stream, levels)
    return given


def first_rows(lab: Lab, size: tuple[int, int]) -> Iterator[Row]:
    """A new image size: its first, second and fourth image, pixels to features."""
    encoder = lab.encoder(captured=True)
    width, height = size
    odd = lab.image((width + 2 * 16 * 2, height))
    for number in range(1, 8):
        finish(lab.device)
        began = time.perf_counter()
        encoder.encode([odd])
        finish(lab.device)
        if number in (1, 2, 3, 7):
            yield f"new size, image {number}", time.perf_counter() - began, None


def first_layer(lab: Lab) -> VisionLayer:
    layer = lab.tower.layers[0]
    if not isinstance(layer, VisionLayer):
        raise TypeError(type(layer))
    return layer


def attend(parts: tuple[Tensor, Tensor, Tensor], *, padded: bool) -> Tensor:
    q, k, v = parts
    width = q.shape[-1]
    if not padded:
        return F.scaled_dot_product_attention(q, k, v)
    q, k, v = (F.pad(part, (0, -width % 16)) for part in parts)
    return F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)[..., :width]


def attention_rows(lab: Lab, size: tuple[int, int]) -> Iterator[Row]:
    count, heads = lab.image(size).patches, first_layer(lab).attention.heads
    width = lab.tower.hidden_dim // heads
    ceiling = 4.0 * count**2 * lab.tower.hidden_dim / ATTENTION
    packed = torch.randn(1, count, 3, heads, width, device=lab.device, dtype=lab.dtype)
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    for name, backend in (BACKENDS if lab.device.type == "cuda" else {"any": SDPBackend.MATH}).items():
        for padded in (False, True) if width % 16 else (False,):
            with sdpa_kernel(backend):
                taken = seconds(partial(attend, (q, k, v), padded=padded), lab.device)
            yield f"attention of a layer, {name}{', padded' if padded else ''}", taken, ceiling


def mlp_rows(lab: Lab, size: tuple[int, int]) -> Iterator[Row]:
    up = first_layer(lab).up
    weight, bias = up.get_parameter("weight"), up.get_parameter("bias")
    x = torch.randn(lab.image(size).patches, lab.tower.hidden_dim, device=lab.device, dtype=lab.dtype)
    ceiling = 2.0 * len(x) * weight.numel() / PRODUCT

    def separate() -> Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    yield "product, then gelu", seconds(separate, lab.device), ceiling
    if lab.device.type == "cuda":
        epilogue = partial(torch._addmm_activation, bias, x, weight.t(), use_gelu=True)
        yield "gelu in the product's epilogue", seconds(epilogue, lab.device), ceiling


MEASURES: dict[str, Callable[[Lab, tuple[int, int]], Iterator[Row]]] = {
    "patches": patches_rows,
    "tower": tower_rows,
    "first": first_rows,
    "attention": attention_rows,
    "mlp": mlp_rows,
}


@torch.inference_mode()
def measure(lab: Lab, size: tuple[int, int], parts: list[str], *, ceilings: bool) -> None:
    name = f"{size[0]}x{size[1]}"
    for part in (part for part in MEASURES if part in parts):
        try:
            for what, taken, ceiling in MEASURES[part](lab, size):
                share = f"{ceiling / taken:6.1%} of ceiling" if ceilings and ceiling is not None else ""
                print(f"{name:10} {what:40} {taken * 1e3:10.3f} ms  {share}", flush=True)
        except (RuntimeError, torch.OutOfMemoryError) as error:  # one way that fails must not end the rest
            print(f"{name:10} {part}: {type(error).__name__} {str(error).splitlines()[0][:100]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", help=f"WxH,...; default {SIZES}, with --tiny 96x64,256x256")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="a small tower; the default without a GPU")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = options.tiny or device.type == "cpu"
    sizes = [
        (int(size.partition("x")[0]), int(size.partition("x")[2]))
        for size in (options.sizes or ("96x64,256x256" if tiny else SIZES)).split(",")
    ]
    lab = build(tiny, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    kind = "tiny" if tiny else "Qwen3-VL-8B"
    print(f"{where}, torch {torch.__version__}, {str(lab.dtype)[6:]}, {kind} tower")
    failed = 0
    for size in sizes:
        wrong = check(lab, size) if "check" in parts else []
        for fault in wrong:
            print(f"WRONG  {size[0]}x{size[1]}: {fault}", flush=True)
        failed += bool(wrong)
        if not wrong:
            measure(lab, size, parts, ceilings=device.type == "cuda")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
