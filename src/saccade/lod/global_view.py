"""How large the first look is, before anything is known but sizes.

takes   what the plain processor would give each picture, the request's parameters, the rule for views
gives   the budget of the request, and the grid of each picture's global view
never   spends more than a budget that was given; makes a view larger than the plain one
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from saccade.lod.types import Grid, LodParams, ViewRule

MEDIUM = 0.25  # of the tokens of full detail
AUTO = (0.25, 0.5)  # of the tokens of full detail: the first look's, and the most in all
PLAIN = 1.25  # a picture of at most so many times its budget is not worth two views
LEAST_LOOK = 32  # tokens below which a global view no longer tells where things are
# tokens kept for zooming, from so large a budget on; what is not kept goes into the global view
RESERVES = ((512, 256), (128, 64), (60, 24), (0, 16))


class Glance(msgspec.Struct, frozen=True):
    budget: int  # visual tokens of all pictures together
    grids: tuple[Grid, ...]  # of the global views; the plain processor's grid: seen in full, never zoomed


def glance(frames: Sequence[Grid], params: LodParams, rule: ViewRule) -> Glance:
    """First looks for the pictures of a request; `frames` are the plain processor's token grids."""
    full = [rows * columns for rows, columns in frames]
    if params.budget is not None and params.budget < len(frames):
        raise ValueError(f"budget is {params.budget} for {len(frames)} pictures; each needs a token at least")
    if params.detail == "high" and params.budget is None:
        return Glance(sum(full), tuple(frames))
    if params.budget is not None:
        parts = divide(min(params.budget, sum(full)), full)
    else:
        parts = [_part(tokens, params, rule) for tokens in full]
    if params.detail == "low":
        looks = [min(part, rule.global_tokens[1]) for part in parts]
    elif params.detail == "auto" and params.budget is None:
        looks = [_bounded(int(tokens * AUTO[0]), rule) for tokens in full]
    else:
        looks = [_look(part, rule) for part in parts]
    grids = [
        frame if tokens <= part else shrink(frame, min(look, part))
        for frame, tokens, part, look in zip(frames, full, parts, looks, strict=True)
    ]
    return Glance(sum(parts), tuple(grids))


def _part(tokens: int, params: LodParams, rule: ViewRule) -> int:
    """What a picture of `tokens` at full detail may cost where the request has no budget of its own."""
    if params.detail == "low":
        return min(tokens, rule.global_tokens[0])
    if params.detail == "medium":
        part = max(int(tokens * MEDIUM), rule.global_tokens[0])
    else:
        part = max(int(tokens * AUTO[1]), rule.global_tokens[0] + min(rule.zoom_tokens, default=0))
    return tokens if tokens <= part * PLAIN else part


def _bounded(tokens: int, rule: ViewRule) -> int:
    least, most = rule.global_tokens
    return min(max(tokens, least), most)


def _look(part: int, rule: ViewRule) -> int:
    """Tokens of the global view of a picture that may spend `part`."""
    kept = next(tokens for budget, tokens in RESERVES if part >= budget)
    cheapest = min(rule.zoom_tokens, default=0)
    kept = kept if kept >= cheapest else cheapest
    if part - kept < LEAST_LOOK:
        return part  # too little for two views
    return min(part - kept, rule.global_tokens[1])


def divide(budget: int, full: Sequence[int]) -> list[int]:
    """Whole parts of a budget in proportion to `full`, none above it, each at least 1; they sum to the budget
    at most."""
    total = sum(full)
    parts = [max(1, min(tokens, budget * tokens // total)) for tokens in full]
    for i in sorted(range(len(parts)), key=lambda i: (-parts[i], i)):
        parts[i] -= min(parts[i] - 1, max(0, sum(parts) - budget))
    return parts


@lru_cache(maxsize=1024)  # pictures of one size have the same: 0.1 ms of every question about one
def shrink(frame: Grid, tokens: int) -> Grid:
    """The grid nearest in shape to `frame` of at most `tokens` tokens, as many of them as the shape lets."""
    rows, columns = frame
    if rows * columns <= tokens:
        return frame
    best, best_cost = (1, 1), math.inf
    for high in range(1, min(rows, tokens) + 1):
        wide = min(columns, tokens // high, max(1, round(columns * high / rows)))
        for near in (wide, min(columns, tokens // high, wide + 1)):
            shape = abs(math.log(near / high * rows / columns))
            cost = 2 * shape + math.log(tokens / (high * near))
            if cost < best_cost:
                best, best_cost = (high, near), cost
    return best
