"""From the detail a request asks for to the first view of each image and the budget for zoomed views.

| request                  | views                                                                           |
|--------------------------|---------------------------------------------------------------------------------|
| nothing, or detail high  | full detail: one view, as the checkpoint's processor makes it                   |
| detail low               | the smallest global view the checkpoint accepts, alone                          |
| detail medium            | a global view and zoomed views, about a quarter of full detail's tokens         |
| detail auto              | the same, up to half, if the checkpoint was trained with zoomed views or lod on |
| lod on, or visual_tokens | as auto, for every checkpoint; a preview stops after the relevance pass         |
| lod off                  | full detail, except that low stays low; visual_tokens then resizes images       |
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from saccade.encoder.prompt_layout import insert_zoomed_views
from saccade.errors import InvalidValue
from saccade.inputs.image_processor import ImageProcessor, global_view
from saccade.lod.checkpoint_views import CheckpointViews
from saccade.lod.types import Detail, Grid, LodParams, Region, ViewRule
from saccade.request import Media, Request, ZoomRequest

ZOOMING: tuple[Detail, ...] = ("auto", "medium")
MEDIUM = 0.25  # of the tokens of full detail
AUTO = (0.25, 0.5)  # of full detail's tokens: of the global view, and of all views
PLAIN = 1.25  # an image up to this multiple of its budget stays at full detail
LEAST_LOOK = 32  # fewest tokens of a global view that is followed by zoomed views
# (budget from which it holds, tokens reserved for zoomed views); the global view gets the rest
RESERVES = ((512, 256), (128, 64), (60, 24), (0, 16))


@dataclass(frozen=True)
class DetailRequest:
    """The detail settings of one request."""

    params: LodParams | None = None  # None: not given
    lod: bool | None = None
    visual_tokens: int | None = None  # of all images together
    preview_only: bool = False  # return the chosen views, generate nothing
    details: tuple[Detail | None, ...] = ()  # per image; None: not given

    @property
    def budget(self) -> int | None:
        given = self.visual_tokens
        return given if given is not None or self.params is None else self.params.budget

    @property
    def lod_disabled(self) -> bool:
        """Whether the request switched LOD off explicitly."""
        return self.lod is not None and not self.lod

    @property
    def zooms(self) -> tuple[tuple[Region, ...], ...] | None:
        return None if self.params is None else self.params.zooms


@dataclass(frozen=True)
class FirstViews:
    grids: tuple[Grid, ...]  # of the first views
    zoomable: tuple[bool, ...]
    budget: int  # tokens of the zoomable images, first views included
    most_views: int

    def most_tokens(self, framing: int) -> int:
        """Upper bound on the tokens of all views; `framing`: tokens around each zoomed view."""
        tokens = [rows * columns for rows, columns in self.grids]
        looked = sum(count for count, free in zip(tokens, self.zoomable, strict=True) if free)
        left = max(self.budget - looked, 0) if looked else 0
        return sum(tokens) + left + min(self.most_views, left) * framing


@lru_cache(maxsize=256)  # called twice per request, often with equal arguments
def plan_first_views(
    frames: tuple[Grid, ...], detail_req: DetailRequest, views: CheckpointViews
) -> FirstViews:
    """`frames`: the token grid of each image at full detail."""
    _check(detail_req, len(frames))
    details = [_resolve_detail(requested, detail_req, views.trained) for requested in detail_req.details]
    full = [rows * columns for rows, columns in frames]
    grids = list(frames)
    fixed = sum(tokens for tokens, detail in zip(full, details, strict=True) if detail == "high")
    free = [i for i, detail in enumerate(details) if detail != "high"]
    budget = detail_req.budget
    if budget is not None:
        if detail_req.lod_disabled:
            return _resized(frames, budget)
        if budget - fixed < len(free):
            raise InvalidValue(
                f"visual_tokens is {budget}; {len(free)} images need a token each beside the {fixed} of "
                "those at full detail; raise it, or send fewer images",
                param="visual_tokens",
            )
    params = detail_req.params or LodParams()
    parts = (
        divide(budget - fixed, [full[i] for i in free]) if budget is not None and free else [0] * len(free)
    )
    spent, zoomable = 0, [False] * len(frames)
    for i, part in zip(free, parts, strict=True):
        asked = LodParams(detail=details[i], budget=part if budget is not None else None)
        first = plan_global_view(frames[i], asked, views.rule)
        grids[i] = first.grid
        zoomable[i] = details[i] in ZOOMING and grids[i] != frames[i] and params.zooms is None
        spent += first.budget if zoomable[i] else 0
    if detail_req.zooms and budget is not None:
        given = sum(region.tokens for regions in detail_req.zooms for region in regions)
        return _beside_given_zooms(given, budget, frames, grids)
    looked = [grids[i][0] * grids[i][1] for i in range(len(frames)) if zoomable[i]]
    if spent - sum(looked) < min(views.rule.zoom_tokens, default=1):  # no zoomed view fits
        zoomable = [False] * len(frames)
    most = views.rule.most_views * sum(zoomable)
    return FirstViews(tuple(grids), tuple(zoomable), spent if any(zoomable) else 0, most)


def _resolve_detail(requested: Detail | None, detail_req: DetailRequest, trained: bool) -> Detail:
    params = detail_req.params
    if requested is None and params is not None:
        requested = params.detail
    if detail_req.lod_disabled:
        return "low" if requested == "low" else "high"
    given = params is not None or detail_req.budget is not None
    on = given or detail_req.lod or detail_req.preview_only
    if requested is None:
        return "auto" if on else "high"
    if requested == "auto" and not trained and not on:
        return "high"
    return requested


def _resized(frames: Sequence[Grid], budget: int) -> FirstViews:
    """Plain resizing: one view per image, as large as the budget allows."""
    full = [rows * columns for rows, columns in frames]
    parts = full if sum(full) <= budget else divide(budget, full)
    grids = tuple(shrink(frame, part) for frame, part in zip(frames, parts, strict=True))
    return FirstViews(grids, (False,) * len(grids), 0, 0)


def _beside_given_zooms(given: int, budget: int, frames: Sequence[Grid], grids: Sequence[Grid]) -> FirstViews:
    """First views beside the caller's zoomed views of `given` tokens, shrunk to the rest of the budget."""
    tokens = [rows * columns for rows, columns in grids]
    left = budget - given
    if left < len(grids):
        raise InvalidValue(
            f"the zooms take {given} of a budget of {budget} tokens; {len(grids)} images need a token each",
            param="zooms",
        )
    if sum(tokens) > left:
        parts = divide(left, tokens)
        grids = [shrink(frame, part) for frame, part in zip(frames, parts, strict=True)]
    return FirstViews(tuple(grids), (False,) * len(grids), 0, 0)


