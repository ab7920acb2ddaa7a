"""Opponent processing: how the three scorers are weighed, from how their maps lie in space.

takes   the maps of one look
gives   three tensions between 0 and 1, a weight per scorer, one map of relevance
never   imports torch; needs training

compress .. particularise   how much writing there is where it is relevant: what a token may cost
exploit .. explore          how spread the question's map is, and how far the others disagree: their weight,
                            all of it where the question's map is flat, for that says nothing
focus .. diversify          how strong the second place is beside the first: how many views
"""

from typing import NamedTuple

import numpy as np

from saccade.lod.types import FINE, SCORERS, Look, Map, Scorer, Weights, shares

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


def agreement(one: Map, other: Map, chance: float) -> float:
    """How much more of another map one has in common with it than a flat one has, which is `chance`: 1 is all
    there is, 0 no more, and of a map that is flat itself nobody knows more. Both sum to 1."""
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


def balance(look: Look, scorers: tuple[Scorer, ...] = SCORERS, even: bool = False) -> Balanced:
    """Relevance of one look by the scorers asked for. `even`: equal weights, middling tensions."""
    maps = _speaking(look, scorers)
    given = dict.fromkeys(SCORERS, 0.0)
    if not maps:
        return Balanced(np.zeros_like(look.share), Weights(scorers=(0.0, 0.0, 0.0)))
    explore = _explore(look, maps)
    if even or len(maps) == 1:
        given |= dict.fromkeys(maps, 1 / len(maps))
    else:
        given |= _by_rule(maps, explore)
    mixed = sum(np.float32(given[name]) * share for name, share in maps.items())
    relevance = shares(np.asarray(mixed, np.float32))
    weights = given["propositional"], given["perspectival"], given["participatory"]
    if even:
        return Balanced(relevance, Weights(scorers=weights))
    found = Weights(
        particularise=_particularise(relevance, look.still.writing),
        explore=explore,
        diversify=_diversify(relevance),
        scorers=weights,
    )
    return Balanced(relevance, found)


def finer(relevance: Map, within: Map | None) -> Map:
    """Relevance over FINE times as many rows and columns: what a cell has lies where something stands in it.
    A view's token is coarser than a row of writing; which token matters is the question's, where in it the
    texture's. `within`: as `StillMaps.within`; None: nobody knows."""
    rows, columns = relevance.shape
    if within is None:
        return np.repeat(np.repeat(relevance / np.float32(FINE * FINE), FINE, 0), FINE, 1)
    found: Map = (within * relevance[:, None, :, None]).reshape(rows * FINE, columns * FINE)
    return found.astype(np.float32, copy=False)


def _speaking(look: Look, scorers: tuple[Scorer, ...]) -> dict[Scorer, Map]:
    """The maps asked for that say something; the last one leads: the question's, where there is one."""
    maps = zip(SCORERS, (*look.still.shares, look.share), strict=True)
    said = *look.still.said, bool(look.share.any())
    return {name: share for (name, share), there in zip(maps, said, strict=True) if there and name in scorers}


def _particularise(share: Map, writing: Map) -> float:
    return _within(float((share * writing).sum(dtype=np.float64)))


def _explore(look: Look, maps: dict[Scorer, Map]) -> float:
    *others, lead = maps
    chances = dict(zip(SCORERS[:-1], look.still.chances, strict=True))  # the question's map is nobody's other
    common = max((agreement(maps[lead], maps[name], chances[name]) for name in others), default=0.0)
    return _within(spread(maps[lead]) * (1 - common))


def _diversify(share: Map) -> float:
    first, second = places(share)
    return second / first if first > 0 else 0.0


def _within(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _by_rule(maps: dict[Scorer, Map], explore: float) -> dict[Scorer, float]:
    """The leading scorer has what exploring leaves, and little is lost to it before its map is wide; the
    others share the rest."""
    *others, lead = maps
    rest = explore**2
    return {**dict.fromkeys(others, rest / len(others)), lead: 1 - rest}
