"""Values of level of detail: the request, the relevance maps of an image, the chosen zoomed views."""

import math
from functools import cached_property
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

Detail = Literal["auto", "low", "medium", "high"]
Scorer = Literal["propositional", "perspectival", "participatory"]
Grid = tuple[int, int]  # rows, columns of tokens
Box = tuple[int, int, int, int]  # x0, y0, x1, y1 in source pixels
Map = NDArray[np.float32]  # [rows, columns] over the global view's tokens

DETAILS: tuple[Detail, ...] = get_args(Detail)
SCORERS: tuple[Scorer, ...] = get_args(Scorer)
LADDER = (16, 64, 196, 400)  # tokens of a zoomed view
FINE = 4  # cells along a token's side in the fine map
BLANK = 0.2  # weight of an empty cell within a token, relative to the mean cell


def _as_tuple(struct: msgspec.Struct, name: str) -> None:
    """Convert a list a caller passed, so that equal parameters compare and hash as equal."""
    value = getattr(struct, name)
    if type(value) is not tuple:
        msgspec.structs.force_setattr(struct, name, tuple(value))


class Region(msgspec.Struct, frozen=True):
    """A zoomed view: a box of the source image and its token grid."""

    box: Box
    grid: Grid
    score: float  # share of the image's relevance inside the box

    def __post_init__(self) -> None:
        for name in ("box", "grid"):
            _as_tuple(self, name)

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]


class LodParams(msgspec.Struct, frozen=True, kw_only=True):
    """LOD parameters of a request. `scorers`, `balance` and `gate` are for ablations."""

    detail: Detail = "auto"
    budget: int | None = None  # visual tokens of all images together, global views included
    scorers: tuple[Scorer, ...] = SCORERS
    balance: bool = True  # False: all scorers have the same weight
    gate: bool = True  # False: with "auto", zoom even where the global view suffices
    zooms: tuple[tuple[Region, ...], ...] | None = None  # per image; if given, the relevance pass is skipped

    def __post_init__(self) -> None:
        _as_tuple(self, "scorers")
        if self.zooms is not None:
            msgspec.structs.force_setattr(self, "zooms", tuple(map(tuple, self.zooms)))

    @property
    def open_ended(self) -> bool:
        """Whether the engine decides how many tokens to spend: no budget and no fixed level."""
        return self.detail == "auto" and self.budget is None


class ViewRule(msgspec.Struct, frozen=True, kw_only=True):
    """The views a checkpoint accepts. The defaults are for a checkpoint not trained with zoomed views."""

    global_tokens: tuple[int, int] = (144, 256)  # fewest and most tokens of a global view
    zoom_tokens: tuple[int, ...] = LADDER
    square: bool = False  # only square zoomed views; otherwise wide ones are allowed too
    most_views: int = 8  # zoomed views per image
    unit: int = 32  # pixels along a token's side

    def __post_init__(self) -> None:
        least, most = self.global_tokens
        if not 1 <= least <= most:
            raise ValueError(
                f"global_tokens is {self.global_tokens}; fewest and most, at least 1, are needed"
            )
        if any(tokens not in LADDER for tokens in self.zoom_tokens):
            raise ValueError(f"zoom_tokens is {self.zoom_tokens}; the ladder has {LADDER}")
        if self.most_views < 0 or self.unit < 1:
            raise ValueError(
                f"most_views is {self.most_views}, unit {self.unit}; at least 0 and 1 are needed"
            )


def shares(values: Map) -> Map:
    """The map normalised to sum 1; an empty map stays zero."""
    values = np.maximum(values, 0, dtype=np.float32)
    total = float(np.add.reduce(values, axis=None, dtype=np.float64))
    if not math.isfinite(total):
        raise ValueError("a map of relevance has values that are not finite")
    return values / np.float32(total) if total > 0 else np.zeros_like(values)


def fraction_within_token(fine: Map) -> Map:
    """Distribution of content inside each token: [rows, FINE, columns, FINE], summing to 1 per token. `fine`
    is [rows * FINE, columns * FINE]."""
    mean = fine.mean(dtype=np.float32)
    stands = np.maximum(fine, 0) + np.float32(BLANK) * mean + np.float32(1e-9)
    rows, columns = stands.shape[0] // FINE, stands.shape[1] // FINE
    stands = stands.reshape(rows, FINE, columns, FINE)
    found: Map = stands / stands.sum((1, 3), keepdims=True)
    return found


class ImageMaps(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Maps of one view that do not depend on the question. Derived values are cached and read-only."""

    propositional: Map
    perspectival: Map
    lost: Map  # text density, which a coarse view loses first
    fine: Map | None = None  # propositional at FINE times the resolution; None: treated as uniform

    @cached_property
    def shares(self) -> tuple[Map, Map]:
        """Propositional and perspectival, each normalised."""
        return shares(self.propositional), shares(self.perspectival)

    @cached_property
    def chances(self) -> tuple[float, float]:
        """Overlap of a uniform map with each of `shares`."""
        one, other = (np.minimum(share, np.float32(1 / share.size)) for share in self.shares)
        return float(one.sum(dtype=np.float64)), float(other.sum(dtype=np.float64))

    @cached_property
    def has_content(self) -> tuple[bool, bool]:
        """Whether each of `shares` is non-zero."""
        one, other = self.shares
        return bool(one.any()), bool(other.any())

    @cached_property
    def writing(self) -> Map:
        """`lost`, clamped to 0..1."""
        return np.minimum(np.maximum(self.lost, 0), 1)

    @cached_property
    def position_in_token(self) -> Map | None:
        """Distribution of content inside each token; see `fraction_within_token`."""
        return None if self.fine is None else fraction_within_token(self.fine)


class RelevanceMaps(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Result of the relevance pass for one image. Maps are >= 0 and finite, of any scale."""

    image_maps: ImageMaps
    participatory: Map
    strength: float = 0.0  # logsumexp of the raw participatory scores; compares images of one request

    @cached_property
    def share(self) -> Map:
        """The participatory map, normalised."""
        return shares(self.participatory)

    @property
    def propositional(self) -> Map:
        return self.image_maps.propositional

    @property
    def perspectival(self) -> Map:
        return self.image_maps.perspectival

    @property
    def lost(self) -> Map:
        return self.image_maps.lost


class ScoredImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image with its relevance maps and sizes."""

    look: RelevanceMaps
    size: tuple[int, int]  # width, height of the source in pixels
    frame: Grid  # token grid at full detail
    grid: Grid  # of the global view; equal to `frame` if the image is at full detail


class BalanceWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Result of opponent processing. Each tension runs from 0 (first word) to 1 (second word)."""

    particularise: float = 0.5  # compress .. particularise
    explore: float = 0.5  # exploit .. explore
    diversify: float = 0.5  # focus .. diversify
    scorers: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)  # in the order of SCORERS, summing to 1


class ZoomChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The zoomed views chosen for one image."""

    regions: tuple[Region, ...] = ()  # in reading order
    gated: str | None = None  # why the gate chose none
    weights: BalanceWeights = BalanceWeights()
    relevance: Map  # the balanced map; sums to 1 or is zero

    @property
    def spent(self) -> int:
        """Tokens of the zoomed views, without the global view."""
        return sum(region.tokens for region in self.regions)