def _check(detail_req: DetailRequest, images: int) -> None:
    params, budget, zooms = detail_req.params, detail_req.budget, detail_req.zooms
    if params is not None and params.budget is not None and detail_req.visual_tokens is not None:
        raise InvalidValue("visual_tokens and a budget were given; give one", param="visual_tokens")
    if budget is not None and budget < 1:
        raise InvalidValue(f"visual_tokens is {budget}; at least 1 is needed", param="visual_tokens")
    if budget is not None and detail_req.lod_disabled and budget < images:
        raise InvalidValue(
            f"visual_tokens is {budget}; {images} images need a token each at least; raise it, or send "
            "fewer images",
            param="visual_tokens",
        )
    if params is not None and not params.scorers:
        raise InvalidValue("scorers is empty; name at least one", param="scorers")
    if zooms is not None and len(zooms) != images:
        raise InvalidValue(
            f"zooms were given for {len(zooms)} images; the request has {images}", param="zooms"
        )


def check_zoom_region(region: Region, size: tuple[int, int]) -> None:
    """Reject a caller's zoomed view that does not fit the image of `size` (width, height)."""
    x0, y0, x1, y1 = region.box
    if not (0 <= x0 < x1 <= size[0] and 0 <= y0 < y1 <= size[1]):
        raise InvalidValue(
            f"a zoom has the box {region.box}; it must lie inside the {size[0]}x{size[1]} image",
            param="zooms",
        )
    if min(region.grid) < 1:
        raise InvalidValue(f"a zoom has a grid of {region.grid} tokens; at least 1 by 1", param="zooms")


class GlobalView(NamedTuple):
    budget: int  # visual tokens of the image, zoomed views included
    grid: Grid  # of the global view; the full-detail grid if the image is not reduced


def plan_global_view(frame: Grid, params: LodParams, rule: ViewRule) -> GlobalView:
    """The global view of one image; `frame` is its token grid at full detail. It keeps to a budget."""
    full = frame[0] * frame[1]
    if params.budget is not None:
        part = min(params.budget, full)
    else:
        part = full if params.detail == "high" else _part(full, params, rule)
    if full <= part:
        return GlobalView(part, frame)
    least, most = rule.global_tokens
    if params.detail == "low":
        look = min(part, most)
    elif params.open_ended:
        look = min(max(int(full * AUTO[0]), least), most)
    else:
        look = _look(part, rule)
    return GlobalView(part, shrink(frame, min(look, part)))


