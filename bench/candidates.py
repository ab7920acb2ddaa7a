"""Tunings of the products that bench/kernels.py tries: for few rows one list, for many by the shape."""

from saccade.kernels.gemm.skinny import MOST_ROWS, SkinnyTuning
from saccade.kernels.jit import power_of_two, up

CANDIDATES = (
    SkinnyTuning(16, 256, 1, 4, 4),
    SkinnyTuning(16, 512, 1, 4, 3),
    SkinnyTuning(16, 512, 2, 4, 4),
    SkinnyTuning(32, 256, 1, 4, 4),
    SkinnyTuning(32, 256, 2, 4, 4),
    SkinnyTuning(32, 256, 4, 4, 4),
    SkinnyTuning(32, 128, 4, 4, 6),
    SkinnyTuning(64, 128, 1, 4, 5),
    SkinnyTuning(64, 128, 4, 4, 5),
    SkinnyTuning(64, 128, 8, 4, 5),
    SkinnyTuning(64, 128, 1, 4, 5, "swap"),
    SkinnyTuning(64, 128, 4, 4, 5, "swap"),
    SkinnyTuning(128, 64, 8, 4, 5, "swap"),
    SkinnyTuning(64, 128, 2, 4, 5, "swap"),
    SkinnyTuning(64, 128, 3, 4, 5, "swap"),
    SkinnyTuning(64, 256, 2, 4, 3, "swap"),
    SkinnyTuning(64, 128, 2, 8, 4, "swap"),
    SkinnyTuning(8, 1024, 1, 4, 2, "fma"),
    SkinnyTuning(4, 2048, 1, 4, 2, "fma"),
)

MULTIPROCESSORS = 132  # of an H200
# For 65 to 256 rows, by lines: a tile of W and how it is worked on, and how many fit a multiprocessor.
TILES = {
    128: (
        (SkinnyTuning(64, 64, 1, 4, 4, "many", lines=128), 2),
        (SkinnyTuning(64, 128, 1, 4, 4, "many", lines=128), 1),
        (SkinnyTuning(128, 64, 1, 4, 3, "many", lines=128), 2),
        (SkinnyTuning(128, 64, 1, 4, 6, "many", lines=128), 1),
        (SkinnyTuning(128, 64, 1, 8, 6, "many", lines=128), 1),
        (SkinnyTuning(128, 128, 1, 8, 3, "many", lines=128), 1),
        (SkinnyTuning(192, 64, 1, 4, 5, "many", lines=128), 1),
        (SkinnyTuning(192, 64, 1, 8, 5, "many", lines=128), 1),
        (SkinnyTuning(256, 64, 1, 8, 4, "many", lines=128), 1),
    ),
    256: (
        (SkinnyTuning(64, 64, 1, 4, 5, "many", lines=256), 1),
        (SkinnyTuning(128, 64, 1, 8, 4, "many", lines=256), 1),
        (SkinnyTuning(192, 64, 1, 8, 3, "many", lines=256), 1),
        (SkinnyTuning(192, 64, 1, 8, 4, "many", lines=256), 1),
    ),
}
FULL, WELL = 0.88, 0.95  # of its waves that a launch should fill; from where on no other splits are tried
LEAST_DEPTH = 512  # of a split


def filled(tuning: SkinnyTuning, resident: int, rows: int, height: int) -> float:
    """The share of the places in its waves that a launch takes; `height`: rows of W."""
    programs = up(height, tuning.columns) * up(rows, tuning.lines or rows) * tuning.splits
    places = MULTIPROCESSORS * resident
    return programs / (up(programs, places) * places)


def candidates(rows: int, columns: int, depth: int, gated: bool) -> list[SkinnyTuning]:
    """Of a product: beyond 64 rows each tile with the splits that fill whole waves, or come nearest."""
    if rows <= MOST_ROWS:
        some = [t for t in CANDIDATES if t.mode != "fma" or (rows == 1 and not gated)]
        return [t for t in some if t.splits == 1 or columns <= 100_000]  # enough programs without a cut
    height, made = columns * (2 if gated else 1), []
    for tile, resident in (*TILES[128], *(TILES[256] if rows > 128 else ())):
        # Parts of a head or of a gated product are too many bytes to leave and to read again.
        whole = gated or columns > 100_000
        cuts = [1] if whole else [n for n in range(1, 9) if depth // n >= LEAST_DEPTH]
        tried = {n: filled(tile._replace(splits=n), resident, rows, height) for n in cuts}
        enough = [n for n, share in tried.items() if share >= FULL] or [max(cuts, key=lambda n: tried[n])]
        made += [tile._replace(splits=n) for n in enough[: 1 if tried[enough[0]] >= WELL else 2]]
    return made


# For up to 64 rows, beside CANDIDATES: tall tiles of W by the kernel for many rows, in one wave of the chip.
TALL = (
    SkinnyTuning(64, 128, 1, 4, 6, "many"),
    SkinnyTuning(64, 256, 1, 4, 4, "many"),
    SkinnyTuning(64, 128, 1, 4, 10, "many"),
    SkinnyTuning(128, 64, 1, 4, 8, "many"),
    SkinnyTuning(128, 128, 1, 8, 4, "many"),
    SkinnyTuning(128, 128, 1, 4, 5, "many"),
    SkinnyTuning(192, 64, 1, 4, 6, "many"),
    SkinnyTuning(192, 64, 1, 8, 7, "many"),
    SkinnyTuning(192, 128, 1, 8, 3, "many"),
    SkinnyTuning(192, 128, 1, 8, 4, "many"),
    SkinnyTuning(192, 128, 1, 4, 4, "many"),
)
SHARED = 227 << 10  # bytes of shared memory a program may have


def fits(tile: SkinnyTuning, lines: int) -> bool:
    """Whether its stages do: of W and of x, 16 bits a value."""
    return 2 * tile.stages * tile.depth * (tile.columns + lines) <= SHARED


def for_few(rows: int, columns: int, depth: int, gated: bool) -> list[SkinnyTuning]:
    """Each tile with the splits that fill one wave best."""
    lines = max(16, power_of_two(rows))
    height, made = columns * (2 if gated else 1), []
    for tile in (tile for tile in TALL if fits(tile, lines)):
        whole = gated or columns > 100_000
        cuts = [1] if whole else [n for n in range(1, 9) if depth // n >= LEAST_DEPTH]
        tried = {n: filled(tile._replace(splits=n, lines=lines), 1, rows, height) for n in cuts}
        made.append(tile._replace(splits=max(cuts, key=lambda n: (round(tried[n], 2), -n)), lines=lines))
    return made
