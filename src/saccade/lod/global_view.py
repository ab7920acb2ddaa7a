"""Sizes the global view of each image and the token budget of a request, from image sizes alone.

Never exceeds a given budget; a global view is never larger than full detail.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from saccade.lod.types import Grid, LodParams, ViewRule

MEDIUM = 0.25  # of the tokens of full detail
AUTO = (0.25, 0.5)  # of full detail's tokens: of the global view, and of all views
PLAIN = 1.25  # an image up to this multiple of its budget stays at full detail
LEAST_LOOK = 32  # fewest tokens of a global view that is followed by zoomed views
# (budget from which it holds, tokens reserved for zoomed views); the global view gets the rest
RESERVES = ((512, 256), (128, 64), (60, 24), (0, 16))


class GlobalViews(msgspec.Struct, frozen=True):
    budget: int  # visual tokens of all images together
    grids: tuple[Grid, ...]  # of the global views; the full-detail grid if the image is not reduced


def plan_global_views(frames: Sequence[Grid], params: LodParams, rule: ViewRule) -> GlobalViews:
    """Global views for the images of a request; `frames` are their token grids at full detail."""
    full = [rows * columns for rows, columns in frames]
    if params.budget is not None and params.budget < len(frames):
        raise ValueError(f"budget is {params.budget} for {len(frames)} images; each needs a token at least")
    if params.detail == "high" and params.budget is None:
        return GlobalViews(sum(full), tuple(frames))
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
    return GlobalViews(sum(parts), tuple(grids))


def _part(tokens: int, params: LodParams, rule: ViewRule) -> int:
    """Token budget of an image of `tokens` at full detail when the request gives no budget."""
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
    """Tokens of the global view of an image with the budget `part`."""
    kept = next(tokens for budget, tokens in RESERVES if part >= budget)
    cheapest = min(rule.zoom_tokens, default=0)
    kept = kept if kept >= cheapest else cheapest
    if part - kept < LEAST_LOOK:
        return part  # too few tokens for two views
    return min(part - kept, rule.global_tokens[1])


def divide(budget: int, full: Sequence[int]) -> list[int]:
    """Split a budget in proportion to `full`: integers, each at least 1 and at most `full`, in sum at most
    the budget."""
    total = sum(full)
    parts = [max(1, min(tokens, budget * tokens // total)) for tokens in full]
    for i in sorted(range(len(parts)), key=lambda i: (-parts[i], i)):
        parts[i] -= min(parts[i] - 1, max(0, sum(parts) - budget))
    return parts


@lru_cache(maxsize=1024)  # 0.1 ms per call
def shrink(frame: Grid, tokens: int) -> Grid:
    """The grid of at most `tokens` tokens that trades aspect ratio of `frame` against unused tokens."""
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
