"""How much of each picture is seen at first, and what zooming into them may cost.

takes   what a request asks of detail, and the token grid of each picture at full detail
gives   `Sights`: the grid of each picture's first view, which of them may be zoomed, the budget of those
never   spends more visual tokens than were allowed; looks at pixels

| asked                    | seen                                                                        |
|--------------------------|-----------------------------------------------------------------------------|
| nothing, or detail high  | full detail: one view, as the checkpoint's processor makes it               |
| detail low               | the smallest global view the checkpoint is made for, alone                  |
| detail medium            | the global view and zoomed ones, about a quarter of full detail             |
| detail auto              | the same, up to half, where the checkpoint was trained for it, or lod is on |
| lod on, or visual_tokens | as auto, whatever the checkpoint; a preview too, which only looks           |
| lod off                  | full detail, but low stays low; visual_tokens then resizes pictures to fit  |
"""

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.errors import InvalidValue
from saccade.lod.checkpoint_views import CheckpointViews
from saccade.lod.global_view import divide, glance, shrink
from saccade.lod.types import Detail, Grid, LodParams, Region

ZOOMING: tuple[Detail, ...] = ("auto", "medium")


@dataclass(frozen=True)
class Wishes:
    """What was asked for the pictures of one request."""

    params: LodParams | None = None  # None: nothing said
    lod: bool | None = None
    visual_tokens: int | None = None  # of all pictures together
    only_look: bool = False  # what would be zoomed is the answer
    details: tuple[Detail | None, ...] = ()  # of each picture; None: nothing said

    @property
    def budget(self) -> int | None:
        given = self.visual_tokens
        return given if given is not None or self.params is None else self.params.budget

    @property
    def without_lod(self) -> bool:
        """Whether it was refused; not if nothing was said of it."""
        return self.lod is not None and not self.lod

    @property
    def zooms(self) -> tuple[tuple[Region, ...], ...] | None:
        return None if self.params is None else self.params.zooms


@dataclass(frozen=True)
class Sights:
    grids: tuple[Grid, ...]  # of the first views
    zoomable: tuple[bool, ...]
    budget: int  # of those that may be zoomed, their first views included
    most_views: int

    def most_tokens(self, framing: int) -> int:
        """Tokens of all views at most; `framing`: those around each zoomed one."""
        tokens = [rows * columns for rows, columns in self.grids]
        looked = sum(count for count, free in zip(tokens, self.zoomable, strict=True) if free)
        left = max(self.budget - looked, 0) if looked else 0
        return sum(tokens) + left + min(self.most_views, left) * framing


def sights(frames: Sequence[Grid], wishes: Wishes, views: CheckpointViews) -> Sights:
    """`frames`: the token grid of each picture at full detail."""
    _check(wishes, len(frames))
    details = [_resolved(said, wishes, views.trained) for said in wishes.details]
    full = [rows * columns for rows, columns in frames]
    grids = list(frames)
    fixed = sum(tokens for tokens, detail in zip(full, details, strict=True) if detail == "high")
    free = [i for i, detail in enumerate(details) if detail != "high"]
    budget = wishes.budget
    if budget is not None:
        if wishes.without_lod:
            return _resized(frames, budget)
        if budget - fixed < len(free):
            raise InvalidValue(
                f"visual_tokens is {budget}; {len(free)} pictures need a token each beside the {fixed} of "
                "those at full detail; raise it, or send fewer pictures",
                param="visual_tokens",
            )
    params = wishes.params or LodParams()
    parts = (
        divide(budget - fixed, [full[i] for i in free]) if budget is not None and free else [0] * len(free)
    )
    spent, zoomable = 0, [False] * len(frames)
    for i, part in zip(free, parts, strict=True):
        asked = LodParams(detail=details[i], budget=part if budget is not None else None)
        first = glance([frames[i]], asked, views.rule)
        grids[i] = first.grids[0]
        zoomable[i] = details[i] in ZOOMING and grids[i] != frames[i] and params.zooms is None
        spent += first.budget if zoomable[i] else 0
    if wishes.zooms and budget is not None:
        given = sum(region.tokens for regions in wishes.zooms for region in regions)
        return _beside(given, budget, frames, grids)
    looked = [grids[i][0] * grids[i][1] for i in range(len(frames)) if zoomable[i]]
    if spent - sum(looked) < min(views.rule.zoom_tokens, default=1):  # not even the smallest view
        zoomable = [False] * len(frames)
    most = views.rule.most_views * sum(zoomable)
    return Sights(tuple(grids), tuple(zoomable), spent if any(zoomable) else 0, most)


