"""Values of level of detail: what is asked, what one look gave, what was chosen.

takes   nothing; these are values
gives   the shapes the rooms of `lod` exchange with each other and with the engine
never   imports torch; imports anything of ours
"""

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
LADDER = (16, 64, 196, 400)  # tokens of a zoomed view; skipping a region costs none
FINE = 4  # places along a token's side at which it is known where in it something stands
BLANK = 0.2  # of the mean: what a place without anything on it counts beside others of its cell


def _as_tuple(struct: msgspec.Struct, name: str) -> None:
    """Callers may give a list; what is asked alike is to be equal, and found again."""
    value = getattr(struct, name)
    if type(value) is not tuple:
        msgspec.structs.force_setattr(struct, name, tuple(value))


class Region(msgspec.Struct, frozen=True):
    """A zoomed view to be made."""

    box: Box
    grid: Grid
    score: float  # share of the picture's relevance that lies in it

    def __post_init__(self) -> None:
        for name in ("box", "grid"):
            _as_tuple(self, name)

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]


class LodParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of level of detail. `scorers`, `balance` and `gate` are for ablations."""

    detail: Detail = "auto"
    budget: int | None = None  # visual tokens of all pictures together, global views included
    scorers: tuple[Scorer, ...] = SCORERS
    balance: bool = True  # False: the scorers weigh the same, whatever the maps look like
    gate: bool = True  # False: with "auto", zoom even where the global view seems to suffice
    zooms: tuple[tuple[Region, ...], ...] | None = None  # of each picture; given: no look is taken

    def __post_init__(self) -> None:
        _as_tuple(self, "scorers")
        if self.zooms is not None:
            msgspec.structs.force_setattr(self, "zooms", tuple(map(tuple, self.zooms)))

    @property
    def open_ended(self) -> bool:
        """Whether how much is spent is left to us: not with a budget, or a level that stands for one."""
        return self.detail == "auto" and self.budget is None


class ViewRule(msgspec.Struct, frozen=True, kw_only=True):
    """The views a checkpoint can be given. The defaults are for one that was never trained with views."""

    global_tokens: tuple[int, int] = (144, 256)  # fewest and most tokens of a global view
    zoom_tokens: tuple[int, ...] = LADDER
    square: bool = False  # zoomed views are square; else as many tokens may also stand in a long row
    most_views: int = 8  # zoomed views of one picture
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
    """A map that sums to 1; all zero where it has nothing."""
    values = np.maximum(values, 0, dtype=np.float32)
    total = float(np.add.reduce(values, axis=None, dtype=np.float64))
    if not math.isfinite(total):
        raise ValueError("a map of relevance has values that are not finite")
    return values / np.float32(total) if total > 0 else np.zeros_like(values)


def in_tokens(fine: Map) -> Map:
    """Where in a token something stands, as shares of it: [rows, FINE, columns, FINE]. `fine` has FINE times
    as many rows and columns as there are tokens."""
    mean = fine.mean(dtype=np.float32)
    stands = np.maximum(fine, 0) + np.float32(BLANK) * mean + np.float32(1e-9)
    rows, columns = stands.shape[0] // FINE, stands.shape[1] // FINE
    stands = stands.reshape(rows, FINE, columns, FINE)
    found: Map = stands / stands.sum((1, 3), keepdims=True)
    return found


class StillMaps(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a picture says without a question, of one view of it: every look at that refers to it. What a
    choice makes of the maps is computed once, and to be read only."""

    propositional: Map
    perspectival: Map
    lost: Map  # what a coarse view loses first: how much writing there is
    fine: Map | None = None  # propositional, FINE times as many rows and columns; None: as if flat

    @cached_property
    def shares(self) -> tuple[Map, Map]:
        """Of propositional and perspectival."""
        return shares(self.propositional), shares(self.perspectival)

    @cached_property
    def chances(self) -> tuple[float, float]:
        """What a flat map has in common with either, of 1."""
        one, other = (np.minimum(share, np.float32(1 / share.size)) for share in self.shares)
        return float(one.sum(dtype=np.float64)), float(other.sum(dtype=np.float64))

    @cached_property
    def said(self) -> tuple[bool, bool]:
        """Whether there is anything in either."""
        one, other = self.shares
        return bool(one.any()), bool(other.any())

    @cached_property
    def writing(self) -> Map:
        """`lost`, between 0 and 1."""
        return np.minimum(np.maximum(self.lost, 0), 1)

    @cached_property
    def within(self) -> Map | None:
        """Where in a token something stands, as `in_tokens` has it."""
        return None if self.fine is None else in_tokens(self.fine)


class Look(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What one look at a picture gave. Maps are >= 0 and finite, of any scale; `lost` is 0..1."""

    still: StillMaps
    participatory: Map
    strength: float = 0.0  # log of the summed raw participatory scores: compares pictures of one request

    @cached_property
    def share(self) -> Map:
        """The participatory map, summing to 1."""
        return shares(self.participatory)

    @property
    def propositional(self) -> Map:
        return self.still.propositional

    @property
    def perspectival(self) -> Map:
        return self.still.perspectival

    @property
    def lost(self) -> Map:
        return self.still.lost


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture that was looked at."""

    look: Look
    size: tuple[int, int]  # width, height of the source in pixels
    frame: Grid  # what the plain processor would give it
    grid: Grid  # of the global view; equal to `frame` where it is seen in full and never zoomed


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What balancing came to. Tensions run from 0 (first word) to 1 (second word)."""

    particularise: float = 0.5  # compress .. particularise
    explore: float = 0.5  # exploit .. explore
    diversify: float = 0.5  # focus .. diversify
    scorers: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)  # in the order of SCORERS, summing to 1


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The zoomed views of one picture."""

    regions: tuple[Region, ...] = ()  # in reading order
    gated: str | None = None  # why there are none, where the gate decided so
    weights: Weights = Weights()
    relevance: Map  # what was allocated by; sums to 1, or is all zero

    @property
    def spent(self) -> int:
        """Tokens of the zoomed views; the global view is not in it."""
        return sum(region.tokens for region in self.regions)
