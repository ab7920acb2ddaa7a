"""The decision: given one look at each picture of a request, which parts are seen again, larger.

takes   looks, the request's parameters and budget, the checkpoint's rule for views
gives   a `Choice` per picture
never   imports torch; spends more than the budget: global views and zoomed ones together
"""

import math
from collections.abc import Sequence

import numpy as np

from saccade.lod.allocate import Field, allocate
from saccade.lod.balance import Balanced, balance, finer, spread
from saccade.lod.types import FINE, Choice, LodParams, Picture, ViewRule

PRICE = (2e-3, 5e-4)  # relevance a token must bring in: when compressing, when particularising
SHOWN = 0.05  # writing where the question looks, by how much smaller the global view makes it: less suffices
SPREAD = 0.65  # of the question's map (balance.spread), above which no window holds what matters


def choose(pictures: Sequence[Picture], budget: int, params: LodParams, rule: ViewRule) -> tuple[Choice, ...]:
    """`budget` counts global views too: what they leave is for zooming."""
    for picture in pictures:
        _check(picture)
    balanced = [balance(one.look, params.scorers, not params.balance) for one in pictures]
    gated = [_gate(one, found, params) for one, found in zip(pictures, balanced, strict=True)]
    left = budget - sum(one.grid[0] * one.grid[1] for one in pictures)
    share = _shares(pictures)
    fields, prices = [], []
    for one, found, why, part in zip(pictures, balanced, gated, share, strict=True):
        most = 0 if why else max(1, round(rule.most_views * (0.5 + 0.5 * found.weights.diversify)))
        most = min(most, rule.most_views)
        relevance = finer(found.relevance * np.float32(part), one.look.still.within)
        fields.append(Field(relevance, one.size, one.frame, most=most))
        prices.append(PRICE[0] + (PRICE[1] - PRICE[0]) * found.weights.particularise)
    regions = allocate(fields, left, rule, min(prices, default=0.0))
    return tuple(
        Choice(regions=some, gated=why, weights=found.weights, relevance=found.relevance)
        for some, why, found in zip(regions, gated, balanced, strict=True)
    )


def _gate(picture: Picture, found: Balanced, params: LodParams) -> str | None:
    """Why the global view suffices, if it does."""
    if picture.grid[0] * picture.grid[1] >= picture.frame[0] * picture.frame[1]:
        return "the global view is the whole picture at full detail"
    if not found.relevance.any():
        return "nothing in the picture is relevant"
    if not params.gate or not params.open_ended:
        return None  # whoever names a price has it spent
    asked = "participatory" in params.scorers and picture.look.participatory.any()
    lead = picture.look.share if asked else found.relevance
    smaller = 1 - math.sqrt(picture.grid[0] * picture.grid[1] / (picture.frame[0] * picture.frame[1]))
    lost = smaller * float((lead * picture.look.still.writing).sum(dtype=np.float64))
    if lost < SHOWN:
        return f"the global view loses {lost:.2f} of the detail where the question looks, less than {SHOWN}"
    wide = spread(lead) if asked else 0.0  # without a question relevance is always spread
    if wide > SPREAD:
        return f"the question looks everywhere: the spread of its map is {wide:.2f}, above {SPREAD}"
    return None


def _shares(pictures: Sequence[Picture]) -> list[float]:
    """How much of the request's relevance lies in each picture: 1 for a lone one."""
    if len(pictures) == 1 and math.isfinite(pictures[0].look.strength):
        return [1.0]
    strengths = np.array([one.look.strength for one in pictures], np.float64)
    if not np.isfinite(strengths).all():
        raise ValueError(f"strength of a look is {strengths.tolist()}; finite numbers are needed")
    weight = np.exp(strengths - strengths.max(initial=-np.inf))
    return [float(part) for part in weight / weight.sum()]


def _check(picture: Picture) -> None:
    look = picture.look
    for name in ("propositional", "perspectival", "participatory", "lost"):
        if getattr(look, name).shape != picture.grid:
            raise ValueError(
                f"the {name} map is {getattr(look, name).shape}; the view is {picture.grid} tokens"
            )
    wanted = (picture.grid[0] * FINE, picture.grid[1] * FINE)
    fine = look.still.fine
    if fine is not None and fine.shape != wanted:
        raise ValueError(f"the fine map is {fine.shape}; {wanted} are needed")
    if min(*picture.size, *picture.frame, *picture.grid) < 1:
        raise ValueError(
            f"a picture of {picture.size}, frame {picture.frame}, view {picture.grid}: all need 1"
        )
