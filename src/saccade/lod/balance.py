"""Opponent processing: weighs the three scorers by the shape of their maps.

compress .. particularise   how much text is in relevant regions; sets the price of a token
exploit .. explore          how spread out the question's map is and how far the other maps disagree with it;
                            sets the weight of the other maps, all of it if the question's map is flat
focus .. diversify          how strong the second region is beside the first; sets the number of views
"""

from typing import NamedTuple

import numpy as np

from saccade.lod.types import FINE, SCORERS, BalanceWeights, Map, RelevanceMaps, Scorer, shares

FLAT = 1e-6  # tolerance for calling a map uniform
NEIGHBOURHOOD = 3  # side in cells of the square that counts as one region


class Balanced(NamedTuple):
    relevance: Map  # sums to 1, or is all zero
    weights: BalanceWeights


def spread(share: Map) -> float:
    """Normalised entropy of a map that sums to 1: 0 for a single cell, 1 for a uniform map."""
    if share.size < 2:
        return 0.0
    seen = share[share > 0].astype(np.float64)
    return float(min(1.0, max(0.0, -(seen * np.log(seen)).sum() / np.log(share.size))))


def agreement(one: Map, other: Map, chance: float) -> float:
    """Overlap of two maps that sum to 1, beyond the overlap `chance` of a uniform map: 0 for no more than
    that, 1 for equal maps. A uniform `other` gives 0."""
    common = float(np.minimum(one, other).sum(dtype=np.float64))
    return _within((common - chance) / (1 - chance)) if chance < 1 - FLAT else 0.0


def top_regions(share: Map) -> tuple[float, float]:
    """Mass of the heaviest neighbourhood and of the heaviest one disjoint from it."""
    (rows, columns), edge = share.shape, NEIGHBOURHOOD // 2
    padded = np.zeros((rows + 2 * edge, columns + 2 * edge))
    padded[edge : edge + rows, edge : edge + columns] = share
    # Sums of shifted slices take a tenth of the time of a sliding window view on maps this small.
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


def balance(look: RelevanceMaps, scorers: tuple[Scorer, ...] = SCORERS, even: bool = False) -> Balanced:
    """Relevance of one image by the given scorers. `even`: equal weights, neutral tensions."""
    maps = _maps_with_content(look, scorers)
    given = dict.fromkeys(SCORERS, 0.0)
    if not maps:
        return Balanced(np.zeros_like(look.share), BalanceWeights(scorers=(0.0, 0.0, 0.0)))
    explore = _explore(look, maps)
    if even or len(maps) == 1:
        given |= dict.fromkeys(maps, 1 / len(maps))
    else:
        given |= _by_rule(maps, explore)
    mixed = sum(np.float32(given[name]) * share for name, share in maps.items())
    relevance = shares(np.asarray(mixed, np.float32))
    weights = given["propositional"], given["perspectival"], given["participatory"]
    if even:
        return Balanced(relevance, BalanceWeights(scorers=weights))
    found = BalanceWeights(
        particularise=_particularise(relevance, look.image_maps.writing),
        explore=explore,
        diversify=_diversify(relevance),
        scorers=weights,
    )
    return Balanced(relevance, found)


def refine(relevance: Map, position_in_token: Map | None) -> Map:
    """Relevance at FINE times the resolution. A token is coarser than a line of text: the question decides
    which token matters, the texture where inside it. `position_in_token`: as in ImageMaps; None: uniform."""
    rows, columns = relevance.shape
    if position_in_token is None:
        return np.repeat(np.repeat(relevance / np.float32(FINE * FINE), FINE, 0), FINE, 1)
    found: Map = (position_in_token * relevance[:, None, :, None]).reshape(rows * FINE, columns * FINE)
    return found.astype(np.float32, copy=False)


def _maps_with_content(look: RelevanceMaps, scorers: tuple[Scorer, ...]) -> dict[Scorer, Map]:
    """The requested maps that are not empty, in the order of SCORERS: the last one leads."""
    maps = zip(SCORERS, (*look.image_maps.shares, look.share), strict=True)
    has_content = *look.image_maps.has_content, bool(look.share.any())
    return {
        name: share
        for (name, share), there in zip(maps, has_content, strict=True)
        if there and name in scorers
    }


def _particularise(share: Map, writing: Map) -> float:
    return _within(float((share * writing).sum(dtype=np.float64)))


def _explore(look: RelevanceMaps, maps: dict[Scorer, Map]) -> float:
    *others, lead = maps
    chances = dict(zip(SCORERS[:-1], look.image_maps.chances, strict=True))
    common = max((agreement(maps[lead], maps[name], chances[name]) for name in others), default=0.0)
    return _within(spread(maps[lead]) * (1 - common))


def _diversify(share: Map) -> float:
    first, second = top_regions(share)
    return second / first if first > 0 else 0.0


def _within(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _by_rule(maps: dict[Scorer, Map], explore: float) -> dict[Scorer, float]:
    """The leading scorer gets 1 - explore^2, the others share the rest."""
    *others, lead = maps
    rest = explore**2
    return {**dict.fromkeys(others, rest / len(others)), lead: 1 - rest}