def _part(tokens: int, params: LodParams, rule: ViewRule) -> int:
    """Token budget of an image of `tokens` at full detail when the request gives no budget."""
    if params.detail == "low":
        return min(tokens, rule.global_tokens[0])
    if params.detail == "medium":
        part = max(int(tokens * MEDIUM), rule.global_tokens[0])
    else:
        part = max(int(tokens * AUTO[1]), rule.global_tokens[0] + min(rule.zoom_tokens, default=0))
    return tokens if tokens <= part * PLAIN else part


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


@dataclass(frozen=True)
class PlaceholderIds:
    """Token ids that decide where views are inserted."""

    image: int | None  # the placeholder
    before: tuple[int, ...]  # ids around a view
    after: tuple[int, ...]
    ends: Collection[int]  # ends of a chat turn


@dataclass(frozen=True)
class ViewPlanner:
    """Plans the views of a request for one checkpoint."""

    views: CheckpointViews
    processing: ImageProcessor
    ids: PlaceholderIds

    def cost(self, sizes: Sequence[tuple[int, int]], detail_req: DetailRequest) -> int:
        """Upper bound on the tokens of images of these sizes (width, height), framing ids included."""
        framing = len(self.ids.before) + len(self.ids.after)
        given = [region for regions in detail_req.zooms or () for region in regions]
        chosen = sum(region.tokens + framing for region in given)
        return self._plan(sizes, detail_req).most_tokens(framing) + chosen

    def apply(self, request: Request, detail_req: DetailRequest) -> Request:
        images = [item for item in request.media if request.prompt[item.placeholder] == self.ids.image]
        if not images:
            reject_without_images(detail_req)
            return request
        seen = self._plan([(item.view.box[2], item.view.box[3]) for item in images], detail_req)
        first = {item.placeholder: _first(item, grid) for item, grid in zip(images, seen.grids, strict=True)}
        media = tuple(first.get(item.placeholder, item) for item in request.media)
        plain = all(item.full_grid is None for item in media) and detail_req.zooms is None
        request = msgspec.structs.replace(
            request, media=media, registered=self.views.registered and not plain
        )
        if detail_req.zooms is not None:
            return self._given(request, detail_req, images)
        free = dict(zip((item.placeholder for item in images), seen.zoomable, strict=True))
        budget = seen.budget
        if detail_req.preview_only:  # a preview returns maps of every image, also of those at full detail
            budget += sum(item.view.tokens for item in media if not free.get(item.placeholder, True))
            free = dict.fromkeys(free, True)
        if not any(free.values()):
            return request
        zooming = ZoomRequest(
            params=detail_req.params or LodParams(),
            placeholders=tuple(slot for slot, may in free.items() if may),
            budget=budget,
            most_views=seen.most_views,
            at=_after_question(request, self.ids.ends),
            before=self.ids.before,
            after=self.ids.after,
            preview_only=detail_req.preview_only,
        )
        return msgspec.structs.replace(request, zooming=zooming)

    def _plan(self, sizes: Sequence[tuple[int, int]], detail_req: DetailRequest) -> FirstViews:
        frames = tuple(self.processing.token_grid(*size) for size in sizes)
        return plan_first_views(frames, detail_req, self.views)

    def _given(self, request: Request, detail_req: DetailRequest, images: Sequence[Media]) -> Request:
        """Insert the zoomed views that the caller chose."""
        chosen = {
            item.placeholder: regions for item, regions in zip(images, detail_req.zooms or (), strict=True)
        }
        for item in images:
            for region in chosen[item.placeholder]:
                check_zoom_region(region, (item.view.box[2], item.view.box[3]))
        place = ZoomRequest(
            params=LodParams(),
            placeholders=tuple(chosen),
            budget=0,
            most_views=sum(map(len, chosen.values())),
            at=_after_question(request, self.ids.ends),
            before=self.ids.before,
            after=self.ids.after,
        )
        return insert_zoomed_views(msgspec.structs.replace(request, zooming=place), chosen)


def _first(item: Media, grid: tuple[int, int]) -> Media:
    if grid == item.view.token_grid:
        return item
    return msgspec.structs.replace(item, view=global_view(item.view, grid), full_grid=item.view.token_grid)


def _after_question(request: Request, ends: Collection[int]) -> int:
    """Index of the end of the last turn if all media precede it, otherwise the end of the prompt."""
    last = max(item.placeholder for item in request.media)
    places = range(len(request.prompt) - 1, last, -1)
    return next((place for place in places if request.prompt[place] in ends), len(request.prompt))


def reject_without_images(detail_req: DetailRequest) -> None:
    """Reject detail settings that need an image in a request without one."""
    if detail_req.preview_only:
        raise InvalidValue("there is no image to look at; send one", param="messages")
    if detail_req.visual_tokens is not None or detail_req.zooms:
        name = "visual_tokens" if detail_req.visual_tokens is not None else "zooms"
        text = f"{name} was given, but the request has no image; send one, or leave it out"
        raise InvalidValue(text, param=name)
