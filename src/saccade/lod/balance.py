"""Opponent processing: how the three scorers are weighed, from how their maps lie in space.

takes   the maps of one look
gives   three tensions between 0 and 1, a weight per scorer, one map of relevance
never   imports torch; needs training: leanings, where a checkpoint has learned them, replace the rule

compress .. particularise   how much writing there is where the question looks: what a token may cost
exploit .. explore          how spread the question's map is, and how far the others disagree: their weight,
                            all of it where the question's map is flat, for that says nothing
focus .. diversify          how strong the second place is beside the first: how many views
"""

import math
from typing import NamedTuple

import numpy as np

from saccade.lod.values import FINE, SCORERS, Leanings, Look, Map, Scorer, Weights, shares

FLAT = 1e-6  # of the mass of a map that a flat one may lack
NEIGHBOURHOOD = 3  # cells along the side of the square that counts as one place


class Balanced(NamedTuple):
    relevance: Map  # sums to 1, or is all zero
    weights: Weights


def spread(share: Map) -> float:
    """Entropy of a map that sums to 1, over that of a flat one: 0 is one cell, 1 is everywhere."""
    if share.size < 2:
        return 0.0
    seen = share[share > 0].astype(np.float64)
    return float(min(1.0, max(0.0, -(seen * np.log(seen)).sum() / np.log(share.size))))


def agreement(one: Map, other: Map) -> float:
    """Common mass of two maps that sum to 1, of what a flat one would not have in common with the other: 1 is
    the same map, 0 one that knows no more of it than a flat one."""
    chance = float(np.minimum(other, np.float32(1 / other.size)).sum(dtype=np.float64))
    common = float(np.minimum(one, other).sum(dtype=np.float64))
    return _within((common - chance) / (1 - chance)) if chance < 1 - FLAT else 0.0


def places(share: Map) -> tuple[float, float]:
    """Mass of the heaviest neighbourhood, and of the heaviest one that shares no cell with it."""
    (rows, columns), edge = share.shape, NEIGHBOURHOOD // 2
    padded = np.zeros((rows + 2 * edge, columns + 2 * edge))
    padded[edge : edge + rows, edge : edge + columns] = share
    # Sums of shifted slices: on a map this small a tenth of what a view of all windows takes.
    high = padded[:rows]
    for i in range(1, NEIGHBOURHOOD):
        high = high + padded[i : i + rows]
    mass = high[:, :columns]
    for i in range(1, NEIGHBOURHOOD):
        mass = mass + high[:, i : i + columns]
    row, column = divmod(int(mass.argmax()), mass.shape[1])
    first = float(mass[row, column])
    reach = NEIGHBOURHOOD - 1
    mass[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1] = 0.0
    return first, float(mass.max(initial=0.0))


def balance(
    look: Look, scorers: tuple[Scorer, ...] = SCORERS, even: bool = False, leanings: Leanings | None = None
) -> Balanced:
    """Relevance of one look by the scorers asked for. `even`: equal weights, middling tensions. `leanings`:
    weights come of these and the tensions, not of the rule."""
    maps = dict(zip(SCORERS, (*look.still.shares, look.share), strict=True))
    said = *look.still.said, bool(look.share.any())
    usable = [name for name, there in zip(SCORERS, said, strict=True) if there and name in scorers]
    if not usable:
        return Balanced(np.zeros_like(maps["propositional"]), Weights(scorers=(0.0, 0.0, 0.0)))
    tensions = Weights() if even else _tensions(maps, look.still.writing, usable)
    if even or len(usable) == 1:
        given = dict.fromkeys(usable, 1 / len(usable))
    else:
        given = _weights(usable, tensions.explore) if leanings is None else _lean(usable, tensions, leanings)
    by = given.get
    mixed = sum(np.float32(given[name]) * maps[name] for name in usable)
    weights = Weights(
        particularise=tensions.particularise,
        explore=tensions.explore,
        diversify=tensions.diversify,
        scorers=(by("propositional", 0.0), by("perspectival", 0.0), by("participatory", 0.0)),
    )
    return Balanced(shares(np.asarray(mixed, np.float32)), weights)


def finer(relevance: Map, within: Map | None) -> Map:
    """Relevance over FINE times as many rows and columns: what a cell has lies where something stands in it.
    A view's token is coarser than a row of writing; which token matters is the question's, where in it the
    texture's. `within`: as `StillMaps.within`; None: nobody knows."""
    rows, columns = relevance.shape
    if within is None:
        return np.repeat(np.repeat(relevance / np.float32(FINE * FINE), FINE, 0), FINE, 1)
    found: Map = (within * relevance[:, None, :, None]).reshape(rows * FINE, columns * FINE)
    return found.astype(np.float32, copy=False)


def _tensions(maps: dict[Scorer, Map], writing: Map, usable: list[Scorer]) -> Weights:
    lead = maps[usable[-1]]  # the question's map where there is one
    others = [maps[name] for name in usable[:-1]]
    common = max((agreement(lead, other) for other in others), default=0.0)
    first, second = places(lead)
    return Weights(
        particularise=_within(float((lead * writing).sum(dtype=np.float64))),
        explore=_within(spread(lead) * (1 - common)),
        diversify=second / first if first > 0 else 0.0,
    )


def _within(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _weights(usable: list[Scorer], explore: float) -> dict[Scorer, float]:
    """The leading scorer has what exploring leaves, and little is lost to it before its map is wide; the
    others share the rest."""
    *others, lead = usable
    rest = explore**2
    return {**dict.fromkeys(others, rest / len(others)), lead: 1 - rest}


def _lean(usable: list[Scorer], tensions: Weights, leanings: Leanings) -> dict[Scorer, float]:
    """As was learned of the tensions; among those that have something to say."""
    felt = 1.0, tensions.particularise, tensions.explore, tensions.diversify
    by_name = dict(zip(SCORERS, leanings, strict=True))
    leaning = {name: sum(a * b for a, b in zip(by_name[name], felt, strict=True)) for name in usable}
    most = max(leaning.values())
    strength = {name: math.exp(value - most) for name, value in leaning.items()}
    total = sum(strength.values())
    return {name: value / total for name, value in strength.items()}