def _resolved(said: Detail | None, wishes: Wishes, trained: bool) -> Detail:
    said = said if said is not None else wishes.params.detail if wishes.params is not None else None
    on = wishes.lod or wishes.only_look or wishes.params is not None or wishes.budget is not None
    if wishes.without_lod:
        return "low" if said == "low" else "high"
    if said is None:
        return "auto" if on else "high"
    if said == "auto" and not trained and not on:
        return "high"
    return said


def _resized(frames: Sequence[Grid], budget: int) -> Sights:
    """Plain resizing: one view of each picture, all of them as large as the budget lets."""
    full = [rows * columns for rows, columns in frames]
    parts = full if sum(full) <= budget else divide(budget, full)
    grids = tuple(shrink(frame, part) for frame, part in zip(frames, parts, strict=True))
    return Sights(grids, (False,) * len(grids), 0, 0)


def _beside(given: int, budget: int, frames: Sequence[Grid], grids: Sequence[Grid]) -> Sights:
    """First views beside zoomed ones of `given` tokens: smaller where the budget leaves them less."""
    tokens = [rows * columns for rows, columns in grids]
    left = budget - given
    if left < len(grids):
        raise InvalidValue(
            f"the zooms take {given} of a budget of {budget} tokens; {len(grids)} pictures need a token each",
            param="zooms",
        )
    if sum(tokens) > left:
        parts = divide(left, tokens)
        grids = [shrink(frame, part) for frame, part in zip(frames, parts, strict=True)]
    return Sights(tuple(grids), (False,) * len(grids), 0, 0)


def _check(wishes: Wishes, pictures: int) -> None:
    budget = wishes.budget
    if wishes.params is not None and wishes.visual_tokens is not None and wishes.params.budget is not None:
        raise InvalidValue("visual_tokens and a budget were given; give one", param="visual_tokens")
    if budget is not None and budget < 1:
        raise InvalidValue(f"visual_tokens is {budget}; at least 1 is needed", param="visual_tokens")
    if budget is not None and wishes.without_lod and budget < pictures:
        raise InvalidValue(
            f"visual_tokens is {budget}; {pictures} pictures need a token each at least; raise it, or send "
            "fewer pictures",
            param="visual_tokens",
        )
    if wishes.params is not None and not wishes.params.scorers:
        raise InvalidValue("scorers is empty; name at least one", param="scorers")
    if wishes.zooms is not None and len(wishes.zooms) != pictures:
        raise InvalidValue(
            f"zooms were given for {len(wishes.zooms)} pictures; the request has {pictures}", param="zooms"
        )


def check_zoom(region: Region, size: tuple[int, int]) -> None:
    """A zoomed view the caller gave, of a picture of `size` (width, height)."""
    x0, y0, x1, y1 = region.box
    if not (0 <= x0 < x1 <= size[0] and 0 <= y0 < y1 <= size[1]):
        raise InvalidValue(
            f"a zoom has the box {region.box}; it must lie inside the {size[0]}x{size[1]} picture",
            param="zooms",
        )
    if min(region.grid) < 1:
        raise InvalidValue(f"a zoom has a grid of {region.grid} tokens; at least 1 by 1", param="zooms")
