"""What is made of still maps once is what every look would make of them: choices are the same to the bit."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.lod.allocate import Field, allocate
from saccade.lod.balance import NEIGHBOURHOOD, balance, refine
from saccade.lod.controller import PRICE, choose
from saccade.lod.types import (
    BLANK,
    FINE,
    SCORERS,
    Grid,
    ImageMaps,
    LodParams,
    Map,
    RelevanceMaps,
    ScoredImage,
    Scorer,
    ViewRule,
)


def drawn(grid: Grid, rng: np.random.Generator) -> Map:
    """Flat, peaked, partly or wholly empty, and below zero here and there: what maps may come to."""
    values = rng.random(grid) ** rng.choice([1, 12])
    values = values * (rng.random(grid) < rng.choice([0.0, 0.3, 1.0])) - rng.choice([0.0, 0.1])
    return np.asarray(values * rng.choice([1e-6, 1.0, 300.0]), np.float32)


def look(grid: Grid, seed: int) -> RelevanceMaps:
    rng = np.random.default_rng(seed)
    image_maps = ImageMaps(
        propositional=drawn(grid, rng),
        perspectival=drawn(grid, rng),
        lost=(rng.random(grid) * 1.5 - 0.2).astype(np.float32),
        fine=np.abs(drawn((grid[0] * FINE, grid[1] * FINE), rng)) if rng.integers(4) else None,
    )
    return RelevanceMaps(image_maps=image_maps, participatory=drawn(grid, rng), strength=float(rng.normal()))


# The twin: the same decision out of the raw maps of every look, one numpy call for each thing said.


def plain_shares(values: Map) -> Map:
    values = np.maximum(values, 0, dtype=np.float32)
    total = float(values.sum(dtype=np.float64))
    return values / np.float32(total) if total > 0 else np.zeros_like(values)


def plain_spread(share: Map) -> float:
    if share.size < 2:
        return 0.0
    seen = share[share > 0].astype(np.float64)
    return float(min(1.0, max(0.0, -(seen * np.log(seen)).sum() / np.log(share.size))))


def plain_places(share: Map) -> tuple[float, float]:
    (rows, columns), edge = share.shape, NEIGHBOURHOOD // 2
    padded = np.zeros((rows + 2 * edge, columns + 2 * edge))
    padded[edge : edge + rows, edge : edge + columns] = share
    high = np.add.reduce([padded[i : i + rows] for i in range(NEIGHBOURHOOD)])
    mass = np.add.reduce([high[:, i : i + columns] for i in range(NEIGHBOURHOOD)])
    row, column = divmod(int(mass.argmax()), columns)
    first, reach = float(mass[row, column]), NEIGHBOURHOOD - 1
    mass[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1] = 0.0
    return first, float(mass.max(initial=0.0))


def plain_agreement(one: Map, other: Map) -> float:
    flat = np.full_like(other, 1 / other.size)
    chance = float(np.minimum(flat, other).sum(dtype=np.float64))
    common = float(np.minimum(one, other).sum(dtype=np.float64))
    return 0.0 if chance >= 1 - 1e-6 else min(max((common - chance) / (1 - chance), 0.0), 1.0)


def plain_balance(one: RelevanceMaps, scorers: tuple[Scorer, ...]) -> tuple[Map, tuple[float, ...]]:
    """Relevance; the three tensions."""
    maps = {name: plain_shares(getattr(one, name)) for name in SCORERS}
    usable = [name for name in SCORERS if name in scorers and maps[name].any()]
    if not usable:
        return np.zeros_like(maps["propositional"]), (0.5, 0.5, 0.5)
    lead, others = maps[usable[-1]], [maps[name] for name in usable[:-1]]
    common = [plain_agreement(lead, other) for other in others]
    explore = min(max(plain_spread(lead) * (1 - max(common, default=0.0)), 0.0), 1.0)
    weights = [explore**2 / len(others) for _ in others] + [1 - explore**2 if others else 1.0]
    mixed = sum(np.float32(part) * maps[name] for name, part in zip(usable, weights, strict=True))
    relevance = plain_shares(np.asarray(mixed, np.float32))
    first, second = plain_places(relevance)
    particularise = float((relevance * np.clip(one.lost, 0, 1)).sum(dtype=np.float64))
    return relevance, (min(max(particularise, 0.0), 1.0), explore, second / first if first > 0 else 0.0)


def plain_finer(relevance: Map, fine: Map | None) -> Map:
    rows, columns = relevance.shape
    if fine is None:
        return np.repeat(np.repeat(relevance / np.float32(FINE * FINE), FINE, 0), FINE, 1)
    stands = np.maximum(fine, 0) + np.float32(BLANK) * fine.mean(dtype=np.float32) + np.float32(1e-9)
    stands = stands.reshape(rows, FINE, columns, FINE)
    share = stands / stands.sum((1, 3), keepdims=True)
    return np.asarray(share * relevance[:, None, :, None]).reshape(rows * FINE, columns * FINE)


grids = st.tuples(st.integers(1, 16), st.integers(1, 16))
scorers = st.sampled_from([SCORERS, ("participatory",), ("propositional", "perspectival"), ()])


@given(grids, st.integers(0, 10**6), scorers)
@settings(max_examples=150, deadline=None)
def test_a_balance_is_that_of_the_raw_maps_to_the_bit(
    grid: Grid, seed: int, asked: tuple[Scorer, ...]
) -> None:
    one = look(grid, seed)
    for again in (
        one,
        msgspec.structs.replace(one, image_maps=one.image_maps),
    ):  # another look at the same picture
        relevance, tensions = plain_balance(one, asked)
        found = balance(again, asked)
        weights = found.weights
        assert (weights.particularise, weights.explore, weights.diversify) == tensions
        assert np.array_equal(found.relevance, relevance)
        fine = refine(found.relevance, again.image_maps.position_in_token)
        assert np.array_equal(fine, plain_finer(relevance, one.image_maps.fine))
        assert fine.dtype == np.float32


@given(st.lists(grids, min_size=1, max_size=3), st.integers(0, 10**6), st.integers(16, 700))
@settings(max_examples=60, deadline=None)
def test_a_choice_is_that_of_the_raw_maps_to_the_bit(views: list[Grid], seed: int, left: int) -> None:
    rule = ViewRule()
    pictures = [
        ScoredImage(
            look=look(grid, seed + i),
            size=(grid[1] * 77, grid[0] * 77),
            frame=(grid[0] * 2 + 1, grid[1] * 2 + 1),
            grid=grid,
        )
        for i, grid in enumerate(views)
    ]
    budget = left + sum(rows * columns for rows, columns in views)
    chosen = choose(pictures, budget, LodParams(budget=budget), rule)
    strengths = np.array([one.look.strength for one in pictures])
    parts = np.exp(strengths - strengths.max())
    parts /= parts.sum()
    fields, prices = [], []
    for one, part in zip(pictures, parts, strict=True):
        relevance, (particularise, _, diversify) = plain_balance(one.look, SCORERS)
        most = min(8, max(1, round(rule.most_views * (0.5 + 0.5 * diversify)))) if relevance.any() else 0
        fine = plain_finer(relevance * np.float32(part), one.look.image_maps.fine)
        fields.append(Field(fine, one.size, one.frame, most=most))
        prices.append(PRICE[0] + (PRICE[1] - PRICE[0]) * particularise)
    assert tuple(choice.regions for choice in chosen) == allocate(fields, left, rule, min(prices))


def test_what_is_made_of_still_maps_is_made_once() -> None:
    image_maps = look((7, 9), 2).image_maps
    assert image_maps.position_in_token is image_maps.position_in_token
    assert image_maps.shares is image_maps.shares
    assert image_maps.writing is image_maps.writing


@pytest.mark.parametrize("name", ["propositional", "perspectival"])
def test_a_still_map_that_is_no_number_is_refused_at_every_look(name: str) -> None:
    one = look((3, 4), 1)
    bad = np.full((3, 4), math.nan, np.float32)
    one = msgspec.structs.replace(one, image_maps=msgspec.structs.replace(one.image_maps, **{name: bad}))
    for _ in range(2):
        with pytest.raises(ValueError, match="not finite"):
            balance(one)
