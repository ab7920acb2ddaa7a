"""How large the first look is, before anything is known but sizes.

takes   what the plain processor would give each picture, the request's parameters, the rule for views
gives   the budget of the request, and the grid of each picture's global view
never   spends more than a budget that was given; makes a view larger than the plain one
"""

import math
from collections.abc import Sequence

import msgspec

from saccade.lod.values import Grid, LodParams, ViewRule

MEDIUM = 0.25  # of the tokens of full detail
AUTO = 0.5  # most that `auto` may spend; the gate and the price of a token keep it lower
LOOK = 0.6  # of a picture's budget: what the global view may take of it, where it may choose


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
    budget = _budget(full, params, rule)
    if sum(full) <= budget:
        return Glance(budget, tuple(frames))
    parts = divide(budget, full)
    share = 1.0 if params.detail == "low" else LOOK
    grids = tuple(_look(f, part, share, rule) for f, part in zip(frames, parts, strict=True))
    return Glance(budget, grids)


def _budget(full: list[int], params: LodParams, rule: ViewRule) -> int:
    least, most = rule.global_tokens
    if params.budget is not None:
        return min(params.budget, sum(full))
    if params.detail == "low":
        return sum(min(tokens, max(least, min(most, tokens // 4))) for tokens in full)
    share = MEDIUM if params.detail == "medium" else AUTO
    return sum(min(tokens, max(least, int(tokens * share))) for tokens in full)


def divide(budget: int, full: Sequence[int]) -> list[int]:
    """Whole parts of a budget in proportion to `full`, none above it, each at least 1; sums to the budget at
    most."""
    total = sum(full)
    parts = [max(1, min(tokens, budget * tokens // total)) for tokens in full]
    for i in sorted(range(len(parts)), key=lambda i: (-parts[i], i)):
        parts[i] -= min(parts[i] - 1, max(0, sum(parts) - budget))
    return parts


def _look(frame: Grid, part: int, share: float, rule: ViewRule) -> Grid:
    """The global view of one picture that may spend `part` tokens."""
    full = frame[0] * frame[1]
    if full <= part and full <= rule.global_tokens[1]:
        return frame
    least, most = rule.global_tokens
    wanted = min(max(int(part * share), least), most, part)
    return shrink(frame, wanted)


def shrink(frame: Grid, tokens: int) -> Grid:
    """The grid nearest in shape to `frame` of at most `tokens` tokens, as many of them as the shape lets."""
    rows, columns = frame
    if rows * columns <= tokens:
        return frame
    ratio = math.sqrt(tokens / (rows * columns))
    best = (1, min(columns, tokens)) if columns >= rows else (min(rows, tokens), 1)
    best_cost = math.inf
    for high in range(1, min(rows, tokens) + 1):
        wide = min(columns, tokens // high, max(1, round(columns * high / rows)))
        for near in (wide, min(columns, tokens // high, wide + 1)):
            shape = abs(math.log(near / high * rows / columns))
            cost = shape * 2 + abs(math.log(high * near / (rows * columns * ratio * ratio)))
            if cost < best_cost:
                best, best_cost = (high, near), cost
    return best
