"""A model of the products' kernels: which launch parameters are worth timing for a shape, the best first.

A program reads its tile of W from memory and its rows of x from L2 through `stages` buffers. The model adds
up what bounds it: the bytes that the resident programs of a multiprocessor keep in flight (Little's law), the
traffic between L2 and the multiprocessors, the tensor cores, the last wave, and adding the splits of K up.
Its constants fit an H200's times of Qwen3-VL-8B (tests/kernels/test_tuning_model.py); sizes of the GPU are
properties of the device.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from saccade.kernels.jit import power_of_two, up

FORMATS = ("bf16", "fp8", "int8", "int4")
LIMITS = (1, 16, 32, 64, 128, 256)  # of rows, in tables; 128 speaks for 65 to 128, 256 for the rest


class ProductTuning(NamedTuple):
    """Launch parameters; only `splits` changes the order of the sums."""

    piece: int  # rows of W in one program
    lines: int  # rows of x
    depth: int  # columns of W in one step; of 4-bit weights: values of int16
    splits: int
    stages: int
    warps: int
    ahead: int = 64  # 16-bit values of each row of W, prefetched to L2 while the kernel before runs


class Product(NamedTuple):
    """A shape that tunings are chosen for."""

    format: str  # of FORMATS
    rows: int  # of x; in a table one of LIMITS
    columns: int  # rows of W: of a gated product gate and up together
    depth: int  # K
    gated: bool

    @property
    def limit(self) -> int:
        """The line of a table that speaks for so many rows."""
        return next((limit for limit in LIMITS if self.rows <= limit), LIMITS[-1])

    @property
    def key(self) -> "Product":
        return self._replace(rows=self.limit)


class Gpu(NamedTuple):
    """What the model of the kernels needs to know; the default is an H200."""

    multiprocessors: int = 132
    shared: int = 227 << 10  # bytes of shared memory a program may have


MOST = 10  # candidates of a product

LATENCY = 0.65  # us from a load to its data, under load
MEMORY = 4.69e6  # bytes per us
MEMORY_EACH = 41e3  # that one multiprocessor can read alone
L2_EACH = 106e3  # from L2, per multiprocessor
LAUNCH = 0.7  # us of a launch behind another
REDUCE_LAUNCH = 1.0  # us of a second kernel, where nothing but splits needs one
PARTS_EACH = 300e3  # bytes of partial sums per us that one program adds up
REGISTERS, THREADS = 65536, 2048  # of a multiprocessor
LEAST_DEPTH = 512  # columns of W in a split
WIDE = 65536  # rows of W that fill a GPU without splits: an output head

# FLOP per us of a multiprocessor.
TENSOR = {"bf16": 5.7e6, "fp8": 11.4e6, "int8": 11.4e6, "int4": 5e6}
NIBBLES = 104e3  # 4-bit weights a multiprocessor expands per us

# Rows of W, depth, stages and warps of the programs; `depth` counts stored values: int16 of 4-bit weights.
EIGHT_BIT_TILES = (
    (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (64, 256, 4, 4), (64, 256, 6, 4), (128, 128, 3, 4),
    (128, 128, 6, 4), (128, 128, 6, 8),
)  # fmt: skip
TILES = {
    "bf16": (
        (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 4, 4), (128, 64, 4, 4), (128, 64, 6, 8),
        (128, 128, 3, 8), (192, 64, 5, 8), (192, 128, 3, 8),
    ),
    "fp8": EIGHT_BIT_TILES,
    "int8": EIGHT_BIT_TILES,
    "int4": (
        (64, 128, 2, 4), (64, 128, 3, 4), (64, 64, 2, 4), (64, 64, 3, 4), (64, 64, 4, 4), (128, 64, 3, 8),
    ),
}  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8)
AHEAD = {"bf16": 128, "fp8": 64, "int8": 64, "int4": 64}


class _Program(NamedTuple):
    """What one program of a launch reads and keeps, in bytes."""

    weights: float
    inputs: float
    in_flight: int  # of W
    resident: int  # programs on a multiprocessor


def model_tunings(product: Product, gpu: Gpu) -> tuple[ProductTuning, ...]:
    """At most MOST candidates, the fastest by the model first; `product.rows`: of x."""
    return _ranked(product, gpu)


@lru_cache(maxsize=4096)
def _ranked(product: Product, gpu: Gpu) -> tuple[ProductTuning, ...]:
    ordered = sorted(_candidates(product, gpu), key=lambda t: model_time(product, t, gpu))
    chosen: list[ProductTuning] = []
    tiles: dict[tuple[int, ...], int] = {}
    for t in ordered:  # of one tile the two best numbers of splits: the rest of the places go to other tiles
        tile = (t.piece, t.lines, t.depth, t.stages, t.warps)
        tiles[tile] = tiles.get(tile, 0) + 1
        if tiles[tile] <= 2 and len(chosen) < MOST:
            chosen.append(t)
    return tuple(chosen)


def _candidates(product: Product, gpu: Gpu) -> Iterator[ProductTuning]:
    fewest = max(16, min(64, power_of_two(product.rows)))
    most = 128 if product.rows > 64 else fewest
    for lines in (n for n in (16, 32, 64, 128) if fewest <= n <= most):
        for piece, depth, stages, warps in TILES[product.format]:
            for splits in SPLITS:
                t = ProductTuning(piece, lines, depth, splits, stages, warps, AHEAD[product.format])
                whole = product.columns >= WIDE or (splits > 2 and product.gated)
                if splits > 1 and (whole or product.depth // splits < LEAST_DEPTH):
                    continue
                if program(product, t, gpu).resident:
                    yield t


def program(product: Product, t: ProductTuning, gpu: Gpu) -> _Program:
    size = 1 if product.format in ("fp8", "int8") else 2  # of a stored value
    columns = 4 if product.format == "int4" else 1  # of W in a stored value
    each = t.piece * t.depth * size
    buffers = t.stages - (columns > 1)  # of W; 4-bit weights go on to registers
    shared = buffers * each + t.stages * t.lines * t.depth * columns * size + 1024
    registers = _registers(product, t)
    resident = min(gpu.shared // shared, THREADS // (32 * t.warps), REGISTERS // (32 * t.warps * registers))
    resident = 0 if registers > 255 else resident  # it would spill
    values = product.depth / columns / t.splits
    return _Program(
        t.piece * values * size, t.lines * values * size * columns, (t.stages - 1) * each, resident
    )


def _registers(product: Product, t: ProductTuning) -> int:
    """Of a thread, as compiled for compute capability 9.0."""
    if product.format != "int4":
        return min(255, t.piece * t.lines // (32 * t.warps) + 64)
    expanded = 43 + 0.65 * t.depth + t.lines * (1 + t.depth / 85)
    return int(expanded * t.piece / (16 * t.warps))


def model_time(product: Product, t: ProductTuning, gpu: Gpu) -> float:
    """Microseconds, one product after the other."""
    p = program(product, t, gpu)
    side = up(product.rows, t.lines)  # programs that share a tile of W: it comes from memory once
    programs = up(product.columns, t.piece) * side * t.splits
    each, rest = divmod(
        programs, gpu.multiprocessors
    )  # programs of every multiprocessor, and of some one more
    busiest = each + (rest > 0)
    memory = 0.0
    for count, processors in ((each, gpu.multiprocessors), (1 if rest else 0, rest)):
        if count:
            together = min(p.resident, busiest if busiest <= p.resident else count)
            rate = processors * min(MEMORY_EACH, together * p.in_flight / LATENCY)
            memory += count * processors * p.weights / side / min(MEMORY * gpu.multiprocessors / 132, rate)
    generations = up(busiest, p.resident)
    memory += LATENCY * (1 + (generations - 1) / p.resident)
    traffic = busiest * (p.weights + p.inputs) / L2_EACH + LATENCY
    arithmetic = busiest * _arithmetic(product, t) + LATENCY
    bounds = sorted((memory, traffic, arithmetic), reverse=True)
    return LAUNCH + bounds[0] + 0.15 * sum(bounds[1:]) + _reduction(product, t, gpu)


def _arithmetic(product: Product, t: ProductTuning) -> float:
    """Microseconds of one program alone on its multiprocessor."""
    weights = t.piece * product.depth / t.splits
    wide = t.lines / (t.lines + 16)  # narrow products leave the tensor cores waiting for W
    expand = weights / NIBBLES if product.format == "int4" else 0.0
    return 2 * weights * t.lines / TENSOR[product.format] / wide + expand


def _reduction(product: Product, t: ProductTuning, gpu: Gpu) -> float:
    """Of split-K. What is not gated is followed by a norm or by a kernel that adds parts up anyway."""
    if t.splits == 1:
        return 0.0
    whole = t.splits * product.rows * product.columns * 4
    each = up(product.rows, gpu.multiprocessors) * t.splits * product.columns * 4 / PARTS_EACH
    launch = REDUCE_LAUNCH if product.gated else 0.3
    return launch + whole / MEMORY + (each if not product.gated else 2 * whole / MEMORY)
